"""A place in a text that is still coming.

Every step waits (yields) until the text so far decides it, so that how the text was cut into pieces decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias, TypeVar

ResultT = TypeVar("ResultT")
ParseSteps: TypeAlias = Generator[None, None, ResultT]
TextSink: TypeAlias = Callable[[str], None]


class CharPosition(Enum):
    """Where a character stands: in a value, at its end, or behind it."""

    INSIDE = auto()
    LAST = auto()
    OUTSIDE = auto()


class TextScanner:
    """The text so far, the place that was read up to, and the place of the last `mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._mark: int | None = None  # nothing before the place is needed while there is none
        self._input_ended = False
        self._lookahead_truncated = False  # whether the text ended within what was last looked for

    def feed(self, text: str) -> None:
        """More text came. What lies before the mark is forgotten."""
        kept = self._position if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._position -= kept
        self._mark = None if self._mark is None else 0

    def finish(self) -> None:
        """No more text comes."""
        self._input_ended = True

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was read and no more comes."""
        return self._input_ended and self._position == len(self._text)

    @property
    def is_truncated(self) -> bool:
        """Whether the text ended where more was looked for: at its end, or in the middle of it."""
        return self.is_exhausted or (self._input_ended and self._lookahead_truncated)

    def skip_all(self) -> None:
        """Read over everything that is left."""
        self._position = len(self._text)

    def mark(self, chars_back: int = 0) -> None:
        """Remember this place, or one `back` before it: `taken` is what was read since."""
        self._mark = self._position - chars_back

    def clear_mark(self) -> None:
        """Forget the mark."""
        self._mark = None

    @property
    def text_since_mark(self) -> str:
        """What was read since the mark."""
        assert self._mark is not None
        return self._text[self._mark : self._position]

    def take(self, count: int) -> str:
        """Read over the next characters, which are there."""
        start = self._position
        self._position += count
        return self._text[start : self._position]

    def unread(self, text: str) -> None:
        """Go back over a text that was just read."""
        self._position -= len(text)

    def peek(self, count: int = 1) -> ParseSteps[str]:
        """The next characters; fewer where the text ends before."""
        while len(self._text) - self._position < count and not self._input_ended:
            yield
        return self._text[self._position : self._position + count]

    def peek_any(self, *texts: str) -> ParseSteps[str | None]:
        """Which of these texts comes next, without reading over it."""
        self._lookahead_truncated = False
        for size in range(1, max(map(len, texts)) + 1):
            ahead = yield from self.peek(size)
            if ahead in texts:
                return ahead
            self._lookahead_truncated = len(ahead) < size
            if self._lookahead_truncated or not any(text.startswith(ahead) for text in texts):
                return None
        return None

    def skip_any(self, *texts: str) -> ParseSteps[str | None]:
        """Read over one of these texts if one comes next."""
        found = yield from self.peek_any(*texts)
        self.take(len(found or ""))
        return found

    def take_while(self, predicate: Callable[[str], bool]) -> ParseSteps[str]:
        """Read the characters that belong together."""
        found = ""
        while (char := (yield from self.peek())) and predicate(char):
            found += self.take(1)
        return found

    def take_whitespace(self) -> ParseSteps[str]:
        return (yield from self.take_while(str.isspace))

    def stream_until(self, *endings: str, sink: TextSink) -> ParseSteps[str | None]:
        """Give the text before the first of these endings to `sink` as it comes, and read over the ending."""
        while True:
            place, ending = self._find_first(endings)
            if ending:
                self._emit(place - self._position, sink)
                self.take(len(ending))
                return ending
            held = 0 if self._input_ended else find_partial_match_length(self._text[self._position :], endings)
            self._emit(len(self._text) - self._position - held, sink)
            if self._input_ended:
                return None
            yield

    def _find_first(self, texts: tuple[str, ...]) -> tuple[int, str]:
        """The place of the first of these texts, and which it is; "" where none came yet."""
        first, found = len(self._text), ""
        for text in texts:
            place = self._text.find(text, self._position, first + len(text) - 1)
            if place >= 0:
                first, found = place, text
        return first, found

    def stream_value(self, classify: Callable[[str], CharPosition], sink: TextSink) -> ParseSteps[CharPosition]:
        """Give characters to `sink` as they come, until `judge` says that one is the last or stands outside."""
        while True:
            place, verdict = self._position, CharPosition.INSIDE
            while verdict is CharPosition.INSIDE and place < len(self._text):
                verdict = classify(self._text[place])
                place += verdict is not CharPosition.OUTSIDE
            self._emit(place - self._position, sink)
            if verdict is not CharPosition.INSIDE or self._input_ended:
                return verdict
            yield

    def _emit(self, count: int, sink: TextSink) -> None:
        if count:
            sink(self.take(count))


def find_partial_match_length(text: str, endings: tuple[str, ...]) -> int:
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


def is_name_char(char: str) -> bool:
    """Whether a tool's name may hold this character."""
    return char.isalnum() or char in "_.-"
