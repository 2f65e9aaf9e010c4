"""Pins made true: what they hold is marked where it is kept, and they stay within their share of the budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from afterglow.engine.disk_files import file_name
from afterglow.engine.entries import Ids
from afterglow.engine.marks import Marks
from afterglow.engine.pins import SHARE, Pins
from afterglow.engine.ram import Ram
from afterglow.engine.segments import SegmentTree
from afterglow.engine.shelf import Shelf
from afterglow.errors import InvalidArgument

logger = logging.getLogger("afterglow.engine.pinning")


class Pinning:
    """Owns the pins. `width` says how many bytes an entry takes, 0 where that is not known yet."""

    def __init__(
        self, ram: Ram, marks: Marks, tree: SegmentTree, shelf: Shelf | None, width: Callable[[], float]
    ) -> None:
        self.pins = Pins()
        self._ram = ram
        self._marks = marks
        self._tree = tree
        self._shelf = shelf
        self._width = width

    @property
    def nbytes(self) -> int:
        """Of all that is pinned and in RAM."""
        return self._ram.pinned_bytes() + self._marks.pinned_bytes

    @property
    def limit(self) -> int:
        return int(self._ram.limit * SHARE)

    def pin(self, ids: Ids, salt: str, *, system: bool = False) -> None:
        """Never let go of these entries again, once they are stored.

        Pins of `system` prompts make room for each other, the one not used for longest first, and for those that
        somebody asked for; such a one is refused where there is still no room.
        """
        known = self.pins.find(ids, salt)
        if known is not None:
            known.used, known.system = time.monotonic(), known.system and system
            return
        needed = int(len(ids) * self._width())
        while (taken := int(self.pins.entries * self._width())) + needed > self.limit:
            oldest = self.pins.oldest(system=True) if needed <= self.limit else None
            if oldest is not None:
                self.unpin(oldest.ids, oldest.salt)
            elif system:
                return
            else:
                what = f"would take {needed:,} bytes; pins take {taken:,}, and may {self.limit:,}, half of `ram_bytes`"
                raise InvalidArgument("entries", f"{what}: unpin something, or allow more")
        self.pins.add(ids, salt, system=system)
        self._mark_segments(ids, salt)
        self.bound()

    def unpin(self, ids: Ids, salt: str) -> bool:
        """Take a pin back; False: there was none on exactly these entries."""
        found = self.pins.remove(ids, salt)
        return self._mark_segments(ids, salt) or found

    def bound(self) -> None:
        """Pins whose bytes turned out to be more than their share go, the oldest first."""
        while self.nbytes > self.limit:
            oldest = self.pins.oldest()
            if oldest is None:  # what is left was pinned on disk, and stays so there
                for segment in self._ram:
                    segment.pinned = False
                return
            if not oldest.system:
                logger.warning("a pin of %d entries goes: pins take more than half of `ram_bytes`", len(oldest.ids))
            self.unpin(oldest.ids, oldest.salt)

    def note(self) -> None:
        """There is another checkpoint: perhaps a pinned beginning is restored from it from now on."""
        self._mark_checkpoints()
        self.bound()

    def _mark_checkpoints(self) -> None:
        """Let the checkpoints that pinned beginnings are restored from stay with them: of each the deepest."""
        held = {next(self._marks.along(pin.ids, pin.salt), None) for pin in self.pins}
        changed = [one for one in self._marks.checkpoints if one.pinned != (one in held)]
        for checkpoint in changed:
            checkpoint.pinned = not checkpoint.pinned
        self._tell_disk([(file_name("state", one.key), one.pinned) for one in changed])

    def _mark_segments(self, ids: Ids, salt: str) -> bool:
        """Make the marks on these segments say what the pins say; whether that changed something."""
        self._mark_checkpoints()
        changed = []
        for segment in self._tree.cover(ids, salt, aligned=False).segments:
            if segment.pinned != self.pins.hold(ids, salt, segment.start):
                segment.pinned = not segment.pinned
                changed.append((file_name("cells", segment.key), segment.pinned))
        self._tell_disk(changed)
        return bool(changed)

    def _tell_disk(self, changed: list[tuple[str, bool]]) -> None:
        if self._shelf is not None and changed:
            for wanted in (True, False):
                self._shelf.disk.pin([name for name, pinned in changed if pinned == wanted], pinned=wanted)
