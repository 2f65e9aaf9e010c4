"""The bytes that are kept in RAM outside of memory: never more than the limit. Decides what goes; others act."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from afterglow.engine.segments import Segment

HALF_LIFE = 3600.0  # seconds in which what is stored becomes half as likely to be asked for


@dataclass(frozen=True, slots=True)
class Victim:
    """Something that lies in RAM and can be spared: what it is worth, and how to let go of it."""

    worth: float
    drop: Callable[[], None]


class Ram:
    """Holds segments, and accounts for everything in RAM; `others` are the bytes of what is not a segment."""

    def __init__(self, limit: int, others: Callable[[], int]) -> None:
        self.limit = limit
        self.segment_bytes = 0
        self._others = others
        self._segments: OrderedDict[bytes, Segment] = OrderedDict()  # what builds on one lies before it

    @property
    def used(self) -> int:
        return self.segment_bytes + self._others()

    @property
    def free(self) -> int:
        return self.limit - self.used

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __contains__(self, segment: Segment) -> bool:
        return segment.key in self._segments

    def put(self, segment: Segment) -> None:
        """Keep a segment; room was made for it."""
        self._segments[segment.key] = segment
        self.segment_bytes += segment.nbytes
        assert self.used <= self.limit, "more than the limit is kept in RAM"

    def drop(self, segment: Segment) -> None:
        """Give the bytes of a segment back."""
        del self._segments[segment.key]
        segment.rows = None
        self.segment_bytes -= segment.nbytes

    def get(self, key: bytes) -> Segment | None:
        """For other threads, too."""
        return self._segments.get(key)

    def touch(self, segments: Iterable[Segment], now: float) -> None:
        """Note that a path was used. What lies deeper goes first, so that nothing is left without its beginning."""
        for segment in reversed(list(segments)):
            segment.last_used = now
            if segment.key in self._segments:
                self._segments.move_to_end(segment.key)

    def oldest(self, kept: set[bytes]) -> Segment | None:
        """The segment that was not used for longest, but for pinned ones and those that are `kept`."""
        return next((one for one in self._segments.values() if not one.pinned and one.key not in kept), None)

    def pinned_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments.values() if segment.pinned)


def worth(seconds: float, nbytes: int, age: float) -> float:
    """Seconds that keeping a thing is expected to save, per byte."""
    return seconds * math.pow(0.5, age / HALF_LIFE) / max(nbytes, 1)
