"""Tier of the prefix cache: a place that holds blocks and checkpoints outside of the device."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.last_logits import LastLogits
from afterglow.engine.types.backend import BackendState
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries


class Tier(Protocol):
    """Holds blocks and checkpoints. The store has a list of tiers, the fastest first.

    New data is put into the first tier, then into the slower ones, which may copy it from the first at a later time.
    """

    @property
    def name(self) -> str: ...

    @property
    def budget(self) -> ByteBudget: ...

    @property
    def counters(self) -> TierCounters: ...

    @property
    def seconds_per_byte(self) -> float:
        """Expected seconds to read a byte into RAM."""

    @property
    def latency_seconds(self) -> float:
        """Expected seconds until the first byte is read."""

    def sync(self) -> None:
        """Notice what other threads and processes have added or removed."""

    def holds(self, block: Block) -> bool: ...

    def find_checkpoints(self, entries: Entries, namespace: str) -> list[Checkpoint]:
        """Return the checkpoints on the path of a prompt."""

    def put(self, data: Block | Checkpoint | LastLogits) -> None:
        """Hold a block, a checkpoint or last logits, now or soon, unless the tier holds it already."""

    def forget(self, block: Block) -> None:
        """Notice that a block has left the tree. Other processes may still find it in this tier."""

    def delete(self, block: Block) -> None:
        """Delete a block from the tier."""

    def load_rows(self, blocks: Sequence[Block]) -> list[NDArray[np.uint8] | None]:
        """Return the cells of blocks that the tier holds; None for those that are missing or damaged."""

    def load_state(self, checkpoint: Checkpoint) -> BackendState:
        """Return the partial state of a checkpoint of this tier; raise `InvalidState` if it is missing or damaged."""

    def prefetch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None, protected: AbstractSet[bytes]) -> bool:
        """Start reading what only this tier has, evicting no `protected` block; return whether it is incomplete."""

    def touch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None = None) -> None:
        """Record the use of the blocks of a path, in their order, and of a checkpoint."""

    def pin(self, data: Sequence[Block | Checkpoint]) -> None:
        """Apply the changed `pinned` flags of blocks and checkpoints."""

    def clear(self) -> None:
        """Remove everything, including pinned data."""

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; return False if it is not within `timeout` seconds."""

    def close(self, timeout: float) -> None:
        """Write what is queued, for at most `timeout` seconds, and free all resources."""
