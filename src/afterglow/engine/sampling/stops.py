"""Stop texts: found wherever they fall among tokens, the moment their last byte is there."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches the bytes of an answer.

    >>> matcher = StopMatcher([b"END"])
    >>> matcher.feed(b"the E"), matcher.feed(b"ND!")
    (None, b'END')
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._max_tail_bytes = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""
        self.match_end = 0  # where, in the last piece, the stop that was found ends

    def feed(self, piece: bytes) -> bytes | None:
        """The stop that ends first in what came so far; the longest of those that end at the same byte."""
        seen = self._tail + piece
        found = [(seen.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in seen]
        before, self._tail = len(self._tail), seen[-self._max_tail_bytes :] if self._max_tail_bytes else b""
        if not found:
            return None
        end, _, stop = min(found)
        self.match_end = end - before
        return stop
