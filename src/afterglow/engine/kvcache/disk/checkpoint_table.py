"""Table of the checkpoints of a tier whose states are not in RAM."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from afterglow.engine.kvcache.blocks import BlockHasher
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.types.entries import Entries, EntryInterner

STORED_CHECKPOINT_TABLE_BYTES = 800  # beside its entries; measured with tracemalloc


@dataclass(frozen=True, slots=True, eq=False)
class StoredCheckpoint:
    """Checkpoint in a file: `start` entries in the full blocks up to key `parent`, followed by the entries `rest`.

    It takes the place of the state of a `Checkpoint` that is not loaded. The same describes logits in a file.
    """

    key: bytes
    parent: bytes
    start: int
    rest: Entries  # portable
    nbytes: int

    @property
    def position(self) -> int:
        return self.start + len(self.rest)

    @property
    def table_bytes(self) -> int:
        return STORED_CHECKPOINT_TABLE_BYTES + self.rest.nbytes


class CheckpointTable:
    """Checkpoints of one tier, by the block before them. They count in the budget of the tier, their rows in RAM."""

    def __init__(
        self, tier: str, budget: ByteBudget, ram_budget: ByteBudget, hasher: BlockHasher, interner: EntryInterner
    ) -> None:
        self._tier = tier
        self._budget = budget
        self._ram_budget = ram_budget
        self._hasher = hasher
        self._interner = interner
        self._by_key: dict[bytes, StoredCheckpoint] = {}
        self._by_parent: dict[bytes, dict[bytes, StoredCheckpoint]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def add(self, checkpoint: StoredCheckpoint) -> bool:
        """Add a checkpoint; return False if it is known, or if its row does not fit into RAM."""
        if checkpoint.key in self._by_key or checkpoint.table_bytes > self._ram_budget.free_bytes:
            return False
        self._by_key[checkpoint.key] = checkpoint
        self._by_parent.setdefault(checkpoint.parent, {})[checkpoint.key] = checkpoint
        self._budget.add("checkpoints", checkpoint.nbytes)
        self._ram_budget.add("tables", checkpoint.table_bytes)
        return True

    def remove(self, key: bytes) -> None:
        """Remove a checkpoint. An unknown key is ignored."""
        checkpoint = self._by_key.pop(key, None)
        if checkpoint is None:
            return
        siblings = self._by_parent[checkpoint.parent]
        del siblings[key]
        if not siblings:
            del self._by_parent[checkpoint.parent]
        self._budget.remove("checkpoints", checkpoint.nbytes)
        self._ram_budget.remove("tables", checkpoint.table_bytes)

    def list_all(self) -> list[StoredCheckpoint]:
        return list(self._by_key.values())

    def select(self, keys: AbstractSet[bytes], parents: AbstractSet[bytes]) -> list[StoredCheckpoint]:
        """Return the checkpoints with these keys, and those after these blocks."""
        return [item for item in self._by_key.values() if item.key in keys or item.parent in parents]

    def find(self, entries: Entries, namespace: str) -> list[Checkpoint]:
        """Return the checkpoints on the path of a prompt. Their state is not loaded."""
        found: list[Checkpoint] = []
        for index, parent in enumerate(self._hasher.hash_prefixes(entries, namespace) if self._by_key else ()):
            start = index * self._hasher.block_size
            for stored in self._by_parent.get(parent, {}).values():
                rest = self._interner.to_portable_entries(entries[start : stored.position])
                if stored.start == start and np.array_equal(rest, stored.rest):
                    found.append(
                        Checkpoint(
                            entries=entries[: stored.position],
                            state=stored,
                            namespace=namespace,
                            parent=parent,
                            start=start,
                            key=stored.key,
                            tier=self._tier,
                        )
                    )
        return found
