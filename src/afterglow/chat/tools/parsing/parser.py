"""Base class of all tool-call parsers: output parts, text, and whitespace around calls.

Whitespace next to a call is a separator: it is emitted only if text precedes and follows the calls. Then it is the
whitespace before the first call, or, if there is none, the whitespace after the last.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.tools.parsing.json_values import escape_json_text, to_json_string
from afterglow.chat.tools.parsing.scanner import ParseSteps, TextScanner
from afterglow.chat.tools.tool import Tool

FENCE = "```"
CallIdFactory = Callable[[], str]


def generate_call_id() -> str:
    """Return a new call id in OpenAI's format."""
    return "call_" + secrets.token_hex(12)


class ToolParser:
    """Incremental parser. A family implements `parse`, a generator that yields while it waits for more text."""

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
        """Parse the whole completion."""
        raise NotImplementedError

    def feed(self, text: str) -> list[OutputPart]:
        """Add text and return the parts that it decides."""
        self.scanner.feed(text)
        self._advance()
        return self._drain_parts()

    def finish(self, *, truncated: bool = False) -> list[OutputPart]:
        """Return the remaining parts after the last text. Text that was held back because it may begin a marker is
        dropped if the output is truncated directly after a call."""
        is_marker = truncated and self._content_parser.is_after_call
        self.scanner.finish()
        self._advance()
        self._content_parser.finish()
        return [part for part in self._drain_parts() if not (is_marker and isinstance(part, TextDelta))]

    def emit_text(self, text: str) -> None:
        """Emit text of the answer."""
        self._content_parser.add_text(text)

    def emit_reasoning(self, text: str) -> None:
        """Emit reasoning text."""
        self._parts.append(ReasoningDelta(text))

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Emit the start of a call."""
        self.scanner.clear_mark()
        self._content_parser.begin_call()
        self._parts.append(ToolCallDelta(self._call_count, id=id or self._new_id(), name=name))
        self._call_count += 1

    def emit_arguments(self, text: str) -> None:
        """Emit a piece of the current call's arguments."""
        if text:
            self._parts.append(ToolCallDelta(self._call_count - 1, text))

    def stream_string(self, end: str) -> ParseSteps[bool]:
        """Emit the text up to `end` as a JSON string of the arguments; return False if it is truncated."""
        self.emit_arguments('"')
        ending = yield from self.scanner.stream_until(
            end, sink=lambda piece: self.emit_arguments(escape_json_text(piece))
        )
        self.emit_arguments('"' if ending else "")
        return bool(ending)

    def reject_call(self, *, after_marker: bool) -> None:
        """Emit the text since the mark as text: it is not a call. Drop it if it was truncated after a marker."""
        if after_marker and self.scanner.is_truncated:
            self.scanner.skip_all()
        else:
            self.emit_text(self.scanner.text_since_mark)
        self.scanner.clear_mark()

    def skip_fence(self, language: str) -> ParseSteps[str | None]:
        """Skip a code fence, which models sometimes put around untagged calls; return it if there is one."""
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


class ArgumentsBuilder:
    """Emits arguments that a model writes one by one as the text of one JSON object."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._keys: set[str] = set()
        self._text_open = False

    def begin_argument(self, name: str) -> bool:
        """Begin a member; return False for a duplicate key (the first value is used)."""
        if name in self._keys:
            return False
        self._parser.emit_arguments((", " if self._keys else "{") + to_json_string(name) + ": ")
        self._keys.add(name)
        return True

    def add_json(self, text: str) -> None:
        """Emit the member's value as JSON, or the fragment of a truncated value."""
        self._parser.emit_arguments(text)

    def add_text(self, piece: str) -> None:
        """Emit a piece of the member's string value."""
        self._parser.emit_arguments(escape_json_text(piece) if self._text_open else '"' + escape_json_text(piece))
        self._text_open = True

    def end_text(self, *, complete: bool) -> None:
        """End the string value; leave it open if it was truncated."""
        if not self._text_open:
            self._parser.emit_arguments('"')
        if complete:
            self._parser.emit_arguments('"')
        self._text_open = False

    def finish(self) -> None:
        """End the object."""
        self._parser.emit_arguments("}" if self._keys else "{}")


class ContentParser:
    """Emits the text of an answer without the whitespace that separates calls."""

    def __init__(self, parts: list[OutputPart]) -> None:
        self._parts = parts
        self._has_text = False
        self.is_after_call = False  # no text since the last call
        self._pending_space = ""  # whitespace not yet followed by text
        self._space_after_call = ""  # the same, after a call

    def add_text(self, text: str) -> None:
        content = text.lstrip()
        space = text[: len(text) - len(content)]
        if self.is_after_call:
            self._space_after_call += space
        else:
            self._pending_space += space
        if not content:
            return
        stripped, leading_space = content.rstrip(), self._pending_space
        if self.is_after_call:
            leading_space = (self._pending_space or self._space_after_call) if self._has_text else ""
        self._parts.append(TextDelta(leading_space + stripped))
        self._has_text, self.is_after_call = True, False
        self._pending_space, self._space_after_call = content[len(stripped) :], ""

    def begin_call(self) -> None:
        """Note the start of a call."""
        self._pending_space = self._pending_space or self._space_after_call
        self.is_after_call, self._space_after_call = True, ""

    def finish(self) -> None:
        """End the answer: emit whitespace after the last text, drop whitespace next to a call."""
        if not self.is_after_call and self._pending_space:
            self._parts.append(TextDelta(self._pending_space))
        self._pending_space = self._space_after_call = ""


def merge_parts(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """Merge adjacent parts of the same kind."""
    merged: list[OutputPart] = []
    for part in parts:
        match (merged[-1] if merged else None), part:
            case TextDelta(before), TextDelta(after):
                merged[-1] = TextDelta(before + after)
            case ReasoningDelta(before), ReasoningDelta(after):
                merged[-1] = ReasoningDelta(before + after)
            case ToolCallDelta(index, before, id, name), ToolCallDelta(same, after, None, None) if index == same:
                merged[-1] = ToolCallDelta(index, before + after, id, name)
            case _:
                merged.append(part)
    return merged
