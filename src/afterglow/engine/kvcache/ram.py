"""RAM tier of the prefix cache: blocks in least-recently-used order and the byte budget of everything in RAM.

Chooses what to evict; the store evicts it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from afterglow.engine.kvcache.blocks import Block


class RamTier:
    """Holds blocks and accounts for all bytes in RAM. `other_bytes` returns the bytes that are not in blocks.

    Blocks are ordered by last use, and a block is always ordered before the blocks that precede it in the prompt.
    Least-recently-used eviction therefore never orphans a block.
    """

    def __init__(self, limit: int, other_bytes: Callable[[], int]) -> None:
        self.limit = limit
        self.block_bytes = 0
        self._other_bytes = other_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self.block_bytes + self._other_bytes()

    @property
    def free_bytes(self) -> int:
        return self.limit - self.used_bytes

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def __contains__(self, block: Block) -> bool:
        return block.key in self._blocks

    def put(self, block: Block) -> None:
        """Add a block. The caller has freed space for it."""
        self._blocks[block.key] = block
        self.block_bytes += block.nbytes
        assert self.used_bytes <= self.limit, "the RAM tier exceeds its limit"

    def drop(self, block: Block) -> None:
        """Remove a block and free its rows."""
        del self._blocks[block.key]
        block.rows = None
        self.block_bytes -= block.nbytes

    def get(self, key: bytes) -> Block | None:
        """Return the block with this key. Thread-safe."""
        return self._blocks.get(key)

    def touch(self, blocks: Iterable[Block], now: float) -> None:
        """Record the use of a path. Deeper blocks are evicted first, so that no block loses its predecessors."""
        for block in reversed(list(blocks)):
            block.last_used = now
            if block.key in self._blocks:
                self._blocks.move_to_end(block.key)

    def count_pinned_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values() if block.pinned)
