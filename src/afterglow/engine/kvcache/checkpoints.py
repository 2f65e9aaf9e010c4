"""Checkpoints: partial states of sequences in RAM. Chooses where to take them and which to evict.

A checkpoint is what a recurrent, hybrid or sliding-window model needs to resume at a position, because its state cannot
be truncated to an arbitrary length.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from afterglow.engine.kvcache.blocks import Block
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import choose_positions_to_drop, compute_log_value, compute_rank
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.types.backend import BackendState
from afterglow.engine.types.entries import Entries
from afterglow.engine.types.settings import CheckpointSettings
from afterglow.llama import page_buffers

CHECKPOINT_TABLE_BYTES = 850  # of a checkpoint and its tree node, beside the entries; measured with tracemalloc
TAIL_DISTANCE_TOKENS = 4  # chat templates often rewrite the last few tokens of a prompt


@dataclass(eq=False, slots=True, kw_only=True)
class Checkpoint:
    """Partial state of a sequence after exactly these entries."""

    entries: Entries
    state: BackendState
    namespace: str = ""  # `PrefixCache.build_namespace`
    parent: bytes = b""  # key of the last full block before it
    start: int = 0  # number of entries in the full blocks before it
    key: bytes = b""
    tier: str = "ram"  # name of the tier that holds the state
    pinned_until: float = 0.0  # as of a block; a pinned prefix is restored from it
    stored_cells_seen_at: int = -1  # path losses of the block tree when it had all cells before this
    last_used: float = field(default_factory=time.monotonic)

    @property
    def pinned(self) -> bool:
        return self.pinned_until > 0.0

    @property
    def position(self) -> int:
        """Number of entries before the checkpoint."""
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        return page_buffers.get_allocated_bytes(self.state.nbytes) + self.entries.nbytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables for it. The tree has its own copy of the entries."""
        return CHECKPOINT_TABLE_BYTES + self.entries.nbytes


def choose_checkpoint_positions(
    length: int, boundaries: Iterable[int], existing: Iterable[int], ubatch: int, settings: CheckpointSettings
) -> list[int]:
    """Return the positions at which the prefill of a prompt of `length` entries must pause, ascending.

    Positions are the message boundaries, 4 and 4 + `ubatch` entries before the end of the prompt, and every
    `every_n_tokens` entries. `existing` are the positions on this prompt that already have a checkpoint.
    """
    if settings.max_checkpoints == 0:
        return []
    chosen = {position for position in boundaries if 0 < position < length}
    taken = set(existing)
    optional = [length - TAIL_DISTANCE_TOKENS, length - TAIL_DISTANCE_TOKENS - ubatch]
    if settings.every_n_tokens:
        optional += range(settings.every_n_tokens, length, settings.every_n_tokens)
    for position in optional:
        has_gap = all(abs(position - neighbour) >= settings.min_gap for neighbour in chosen | taken)
        if settings.min_tokens <= position < length and has_gap:
            chosen.add(position)
    return sorted(chosen - taken)


class CheckpointStore:
    """Owns the checkpoints in RAM and bounds their number per path and their bytes."""

    def __init__(self, settings: CheckpointSettings, cost_model: CostModel, budget: ByteBudget) -> None:
        self.all_checkpoints: list[Checkpoint] = []
        self.tree: RadixTree[Checkpoint] = RadixTree()
        self.loss_count = 0  # number of checkpoints dropped so far
        self.unwritten: Container[tuple[str, bytes]] = ()  # see `RamTier.set_unwritten`
        self._settings = settings
        self._cost_model = cost_model
        self._budget = budget

    @property
    def nbytes(self) -> int:
        return self._budget.get("checkpoints")

    @property
    def pinned_bytes(self) -> int:
        pinned = (checkpoint for checkpoint in self.all_checkpoints if checkpoint.pinned)
        return sum(checkpoint.nbytes + checkpoint.table_bytes for checkpoint in pinned)

    def find_on_path(self, entries: Entries, namespace: str) -> Iterator[Checkpoint]:
        """Yield the checkpoints on the path of these entries, deepest first."""
        return self.tree.iter_anchors_on_path(self.tree.match(entries, namespace))

    def has_checkpoint_at(self, entries: Entries, namespace: str) -> bool:
        """Return whether a checkpoint exists after exactly these entries."""
        return any(checkpoint.position == len(entries) for checkpoint in self.find_on_path(entries, namespace))

    def find_in_block(self, block: Block) -> list[Checkpoint]:
        """Return the checkpoints with a position in, or right after, a block."""
        return [
            checkpoint
            for checkpoint in self.all_checkpoints
            if checkpoint.parent == block.key
            or (checkpoint.parent == block.parent and checkpoint.position > block.start)
        ]

    def find(self, key: bytes) -> Checkpoint | None:
        """Return the checkpoint with this key. Thread-safe."""
        return next((checkpoint for checkpoint in self.all_checkpoints[:] if checkpoint.key == key), None)

    def evict_until_fits(self, nbytes: int) -> bool:
        """Evict until a checkpoint of `nbytes` is within `max_bytes`; return False if that is not possible."""
        if nbytes > self._settings.max_bytes or not self._settings.max_checkpoints:
            return False
        while self.nbytes + nbytes > self._settings.max_bytes:
            victim = self.find_victim()
            if victim is None:
                return False
            self.drop(victim)
        return True

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint for which space was freed, and thin out the paths through it to `max_checkpoints`."""
        self.all_checkpoints.append(checkpoint)
        self._budget.add("checkpoints", checkpoint.nbytes)
        self._budget.add("tables", checkpoint.table_bytes)
        self.tree.insert(checkpoint.entries, checkpoint, checkpoint.namespace)
        for end in self.tree.find_descendants(checkpoint):
            if end not in self.tree:
                continue  # dropped with another path
            path = list(self.tree.iter_ancestors(end))
            unpinned = {ancestor.position: ancestor for ancestor in path if not ancestor.pinned}
            limit = self._settings.max_checkpoints - len(path) + len(unpinned)
            for position in choose_positions_to_drop(sorted(unpinned), limit):
                self.drop(unpinned[position])

    def drop(self, checkpoint: Checkpoint) -> None:
        self.all_checkpoints.remove(checkpoint)
        self.loss_count += 1
        self._budget.remove("checkpoints", checkpoint.nbytes)
        self._budget.remove("tables", checkpoint.table_bytes)
        self.tree.remove(checkpoint)

    def estimate_seconds_saved(self, checkpoint: Checkpoint) -> float:
        """Return the compute time that a checkpoint saves: the entries since the checkpoint before it."""
        previous = next(itertools.islice(self.tree.iter_ancestors(checkpoint), 1, 2), None)
        start = 0 if previous is None else previous.position
        return (checkpoint.position - start) * self._cost_model.seconds_per_entry

    def compute_rank(self, checkpoint: Checkpoint) -> float:
        """Return the position of a checkpoint in the order of eviction."""
        log_value = compute_log_value(self.estimate_seconds_saved(checkpoint), checkpoint.nbytes)
        return compute_rank(log_value, checkpoint.last_used)

    def find_victim(self) -> Checkpoint | None:
        """Return the unpinned checkpoint to evict first."""
        unpinned = [checkpoint for checkpoint in self.all_checkpoints if not checkpoint.pinned]
        written = [checkpoint for checkpoint in unpinned if ("state", checkpoint.key) not in self.unwritten]
        return min(written or unpinned, key=self.compute_rank, default=None)
