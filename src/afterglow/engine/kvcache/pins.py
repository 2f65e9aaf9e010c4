"""Pinned prefixes: the list of pins, the blocks and checkpoints that they protect, and the limit of their bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.eviction import MAX_PINNED_FRACTION
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.kvcache.tier import Tier
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.errors import InvalidArgument

logger = logging.getLogger("afterglow.engine.kvcache.pins")


@dataclass(slots=True, eq=False)
class Pin:
    """Prefix that is never evicted. `is_system`: pinned automatically, as the system prompt of a request."""

    salt: str
    entries: Entries
    is_system: bool = False
    last_used: float = field(default_factory=time.monotonic)


class Pins(list[Pin]):
    """All pins of an engine, as plain values."""

    def count_entries(self, *, explicit_only: bool = False) -> int:
        """Return the total length of all pins; with `explicit_only`, of those that are not system pins."""
        return sum(len(pin.entries) for pin in self if not (explicit_only and pin.is_system))

    def find(self, entries: Entries, salt: str) -> Pin | None:
        """Return the pin on exactly these entries."""
        return next((pin for pin in self if pin.salt == salt and np.array_equal(pin.entries, entries)), None)

    def is_pinned(self, entries: Entries, salt: str, index: int) -> bool:
        """Return whether the entry at this index is part of a pinned prefix."""
        return any(pin.salt == salt and common_prefix_length(pin.entries, entries) > index for pin in self)

    def find_positions(self, entries: Entries, salt: str) -> list[int]:
        """Return the positions at which pinned prefixes of these entries end."""
        pins = [pin for pin in self if pin.salt == salt]
        return [len(pin.entries) for pin in pins if common_prefix_length(pin.entries, entries) == len(pin.entries)]

    def find_lru(self, *, system_only: bool = False) -> Pin | None:
        """Return the pin to remove first: the least recently used system pin, else, unless `system_only`, any."""
        candidates = [pin for pin in self if pin.is_system or not system_only]
        return min(candidates, key=lambda pin: (not pin.is_system, pin.last_used), default=None)


class PinManager:
    """Owns the pins, keeps the `pinned` flags in all tiers in agreement with them, and bounds their bytes in RAM."""

    def __init__(self, tree: BlockTree, ram: RamTier, tiers: Sequence[Tier]) -> None:
        self.pins = Pins()
        self._tree = tree
        self._ram = ram
        self._checkpoints = ram.checkpoints
        self._tiers = tiers

    @property
    def nbytes(self) -> int:
        """Bytes of the pinned blocks and checkpoints in RAM."""
        return self._ram.pinned_bytes

    @property
    def limit(self) -> int:
        return int(self._ram.budget.limit * MAX_PINNED_FRACTION)

    def pin(self, entries: Entries, salt: str, *, is_system: bool = False) -> None:
        """Never evict these entries once they are stored.

        System pins give way, least recently used first, to each other and to explicit pins. If there is still not
        enough space, a system pin is not added, and an explicit pin raises `InvalidArgument` and changes nothing.
        """
        existing = self.pins.find(entries, salt)
        if existing is not None:
            existing.last_used, existing.is_system = time.monotonic(), existing.is_system and is_system
            return
        bytes_per_entry = self._ram.bytes_per_entry
        needed, used = (int(n * bytes_per_entry) for n in (len(entries), self.pins.count_entries(explicit_only=True)))
        if used + needed > self.limit:
            if is_system:
                return
            raise InvalidArgument(
                "prompt",
                f"needs {needed:,} bytes to pin; existing pins use {used:,} of {self.limit:,} bytes (half of "
                "`ram_cache_bytes`): unpin a prefix or increase `ram_cache_bytes`",
            )
        while int(self.pins.count_entries() * bytes_per_entry) + needed > self.limit:
            oldest = self.pins.find_lru(system_only=True)
            assert oldest is not None, "explicit pins fit"
            self.unpin(oldest.entries, oldest.salt)
        self.pins.append(Pin(salt, entries.copy(), is_system))
        self._sync_block_pins(entries, salt)
        self.enforce_limit()

    def unpin(self, entries: Entries, salt: str) -> bool:
        """Remove the pin on exactly these entries; return False if there is none."""
        pin = self.pins.find(entries, salt)
        if pin is not None:
            self.pins.remove(pin)
        return self._sync_block_pins(entries, salt) or pin is not None

    def enforce_limit(self) -> None:
        """Remove the oldest pins while their actual bytes exceed the limit."""
        while self.nbytes > self.limit:
            oldest = self.pins.find_lru()
            if oldest is None:  # only blocks pinned on disk are left; they stay pinned there
                for block in self._ram:
                    block.pinned = False
                return
            if not oldest.is_system:
                logger.warning(
                    "removed a pin of %d entries: pins exceed half of `ram_cache_bytes`", len(oldest.entries)
                )
            self.unpin(oldest.entries, oldest.salt)

    def on_checkpoint_added(self) -> None:
        """Update the pins after a checkpoint was added: a pinned prefix may now be restored from it."""
        self._sync_checkpoint_pins()
        self.enforce_limit()

    def _sync_checkpoint_pins(self) -> None:
        """Pin the deepest checkpoint on each pinned prefix, from which it is restored, and unpin all others."""
        needed = {next(self._checkpoints.find_on_path(pin.entries, pin.salt), None) for pin in self.pins}
        changed = [
            checkpoint
            for checkpoint in self._checkpoints.all_checkpoints
            if checkpoint.pinned != (checkpoint in needed)
        ]
        for checkpoint in changed:
            checkpoint.pinned = not checkpoint.pinned
        self._apply(changed)

    def _sync_block_pins(self, entries: Entries, salt: str) -> bool:
        """Set the `pinned` flags on this path as the pins require; return whether a block changed."""
        self._sync_checkpoint_pins()
        changed = []
        for block in self._tree.find_stored_prefix(entries, salt).blocks:
            if block.pinned != self.pins.is_pinned(entries, salt, block.start):
                block.pinned = not block.pinned
                changed.append(block)
        self._apply(changed)
        return bool(changed)

    def _apply(self, changed: Sequence[Block | Checkpoint]) -> None:
        if changed:
            for tier in self._tiers:
                tier.pin(changed)
