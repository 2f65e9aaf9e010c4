"""What in the text ends a completion: stop sequences, matched across tokens, and lines with too little indentation."""

from __future__ import annotations

from collections.abc import Sequence

NEWLINE = ord("\n")


class StopMatcher:
    """Searches the bytes of a completion for stop sequences.

    >>> matcher = StopMatcher([b"END"])
    >>> matcher.feed(b"the E"), matcher.feed(b"ND!")
    (None, b'END')
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._max_tail_bytes = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""
        self.match_end = 0  # offset in the last piece at which the matched stop sequence ends

    def feed(self, piece: bytes) -> bytes | None:
        """Add a piece. Return the stop sequence that ends first, or the longest of those that end at the same byte."""
        window = self._tail + piece
        matches = [(window.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in window]
        tail_length, self._tail = len(self._tail), window[-self._max_tail_bytes :] if self._max_tail_bytes else b""
        if not matches:
            return None
        end, _, stop = min(matches)
        self.match_end = end - tail_length
        return stop


class IndentMatcher:
    """Searches the bytes of a completion for a line after the first that is indented less than a minimum.

    Empty lines are not indented. Tabs count as one character.

    >>> matcher = IndentMatcher(4)
    >>> matcher.feed(b"x:\\n    y\\n  "), matcher.feed(b"z")
    (None, 11)
    """

    def __init__(self, min_indent: int) -> None:
        self._min_indent = min_indent
        self._indent: int | None = None  # of the current line as far as it has come; None after its indentation
        self._length = 0

    def feed(self, piece: bytes) -> int | None:
        """Add a piece. Return the offset in the completion at which the text of such a line begins."""
        for character in piece:
            if self._indent is not None and character in b" \t":
                self._indent += 1
            elif self._indent is not None and self._indent < self._min_indent:
                return self._length
            else:
                self._indent = 0 if character == NEWLINE else None
            self._length += 1
        return None
