"""Stop sequences: matches byte strings across token boundaries as soon as their last byte arrives."""

from __future__ import annotations

from collections.abc import Sequence


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
