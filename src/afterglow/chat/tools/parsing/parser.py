"""What the readers of all families share: parts, words and the whitespace around calls.

Whitespace beside a call only separates: it is shown only when words stand on both sides of the calls, and then as it
stood before the first of them, or, if none stood there, after the last.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.tools.parsing.scanner import ParseSteps, TextScanner
from afterglow.chat.tools.tool import Tool

FENCE = "```"
CallIdFactory = Callable[[], str]


def generate_call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return "call_" + secrets.token_hex(12)


class ToolParser:
    """A reader whose family writes `read`: steps over a text that is still coming."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory = generate_call_id) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.scanner = TextScanner()
        self._new_id = new_id
        self._parts: list[OutputPart] = []
        self._call_count = 0
        self._content_parser = ContentParser(self._parts)
        self._steps = self.parse()
        self._running = True
        self._advance()

    def parse(self) -> ParseSteps[None]:
        """Read the whole answer."""
        raise NotImplementedError

    def feed(self, text: str) -> list[OutputPart]:
        """The parts that are certain now."""
        self.scanner.feed(text)
        self._advance()
        return self._drain_parts()

    def finish(self) -> list[OutputPart]:
        """The rest, once no more text comes."""
        self.scanner.finish()
        self._advance()
        self._content_parser.finish()
        return self._drain_parts()

    def emit_text(self, text: str) -> None:
        """Text that the model says."""
        self._content_parser.add_text(text)

    def emit_reasoning(self, text: str) -> None:
        """Text that the model thinks."""
        self._parts.append(ReasoningDelta(text))

    def begin_call(self, name: str, id: str | None = None) -> None:
        """A call begins."""
        self.scanner.clear_mark()
        self._content_parser.begin_call()
        self._parts.append(ToolCallDelta(self._call_count, id=id or self._new_id(), name=name))
        self._call_count += 1

    def emit_arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self._parts.append(ToolCallDelta(self._call_count - 1, text))

    def reject_call(self, *, after_marker: bool) -> None:
        """What was read since the mark is no call: it is text, unless it broke off behind a marker."""
        if after_marker and self.scanner.is_truncated:
            self.scanner.skip_all()
        else:
            self.emit_text(self.scanner.text_since_mark)
        self.scanner.clear_mark()

    def skip_fence(self, language: str) -> ParseSteps[str | None]:
        """Read over a fence that models now and then put around bare calls."""
        fence = yield from self.scanner.skip_any(FENCE)
        if fence:
            yield from self.scanner.skip_any(language)
            yield from self.scanner.take_whitespace()
        return fence

    def _advance(self) -> None:
        try:
            if self._running:
                next(self._steps)
        except StopIteration:
            self._running = False

    def _drain_parts(self) -> list[OutputPart]:
        parts = merge_parts(self._parts)
        self._parts.clear()
        return parts


class ContentParser:
    """What the model says, without the whitespace that only separates calls."""

    def __init__(self, parts: list[OutputPart]) -> None:
        self._parts = parts
        self._has_text = False
        self._after_call = False
        self._pending_space = ""  # whitespace that no word followed yet
        self._space_after_call = ""  # the same, after a call

    def add_text(self, text: str) -> None:
        words = text.lstrip()
        space = text[: len(text) - len(words)]
        if self._after_call:
            self._space_after_call += space
        else:
            self._pending_space += space
        if not words:
            return
        shown = words.rstrip()
        self._parts.append(TextDelta(self._get_leading_space() + shown))
        self._has_text, self._after_call = True, False
        self._pending_space, self._space_after_call = words[len(shown) :], ""

    def begin_call(self) -> None:
        """A call begins here."""
        self._pending_space = self._pending_space or self._space_after_call
        self._after_call, self._space_after_call = True, ""

    def finish(self) -> None:
        """Nothing follows: whitespace after the last word belongs to it, whitespace beside a call to nobody."""
        if not self._after_call and self._pending_space:
            self._parts.append(TextDelta(self._pending_space))
        self._pending_space = self._space_after_call = ""

    def _get_leading_space(self) -> str:
        if self._after_call:
            return (self._pending_space or self._space_after_call) if self._has_text else ""
        return self._pending_space


def merge_parts(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The same parts with neighbours of one kind put together."""
    whole: list[OutputPart] = []
    for part in parts:
        match (whole[-1] if whole else None), part:
            case TextDelta(before), TextDelta(after):
                whole[-1] = TextDelta(before + after)
            case ReasoningDelta(before), ReasoningDelta(after):
                whole[-1] = ReasoningDelta(before + after)
            case ToolCallDelta(index, before, id, name), ToolCallDelta(same, after, None, None) if index == same:
                whole[-1] = ToolCallDelta(index, before + after, id, name)
            case _:
                whole.append(part)
    return whole
