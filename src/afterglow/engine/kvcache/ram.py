"""The bytes that are kept in RAM outside of memory: never more than the limit. Decides what goes; others act."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from afterglow.engine.kvcache.blocks import Block

STORED_HALF_LIFE_SECONDS = 3600.0  # seconds in which what is stored becomes half as likely to be asked for


@dataclass(frozen=True, slots=True)
class Victim:
    """Something that lies in RAM and can be spared: what it is worth, and how to let go of it."""

    value: float
    evict: Callable[[], None]


class RamTier:
    """Holds segments, and accounts for everything in RAM; `others` are the bytes of what is not a segment."""

    def __init__(self, limit: int, other_bytes: Callable[[], int]) -> None:
        self.limit = limit
        self.block_bytes = 0
        self._other_bytes = other_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # what builds on one lies before it

    @property
    def used_bytes(self) -> int:
        return self.block_bytes + self._other_bytes()

    @property
    def free_bytes(self) -> int:
        return self.limit - self.used_bytes

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._blocks.values()))

    def __contains__(self, block: Block) -> bool:
        return block.key in self._blocks

    def put(self, block: Block) -> None:
        """Keep a segment; room was made for it."""
        self._blocks[block.key] = block
        self.block_bytes += block.nbytes
        assert self.used_bytes <= self.limit, "more than the limit is kept in RAM"

    def drop(self, block: Block) -> None:
        """Give the bytes of a segment back."""
        del self._blocks[block.key]
        block.rows = None
        self.block_bytes -= block.nbytes

    def get(self, key: bytes) -> Block | None:
        """For other threads, too."""
        return self._blocks.get(key)

    def touch(self, blocks: Iterable[Block], now: float) -> None:
        """Note that a path was used. What lies deeper goes first, so that nothing is left without its beginning."""
        for segment in reversed(list(blocks)):
            segment.last_used = now
            if segment.key in self._blocks:
                self._blocks.move_to_end(segment.key)

    def find_lru_block(self, protected: set[bytes]) -> Block | None:
        """The segment that was not used for longest, but for pinned ones and those that are `kept`."""
        return next((one for one in self._blocks.values() if not one.pinned and one.key not in protected), None)

    def count_pinned_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._blocks.values() if segment.pinned)


def compute_value(seconds_saved: float, nbytes: int, idle_seconds: float) -> float:
    """Seconds that keeping a thing is expected to save, per byte."""
    return seconds_saved * math.pow(0.5, idle_seconds / STORED_HALF_LIFE_SECONDS) / max(nbytes, 1)
