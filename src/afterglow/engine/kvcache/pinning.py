"""Pins made true: what they hold is marked where it is kept, and they stay within their share of the budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from afterglow.engine.kvcache.blocks import BlockTree
from afterglow.engine.kvcache.checkpoint_store import CheckpointStore
from afterglow.engine.kvcache.disk.files import build_file_name
from afterglow.engine.kvcache.disk.tier import DiskTier
from afterglow.engine.kvcache.pins import MAX_PINNED_FRACTION, Pins
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.types.entries import Entries
from afterglow.errors import InvalidArgument

logger = logging.getLogger("afterglow.engine.kvcache.pinning")


class PinManager:
    """Owns the pins. `width` says how many bytes an entry takes, 0 where that is not known yet."""

    def __init__(
        self,
        ram: RamTier,
        checkpoints: CheckpointStore,
        tree: BlockTree,
        disk_tier: DiskTier | None,
        bytes_per_entry: Callable[[], float],
    ) -> None:
        self.pins = Pins()
        self._ram = ram
        self._checkpoints = checkpoints
        self._tree = tree
        self._disk_tier = disk_tier
        self._bytes_per_entry = bytes_per_entry

    @property
    def nbytes(self) -> int:
        """Of all that is pinned and in RAM."""
        return self._ram.count_pinned_bytes() + self._checkpoints.pinned_bytes

    @property
    def limit(self) -> int:
        return int(self._ram.limit * MAX_PINNED_FRACTION)

    def pin(self, entries: Entries, salt: str, *, is_system: bool = False) -> None:
        """Never let go of these entries again, once they are stored.

        Pins of `system` prompts make room for each other, the one not used for longest first, and for those that
        somebody asked for; such a one is refused where there is still no room.
        """
        known = self.pins.find(entries, salt)
        if known is not None:
            known.last_used, known.is_system = time.monotonic(), known.is_system and is_system
            return
        needed = int(len(entries) * self._bytes_per_entry())
        while (taken := int(self.pins.total_entries * self._bytes_per_entry())) + needed > self.limit:
            oldest = self.pins.find_lru(system_only=True) if needed <= self.limit else None
            if oldest is not None:
                self.unpin(oldest.entries, oldest.salt)
            elif is_system:
                return
            else:
                what = f"would take {needed:,} bytes; pins take {taken:,}, and may {self.limit:,}, half of `ram_bytes`"
                raise InvalidArgument("entries", f"{what}: unpin something, or allow more")
        self.pins.add(entries, salt, is_system=is_system)
        self._sync_block_pins(entries, salt)
        self.enforce_limit()

    def unpin(self, entries: Entries, salt: str) -> bool:
        """Take a pin back; False: there was none on exactly these entries."""
        found = self.pins.remove(entries, salt)
        return self._sync_block_pins(entries, salt) or found

    def enforce_limit(self) -> None:
        """Pins whose bytes turned out to be more than their share go, the oldest first."""
        while self.nbytes > self.limit:
            oldest = self.pins.find_lru()
            if oldest is None:  # what is left was pinned on disk, and stays so there
                for segment in self._ram:
                    segment.pinned = False
                return
            if not oldest.is_system:
                logger.warning("a pin of %d entries goes: pins take more than half of `ram_bytes`", len(oldest.entries))
            self.unpin(oldest.entries, oldest.salt)

    def on_checkpoint_added(self) -> None:
        """There is another checkpoint: perhaps a pinned beginning is restored from it from now on."""
        self._sync_checkpoint_pins()
        self.enforce_limit()

    def _sync_checkpoint_pins(self) -> None:
        """Let the checkpoints that pinned beginnings are restored from stay with them: of each the deepest."""
        held = {next(self._checkpoints.find_on_path(pin.entries, pin.salt), None) for pin in self.pins}
        changed = [one for one in self._checkpoints.all_checkpoints if one.pinned != (one in held)]
        for checkpoint in changed:
            checkpoint.pinned = not checkpoint.pinned
        self._sync_disk_pins([(build_file_name("state", one.key), one.pinned) for one in changed])

    def _sync_block_pins(self, entries: Entries, salt: str) -> bool:
        """Make the marks on these segments say what the pins say; whether that changed something."""
        self._sync_checkpoint_pins()
        changed = []
        for segment in self._tree.find_stored_prefix(entries, salt, aligned=False).blocks:
            if segment.pinned != self.pins.is_pinned(entries, salt, segment.start):
                segment.pinned = not segment.pinned
                changed.append((build_file_name("cells", segment.key), segment.pinned))
        self._sync_disk_pins(changed)
        return bool(changed)

    def _sync_disk_pins(self, changed: list[tuple[str, bool]]) -> None:
        if self._disk_tier is not None and changed:
            for wanted in (True, False):
                self._disk_tier.writer.pin([name for name, pinned in changed if pinned == wanted], pinned=wanted)
