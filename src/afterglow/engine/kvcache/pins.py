"""Pinned prefixes: the list of pins, the blocks and checkpoints that they protect, and the limit of their bytes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import MAX_PINNED_FRACTION
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.kvcache.tier import Tier
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.errors import InvalidArgument

MAX_EXPIRING_PINS = 64
MIN_REFRESH_FRACTION = 0.1  # of the retention: a use moves the expiry by at least this, because that is written to disk

logger = logging.getLogger("afterglow.engine.kvcache.pins")


@dataclass(slots=True, eq=False)
class Pin:
    """Prefix that is not evicted. `is_system`: pinned automatically, as the system prompt of a request."""

    namespace: str  # `PrefixCache.build_namespace`
    entries: Entries
    is_system: bool = False
    retention_seconds: float = math.inf  # time from its last use after which it expires
    expires_at: float = math.inf  # wall-clock time
    last_used: float = field(default_factory=time.monotonic)

    @property
    def can_expire(self) -> bool:
        return self.expires_at < math.inf

    @property
    def gives_way(self) -> bool:
        """Whether other pins may replace it. Explicit pins without expiry stay."""
        return self.is_system or self.can_expire

    def use(self) -> bool:
        """Record a use, which restarts the retention; return whether the expiry moved enough to be written down."""
        self.last_used = time.monotonic()
        expires_at = time.time() + self.retention_seconds
        if not self.can_expire or expires_at - self.expires_at < self.retention_seconds * MIN_REFRESH_FRACTION:
            return False
        self.expires_at = expires_at
        return True


class PinnedSpan(NamedTuple):
    """Leading entries of a sequence that a pin covers, and until when."""

    length: int
    expires_at: float


def find_expiry(spans: Iterable[PinnedSpan], index: int) -> float:
    """Return until when the entry at an index is pinned; 0 if it is not.

    >>> find_expiry([PinnedSpan(10, 2.0), PinnedSpan(5, 3.0)], 4), find_expiry([PinnedSpan(10, 2.0)], 10)
    (3.0, 0.0)
    """
    return max((span.expires_at for span in spans if span.length > index), default=0.0)


class Pins(list[Pin]):
    """All pins of an engine, as plain values."""

    def count_entries(self, *, explicit_only: bool = False) -> int:
        """Return the total length of all pins; with `explicit_only`, of those that do not give way."""
        return sum(len(pin.entries) for pin in self if not (explicit_only and pin.gives_way))

    def find(self, entries: Entries, namespace: str) -> Pin | None:
        """Return the pin on exactly these entries."""
        return next((pin for pin in self if pin.namespace == namespace and np.array_equal(pin.entries, entries)), None)

    def find_spans(self, entries: Entries, namespace: str) -> list[PinnedSpan]:
        """Return which leading entries each pin covers."""
        pins = [pin for pin in self if pin.namespace == namespace]
        return [PinnedSpan(common_prefix_length(pin.entries, entries), pin.expires_at) for pin in pins]

    def find_prefixes(self, entries: Entries, namespace: str) -> list[Pin]:
        """Return the pins whose entries are a prefix of these entries."""
        pins = [pin for pin in self if pin.namespace == namespace]
        return [pin for pin in pins if common_prefix_length(pin.entries, entries) == len(pin.entries)]

    def find_positions(self, entries: Entries, namespace: str) -> list[int]:
        """Return the positions at which pinned prefixes of these entries end."""
        return [len(pin.entries) for pin in self.find_prefixes(entries, namespace)]

    def find_lru(self, *, yielding_only: bool = False) -> Pin | None:
        """Return the pin to remove first: the least recently used one that gives way, else, if allowed, any."""
        candidates = [pin for pin in self if pin.gives_way or not yielding_only]
        return min(candidates, key=lambda pin: (not pin.gives_way, pin.last_used), default=None)


class PinManager:
    """Owns the pins, keeps `pinned_until` in all tiers in agreement with them, and bounds their bytes in RAM."""

    def __init__(self, tree: BlockTree, ram: RamTier, tiers: Sequence[Tier], cost_model: CostModel) -> None:
        self.pins = Pins()
        self._cost_model = cost_model
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

    def pin(
        self, entries: Entries, namespace: str, *, is_system: bool = False, retention_seconds: float = math.inf
    ) -> None:
        """Do not evict these entries once they are stored, for `retention_seconds` after their last use.

        System pins and pins with an expiry give way, least recently used first, to each other and to other pins. If
        there is still not enough space, such a pin is not added, and another one raises `InvalidArgument` and changes
        nothing.
        """
        pin = Pin(namespace, entries.copy(), is_system, retention_seconds, time.time() + retention_seconds)
        existing = self.pins.find(entries, namespace)
        if existing is not None:
            self._merge(existing, pin)
            return
        if not self.limit and not pin.gives_way:
            raise InvalidArgument("prompt", "cannot be pinned: `ram_cache_bytes` is 0, so that nothing is stored")
        bytes_per_entry = self._ram.bytes_per_entry or self._cost_model.cell_bytes_per_entry
        needed, used = (int(n * bytes_per_entry) for n in (len(entries), self.pins.count_entries(explicit_only=True)))
        if used + needed > self.limit:
            if pin.gives_way:
                return
            raise InvalidArgument(
                "prompt",
                f"needs {needed:,} bytes to pin; existing pins use {used:,} of {self.limit:,} bytes (half of "
                "`ram_cache_bytes`): unpin a prefix or increase `ram_cache_bytes`",
            )
        while int(self.pins.count_entries() * bytes_per_entry) + needed > self.limit:
            self._remove_lru(yielding_only=True)
        while pin.can_expire and sum(other.can_expire for other in self.pins) >= MAX_EXPIRING_PINS:
            self._remove(min((other for other in self.pins if other.can_expire), key=lambda other: other.last_used))
        self.pins.append(pin)
        self._sync_block_pins(entries, namespace)
        self.enforce_limit()

    def _merge(self, existing: Pin, pin: Pin) -> None:
        """Keep the stronger of two pins on the same entries: an explicit one, a system pin, a longer retention."""
        is_longer = pin.retention_seconds > existing.retention_seconds
        existing.is_system = existing.gives_way and pin.gives_way and (existing.is_system or pin.is_system)
        if is_longer:
            existing.retention_seconds, existing.expires_at = pin.retention_seconds, pin.expires_at
        if existing.use() or is_longer:
            self._sync_block_pins(existing.entries, existing.namespace)

    def use(self, entries: Entries, namespace: str) -> None:
        """Restart the retention of the pinned prefixes of a prompt."""
        moved = [pin for pin in self.pins.find_prefixes(entries, namespace) if pin.can_expire and pin.use()]
        if moved:
            self._sync_block_pins(max(moved, key=lambda pin: len(pin.entries)).entries, namespace)

    def expire(self) -> None:
        """Remove the pins whose retention has passed."""
        now = time.time()
        for pin in [pin for pin in self.pins if pin.expires_at <= now]:
            self._remove(pin)

    def _remove(self, pin: Pin) -> None:
        self.pins.remove(pin)
        self._sync_block_pins(pin.entries, pin.namespace, is_unpinned=not pin.can_expire)

    def _remove_lru(self, *, yielding_only: bool) -> None:
        oldest = self.pins.find_lru(yielding_only=yielding_only)
        assert oldest is not None, "the other pins fit"
        self._remove(oldest)

    def unpin(self, entries: Entries, namespace: str) -> bool:
        """Remove the pin on exactly these entries; return False if there is none."""
        pin = self.pins.find(entries, namespace)
        if pin is not None:
            self.pins.remove(pin)
        return self._sync_block_pins(entries, namespace, is_unpinned=True) or pin is not None

    def forget(self, entries: Entries, start: int, namespace: str) -> int:
        """Remove the pins that continue the first `start` entries as these do; return their number."""
        matching = [
            pin
            for pin in self.pins
            if pin.namespace == namespace and common_prefix_length(pin.entries, entries) > start
        ]
        for pin in matching:
            self.pins.remove(pin)
            self._sync_block_pins(pin.entries, pin.namespace, is_unpinned=True)
        return len(matching)

    def enforce_limit(self) -> None:
        """Remove the oldest pins while their actual bytes exceed the limit."""
        while self.nbytes > self.limit:
            oldest = self.pins.find_lru()
            if oldest is None:  # only blocks pinned on disk are left; they stay pinned there
                for block in self._ram:
                    block.pinned_until = 0.0
                return
            if not oldest.gives_way:
                logger.warning(
                    "removed a pin of %d entries: pins exceed half of `ram_cache_bytes`", len(oldest.entries)
                )
            self._remove(oldest)

    def on_checkpoint_added(self) -> None:
        """Update the pins after a checkpoint was added: a pinned prefix may now be restored from it."""
        self._sync_checkpoint_pins()
        self.enforce_limit()

    def _sync_checkpoint_pins(self) -> None:
        """Pin the deepest checkpoint on each pinned prefix, from which it is restored, and unpin all others."""
        needed: dict[Checkpoint | None, float] = {}
        for pin in self.pins:
            deepest = next(self._checkpoints.find_on_path(pin.entries, pin.namespace), None)
            needed[deepest] = max(pin.expires_at, needed.get(deepest, 0.0))
        self._apply([(checkpoint, needed.get(checkpoint, 0.0)) for checkpoint in self._checkpoints.all_checkpoints])

    def _sync_block_pins(self, entries: Entries, namespace: str, *, is_unpinned: bool = False) -> bool:
        """Set until when the blocks on this path are pinned; return whether a block changed.

        `is_unpinned`: a pin without expiry was removed. Otherwise blocks that are pinned on disk stay pinned.
        """
        self._sync_checkpoint_pins()
        spans = self.pins.find_spans(entries, namespace)
        blocks = [
            block
            for block in self._tree.find_stored_prefix(entries, namespace).blocks
            if is_unpinned or block.pinned_until < math.inf
        ]
        return self._apply([(block, find_expiry(spans, block.start)) for block in blocks])

    def _apply(self, items: Sequence[tuple[Block | Checkpoint, float]]) -> bool:
        """Set until when items are pinned; return whether one changed. Tiers notice by themselves that pins expire."""
        changed = [(item, item.pinned_until, until) for item, until in items if item.pinned_until != until]
        for item, _, until in changed:
            item.pinned_until = until
        if to_write := [item for item, before, until in changed if until or before == math.inf]:
            for tier in self._tiers:
                tier.pin(to_write)
        return bool(changed)
