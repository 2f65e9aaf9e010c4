"""A place in a text that is still coming.

Every step waits (yields) until the text so far decides it, so that how the text was cut into pieces decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
Sink: TypeAlias = Callable[[str], None]


class Verdict(Enum):
    """Where a character stands: in a value, at its end, or behind it."""

    INSIDE = auto()
    LAST = auto()
    OUTSIDE = auto()


class Scanner:
    """The text so far, the place that was read up to, and the place of the last `mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._mark: int | None = None  # nothing before the place is needed while there is none
        self._ended = False
        self._short = False  # whether the text ended within what was last looked for

    def add(self, text: str) -> None:
        """More text came. What lies before the mark is forgotten."""
        kept = self._place if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._place -= kept
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    @property
    def finished(self) -> bool:
        """Whether everything was read and no more comes."""
        return self._ended and self._place == len(self._text)

    @property
    def broke_off(self) -> bool:
        """Whether the text ended where more was looked for: at its end, or in the middle of it."""
        return self.finished or (self._ended and self._short)

    def drop(self) -> None:
        """Read over everything that is left."""
        self._place = len(self._text)

    def mark(self, back: int = 0) -> None:
        """Remember this place, or one `back` before it: `taken` is what was read since."""
        self._mark = self._place - back

    def release(self) -> None:
        """Forget the mark."""
        self._mark = None

    @property
    def taken(self) -> str:
        """What was read since the mark."""
        assert self._mark is not None
        return self._text[self._mark : self._place]

    def take(self, count: int) -> str:
        """Read over the next characters, which are there."""
        start = self._place
        self._place += count
        return self._text[start : self._place]

    def unread(self, text: str) -> None:
        """Go back over a text that was just read."""
        self._place -= len(text)

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters; fewer where the text ends before."""
        while len(self._text) - self._place < count and not self._ended:
            yield
        return self._text[self._place : self._place + count]

    def comes(self, *texts: str) -> Steps[str | None]:
        """Which of these texts comes next, without reading over it."""
        self._short = False
        for size in range(1, max(map(len, texts)) + 1):
            ahead = yield from self.peek(size)
            if ahead in texts:
                return ahead
            self._short = len(ahead) < size
            if self._short or not any(text.startswith(ahead) for text in texts):
                return None
        return None

    def skip(self, *texts: str) -> Steps[str | None]:
        """Read over one of these texts if one comes next."""
        found = yield from self.comes(*texts)
        self.take(len(found or ""))
        return found

    def run(self, belongs: Callable[[str], bool]) -> Steps[str]:
        """Read the characters that belong together."""
        found = ""
        while (char := (yield from self.peek())) and belongs(char):
            found += self.take(1)
        return found

    def spaces(self) -> Steps[str]:
        return (yield from self.run(str.isspace))

    def until(self, *endings: str, sink: Sink) -> Steps[str | None]:
        """Give the text before the first of these endings to `sink` as it comes, and read over the ending."""
        while True:
            place, ending = self._first(endings)
            if ending:
                self._give(place - self._place, sink)
                self.take(len(ending))
                return ending
            held = 0 if self._ended else beginning_of(self._text[self._place :], endings)
            self._give(len(self._text) - self._place - held, sink)
            if self._ended:
                return None
            yield

    def _first(self, texts: tuple[str, ...]) -> tuple[int, str]:
        """The place of the first of these texts, and which it is; "" where none came yet."""
        first, found = len(self._text), ""
        for text in texts:
            place = self._text.find(text, self._place, first + len(text) - 1)
            if place >= 0:
                first, found = place, text
        return first, found

    def scan(self, judge: Callable[[str], Verdict], sink: Sink) -> Steps[Verdict]:
        """Give characters to `sink` as they come, until `judge` says that one is the last or stands outside."""
        while True:
            place, verdict = self._place, Verdict.INSIDE
            while verdict is Verdict.INSIDE and place < len(self._text):
                verdict = judge(self._text[place])
                place += verdict is not Verdict.OUTSIDE
            self._give(place - self._place, sink)
            if verdict is not Verdict.INSIDE or self._ended:
                return verdict
            yield

    def _give(self, count: int, sink: Sink) -> None:
        if count:
            sink(self.take(count))


def beginning_of(text: str, endings: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of one of these endings.

    >>> beginning_of("Hello <tool", ("<tool_call>",))
    5
    """
    longest = min(len(text), max(map(len, endings)) - 1)
    for size in range(longest, 0, -1):
        tail = text[len(text) - size :]
        if any(ending.startswith(tail) for ending in endings):
            return size
    return 0


def is_of_name(char: str) -> bool:
    """Whether a tool's name may hold this character."""
    return char.isalnum() or char in "_.-"
