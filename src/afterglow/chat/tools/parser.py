"""What the readers of all families share: parts, words and the whitespace around calls.

Whitespace beside a call only separates: it is shown only when words stand on both sides of the calls, and then as it
stood before the first of them, or, if none stood there, after the last.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from afterglow.chat.parts import CallPart, Part, Reasoning, Text
from afterglow.chat.tools.scanner import Scanner, Steps
from afterglow.chat.tools.tool import Tool

FENCE = "```"
NewId = Callable[[], str]


def new_id() -> str:
    """An id for a call, as OpenAI's look."""
    return "call_" + secrets.token_hex(12)


class Parser:
    """A reader whose family writes `read`: steps over a text that is still coming."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId = new_id) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.scanner = Scanner()
        self._new_id = new_id
        self._parts: list[Part] = []
        self._calls = 0
        self._speech = Speech(self._parts)
        self._steps = self.read()
        self._running = True
        self._advance()

    def read(self) -> Steps[None]:
        """Read the whole answer."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self.scanner.add(text)
        self._advance()
        return self._drained()

    def finish(self) -> list[Part]:
        """The rest, once no more text comes."""
        self.scanner.end()
        self._advance()
        self._speech.end()
        return self._drained()

    def say(self, text: str) -> None:
        """Text that the model says."""
        self._speech.say(text)

    def think(self, text: str) -> None:
        """Text that the model thinks."""
        self._parts.append(Reasoning(text))

    def begin(self, name: str, id: str | None = None) -> None:
        """A call begins."""
        self.scanner.release()
        self._speech.interrupt()
        self._parts.append(CallPart(self._calls, id=id or self._new_id(), name=name))
        self._calls += 1

    def argue(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self._parts.append(CallPart(self._calls - 1, text))

    def give_back(self, *, marked: bool) -> None:
        """What was read since the mark is no call: it is text, unless it broke off behind a marker."""
        if marked and self.scanner.broke_off:
            self.scanner.drop()
        else:
            self.say(self.scanner.taken)
        self.scanner.release()

    def fence(self, language: str) -> Steps[str | None]:
        """Read over a fence that models now and then put around bare calls."""
        fence = yield from self.scanner.skip(FENCE)
        if fence:
            yield from self.scanner.skip(language)
            yield from self.scanner.spaces()
        return fence

    def _advance(self) -> None:
        try:
            if self._running:
                next(self._steps)
        except StopIteration:
            self._running = False

    def _drained(self) -> list[Part]:
        parts = merged(self._parts)
        self._parts.clear()
        return parts


class Speech:
    """What the model says, without the whitespace that only separates calls."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._said = False
        self._beside_call = False
        self._before = ""  # whitespace that no word followed yet
        self._after = ""  # the same, after a call

    def say(self, text: str) -> None:
        words = text.lstrip()
        space = text[: len(text) - len(words)]
        if self._beside_call:
            self._after += space
        else:
            self._before += space
        if not words:
            return
        shown = words.rstrip()
        self._parts.append(Text(self._space() + shown))
        self._said, self._beside_call = True, False
        self._before, self._after = words[len(shown) :], ""

    def interrupt(self) -> None:
        """A call begins here."""
        self._before = self._before or self._after
        self._beside_call, self._after = True, ""

    def end(self) -> None:
        """Nothing follows: whitespace after the last word belongs to it, whitespace beside a call to nobody."""
        if not self._beside_call and self._before:
            self._parts.append(Text(self._before))
        self._before = self._after = ""

    def _space(self) -> str:
        if self._beside_call:
            return (self._before or self._after) if self._said else ""
        return self._before


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same parts with neighbours of one kind put together."""
    whole: list[Part] = []
    for part in parts:
        match (whole[-1] if whole else None), part:
            case Text(before), Text(after):
                whole[-1] = Text(before + after)
            case Reasoning(before), Reasoning(after):
                whole[-1] = Reasoning(before + after)
            case CallPart(index, before, id, name), CallPart(same, after, None, None) if index == same:
                whole[-1] = CallPart(index, before + after, id, name)
            case _:
                whole.append(part)
    return whole
