"""Scanner of a text that arrives in pieces.

Every step yields until the text so far decides it, so that the result does not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeAlias, TypeVar

from afterglow.chat.output.reasoning import find_overlap

ResultT = TypeVar("ResultT")
ParseSteps: TypeAlias = Generator[None, None, ResultT]
TextSink: TypeAlias = Callable[[str], None]


class CharPosition(Enum):
    """Position of a character: inside a value, the last one of it, or outside."""

    INSIDE = auto()
    LAST = auto()
    OUTSIDE = auto()


class TextScanner:
    """Buffered text with a read position and an optional mark."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._mark: int | None = None  # without a mark, text before the position is dropped
        self._input_ended = False
        self._lookahead_truncated = False  # the input ended inside the last `peek_any`

    def feed(self, text: str) -> None:
        """Add text. Drop the text before the mark, or before the position if there is no mark."""
        start = self._position if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._position -= start
        self._mark = None if self._mark is None else 0

    def finish(self) -> None:
        """Note the end of the input."""
        self._input_ended = True

    @property
    def is_exhausted(self) -> bool:
        """Whether the input ended and all of it was read."""
        return self._input_ended and self._position == len(self._text)

    @property
    def is_truncated(self) -> bool:
        """Whether the input ended at the position or inside the last `peek_any`."""
        return self.is_exhausted or (self._input_ended and self._lookahead_truncated)

    def skip_all(self) -> None:
        """Skip the rest of the buffer."""
        self._position = len(self._text)

    def mark(self, chars_back: int = 0) -> None:
        """Set the mark at the position, or `chars_back` before it. `text_since_mark` starts there."""
        self._mark = self._position - chars_back

    def clear_mark(self) -> None:
        """Remove the mark."""
        self._mark = None

    @property
    def text_since_mark(self) -> str:
        """Text read since the mark."""
        assert self._mark is not None
        return self._text[self._mark : self._position]

    def take(self, count: int) -> str:
        """Read the next `count` characters, which must be in the buffer."""
        start = self._position
        self._position += count
        return self._text[start : self._position]

    def unread(self, text: str) -> None:
        """Move the position back over a text that was just read."""
        self._position -= len(text)

    def peek(self, count: int = 1) -> ParseSteps[str]:
        """Return the next characters without reading them; fewer if the input ends before."""
        while len(self._text) - self._position < count and not self._input_ended:
            yield
        return self._text[self._position : self._position + count]

    def peek_any(self, *texts: str) -> ParseSteps[str | None]:
        """Return which of these texts comes next, without reading it."""
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
        """Read one of these texts if it comes next, and return it."""
        text = yield from self.peek_any(*texts)
        self.take(len(text or ""))
        return text

    def skip_after_space(self, *texts: str) -> ParseSteps[str | None]:
        """Skip whitespace, then read one of these texts if it comes next, and return it."""
        yield from self.take_whitespace()
        return (yield from self.skip_any(*texts))

    def take_while(self, predicate: Callable[[str], bool]) -> ParseSteps[str]:
        """Read characters while the predicate holds."""
        text = ""
        while (char := (yield from self.peek())) and predicate(char):
            text += self.take(1)
        return text

    def take_whitespace(self) -> ParseSteps[str]:
        return (yield from self.take_while(str.isspace))

    def stream_until(self, *endings: str, sink: TextSink) -> ParseSteps[str | None]:
        """Stream the text before the first of these endings to `sink`, read the ending and return it.

        Return None if the input ends first.
        """
        while True:
            position, ending = self._find_first(endings)
            if ending:
                self._emit(position - self._position, sink)
                self.take(len(ending))
                return ending
            ahead = self._text[self._position :]
            held_back = 0 if self._input_ended else max(find_overlap(ahead, ending) for ending in endings)
            self._emit(len(ahead) - held_back, sink)
            if self._input_ended:
                return None
            yield

    def _find_first(self, texts: tuple[str, ...]) -> tuple[int, str]:
        """Return the position of the first of these texts and the text; "" if there is none yet."""
        first_position, first_text = len(self._text), ""
        for text in texts:
            position = self._text.find(text, self._position, first_position + len(text) - 1)
            if position >= 0:
                first_position, first_text = position, text
        return first_position, first_text

    def stream_value(self, classify: Callable[[str], CharPosition], sink: TextSink) -> ParseSteps[CharPosition]:
        """Stream characters to `sink` until `classify` returns LAST or OUTSIDE; return the last classification."""
        while True:
            end, char_position = self._position, CharPosition.INSIDE
            while char_position is CharPosition.INSIDE and end < len(self._text):
                char_position = classify(self._text[end])
                end += char_position is not CharPosition.OUTSIDE
            self._emit(end - self._position, sink)
            if char_position is not CharPosition.INSIDE or self._input_ended:
                return char_position
            yield

    def _emit(self, count: int, sink: TextSink) -> None:
        if count:
            sink(self.take(count))


def is_name_char(char: str) -> bool:
    """Return whether a tool name may contain this character."""
    return char.isalnum() or char in "_.-"
