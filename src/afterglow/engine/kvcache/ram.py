"""RAM tier of the prefix cache: blocks in least-recently-used order, checkpoints, last logits, and their eviction."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.budget import ByteKind
from afterglow.engine.kvcache.checkpoints import CHECKPOINT_TABLE_BYTES, Checkpoint, CheckpointStore
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import choose_victims, compute_log_value, compute_rank, find_victim
from afterglow.engine.kvcache.last_logits import LOGITS_TABLE_BYTES, LastLogits, LogitsStore
from afterglow.engine.types.backend import BackendState
from afterglow.engine.types.cache_events import CacheEventLog
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries
from afterglow.llama import page_buffers

BLOCK_TABLE_EVICTION_FRACTION = 1 / 16  # of the budget: what one eviction of block tables frees


class RamTier:
    """First tier: everything that is stored passes through it. Its budget is that of all cached bytes in RAM.

    Blocks are ordered by last use, and a block is always ordered before the blocks that precede it in the prompt.
    Least-recently-used eviction therefore never orphans a block.
    """

    name = "ram"
    seconds_per_byte = latency_seconds = 0.0

    def __init__(
        self, tree: BlockTree, checkpoints: CheckpointStore, cost_model: CostModel, *, cells_suffice: bool
    ) -> None:
        """`cells_suffice`: blocks can be loaded without a checkpoint."""
        self.budget = tree.budget
        self.events = CacheEventLog()  # of all tiers
        self.counters = TierCounters()
        self.checkpoints = checkpoints
        self.logits = LogitsStore(cost_model, tree.budget)
        self.bytes_per_entry = 0.0  # of the last stored sequence; 0: none was stored yet
        self.protected: AbstractSet[bytes] = frozenset()  # keys of blocks that must not be evicted now
        self._unwritten: Container[tuple[str, bytes]] = ()
        self._tree = tree
        self._cost_model = cost_model
        self._cells_suffice = cells_suffice
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        tree.holders.append(self)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        """Return the block with this key. Thread-safe."""
        return self._blocks.get(key)

    def holds(self, block: Block) -> bool:
        return self._blocks.get(block.key) is block

    def find_checkpoints(self, entries: Entries, namespace: str) -> list[Checkpoint]:
        return list(self.checkpoints.find_on_path(entries, namespace))

    # --- storing

    def put(self, data: Block | Checkpoint | LastLogits) -> None:
        """Add a block, a checkpoint or last logits for which space was reserved."""
        if isinstance(data, Checkpoint):
            self.checkpoints.add(data)
        elif isinstance(data, LastLogits):
            self.logits.add(data)
        else:
            self._blocks[data.key] = data
            self.budget.add("blocks", data.nbytes)
        assert self.budget.free_bytes >= 0, "the RAM tier exceeds its limit"

    def promote(self, block: Block, rows: NDArray[np.uint8]) -> None:
        """Hold the rows of a block that a slower tier has read, if this needs no eviction and it is in the tree."""
        nbytes = page_buffers.get_allocated_bytes(rows.nbytes)
        if nbytes <= self.budget.free_bytes and self._tree.get(block.key) is block:
            block.rows, block.nbytes = rows, nbytes
            self.put(block)

    def forget(self, block: Block) -> None:
        """Remove a block, if it is here, and free its rows."""
        if self.holds(block):
            del self._blocks[block.key]
            block.rows = None
            self.budget.remove("blocks", block.nbytes)

    delete = forget

    def touch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None = None) -> None:
        """Record the use of a path. Deeper blocks are evicted first, so that no block loses its predecessors."""
        now = time.monotonic()
        for block in reversed(blocks):
            block.last_used = now
            if block.key in self._blocks:
                self._blocks.move_to_end(block.key)
        if checkpoint is not None:
            checkpoint.last_used = now

    # --- eviction

    def set_unwritten(self, unwritten: Container[tuple[str, bytes]]) -> None:
        """Set the data that a slower tier has yet to copy, by kind and key. It is evicted last: it would be lost."""
        self._unwritten = self.checkpoints.unwritten = self.logits.unwritten = unwritten

    @property
    def pinned_bytes(self) -> int:
        pinned = (block for block in self._blocks.values() if block.pinned)
        return sum(block.nbytes + block.table_bytes for block in pinned) + self.checkpoints.pinned_bytes

    def evict_until_free(self, nbytes: int, protected: AbstractSet[bytes] = frozenset()) -> bool:
        """Evict by lowest rank, but no `protected` key, until `nbytes` are free; return False if that is impossible."""
        if self.budget.free_bytes >= nbytes:
            return True
        if nbytes > self.budget.limit - self.pinned_bytes:
            return False
        protected = self.protected | protected
        used_bytes, evicted_entries = self.budget.used_bytes, 0
        while self.budget.free_bytes < nbytes:
            entries = self._evict_one(protected)
            if entries is None:
                break
            evicted_entries += entries
        freed_bytes = used_bytes - self.budget.used_bytes
        self.events.record("evicted", self.name, entries=evicted_entries, nbytes=freed_bytes)
        return self.budget.free_bytes >= nbytes

    def reserve(self, kind: ByteKind, nbytes: int, protected: AbstractSet[bytes] = frozenset()) -> bool:
        """Count bytes of a kind, after evicting until they fit; return False if that is not possible."""
        if not self.evict_until_free(nbytes, protected):
            return False
        self.budget.add(kind, nbytes)
        return True

    def can_add_checkpoint(self, entries: Entries, state_bytes: int) -> bool:
        """Evict until a checkpoint after these entries fits; return False if it cannot."""
        nbytes = page_buffers.get_allocated_bytes(state_bytes) + entries.nbytes
        table_bytes, before = CHECKPOINT_TABLE_BYTES + entries.nbytes, self.checkpoints.nbytes
        has_room = self.checkpoints.evict_until_fits(nbytes)
        self.events.record("evicted", "checkpoint", entries=0, nbytes=before - self.checkpoints.nbytes)
        return has_room and self.evict_until_free(nbytes + table_bytes)

    def can_add_logits(self, entries: Entries, logits_bytes: int) -> bool:
        """Evict until the last logits of a prompt with these entries fit; return False if they cannot."""
        nbytes = page_buffers.get_allocated_bytes(logits_bytes) + entries.nbytes
        table_bytes = LOGITS_TABLE_BYTES + entries.nbytes
        return self.logits.evict_until_fits(nbytes) and self.evict_until_free(nbytes + table_bytes)

    def _evict_one(self, protected: AbstractSet[bytes]) -> int | None:
        """Evict the least recently used block or logits, or the least valuable checkpoint: the lowest rank.

        Returns the number of entries of the block, 0 for others, or None if there is nothing to evict.
        """
        candidates: list[tuple[bool, float, Block | Checkpoint | LastLogits]] = []  # unwritten data last, then by rank
        if (block := self._find_block(protected)) is not None:
            candidates.append((("cells", block.key) in self._unwritten, self._compute_block_rank(block), block))
        if (checkpoint := self.checkpoints.find_victim()) is not None:
            rank = self.checkpoints.compute_rank(checkpoint)
            candidates.append((("state", checkpoint.key) in self._unwritten, rank, checkpoint))
        if (logits := self.logits.find_victim()) is not None:
            candidates.append((("logits", logits.key) in self._unwritten, self.logits.compute_rank(logits), logits))
        if not candidates:
            return 0 if self._forget_blocks(protected) else None
        self.counters.evictions += 1
        victim = min(candidates, key=lambda candidate: candidate[:2])[2]
        if isinstance(victim, Block):
            self.forget(victim)
            self._tree.remove_unreferenced(victim)
            return len(victim.entries)
        if isinstance(victim, Checkpoint):
            self.checkpoints.drop(victim)
        else:
            self.logits.drop(victim)
        return 0

    def _find_block(self, protected: AbstractSet[bytes]) -> Block | None:
        written = (block for block in self if ("cells", block.key) not in self._unwritten)
        return find_victim(written, protected) or find_victim(self, protected)

    def _forget_blocks(self, protected: AbstractSet[bytes]) -> bool:
        """Remove the least recently used blocks that only slower tiers hold from the tree; return if there were any.

        Their tables are worth more per byte than any rows, so they are evicted last, many at a time.
        """
        paths = self._tree.find_paths(protected)  # removing a block would remove its descendants
        unpinned = [block for block in self._tree if not (block.pinned or block.key in paths or self.holds(block))]
        unpinned.sort(key=lambda block: (block.last_used, -block.start))
        sizes = [(block, block.table_bytes) for block in unpinned]
        for block in choose_victims(sizes, int(self.budget.limit * BLOCK_TABLE_EVICTION_FRACTION)):
            self._tree.remove(block)
        return bool(unpinned)

    def _compute_block_rank(self, block: Block) -> float:
        """Return the rank of a block. If cells alone do not suffice, its value is that of its checkpoints."""
        seconds, nbytes = len(block.entries) * self._cost_model.seconds_per_entry, block.nbytes
        if not self._cells_suffice:
            checkpoints = self.checkpoints.find_in_block(block)
            seconds = sum(self.checkpoints.estimate_seconds_saved(checkpoint) for checkpoint in checkpoints)
            nbytes += sum(checkpoint.nbytes for checkpoint in checkpoints)
        return compute_rank(compute_log_value(seconds, nbytes), block.last_used)

    # --- the rest of a tier: everything is here already

    def load_rows(self, blocks: Sequence[Block]) -> list[NDArray[np.uint8] | None]:
        return [block.rows for block in blocks]

    def load_state(self, checkpoint: Checkpoint) -> BackendState:
        return checkpoint.state

    def prefetch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None, protected: AbstractSet[bytes]) -> bool:
        return False

    def sync(self) -> None: ...

    def pin(self, data: Sequence[Block | Checkpoint]) -> None: ...

    def clear(self) -> None:
        """Remove all blocks and logits. The prefix cache drops the checkpoints that have no cells any more."""
        for block in list(self):
            self.forget(block)
        for logits in self.logits:
            self.logits.drop(logits)

    def flush(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> None: ...
