"""Beginnings that are never let go. Which ones there are, and which goes first where they take too much."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from afterglow.engine.entries import Ids, common_prefix

SHARE = 0.5  # of a budget that pinned things may take: something has to be left for everything else


@dataclass(slots=True, eq=False)
class Pin:
    """A beginning that is never let go. `system`: nobody asked for this one, it is the system prompt of requests."""

    salt: str
    ids: Ids
    system: bool = False
    used: float = field(default_factory=time.monotonic)


class Pins:
    """All pins of an engine."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins))

    @property
    def entries(self) -> int:
        """Of all together."""
        return sum(len(pin.ids) for pin in self._pins)

    def add(self, ids: Ids, salt: str, *, system: bool = False) -> None:
        self._pins.append(Pin(salt, ids.copy(), system))

    def find(self, ids: Ids, salt: str) -> Pin | None:
        """The pin on exactly these entries."""
        return next((pin for pin in self._pins if pin.salt == salt and np.array_equal(pin.ids, ids)), None)

    def remove(self, ids: Ids, salt: str) -> bool:
        """Take a pin back; False: there was none on exactly these entries."""
        pin = self.find(ids, salt)
        if pin is not None:
            self._pins.remove(pin)
        return pin is not None

    def hold(self, ids: Ids, salt: str, index: int) -> bool:
        """Whether the entry with this index belongs to a pinned beginning."""
        return any(pin.salt == salt and common_prefix(pin.ids, ids) > index for pin in self._pins)

    def depths(self, ids: Ids, salt: str) -> list[int]:
        """Where pinned beginnings of these entries end."""
        own = [pin for pin in self._pins if pin.salt == salt]
        return [len(pin.ids) for pin in own if common_prefix(pin.ids, ids) == len(pin.ids)]

    def oldest(self, *, system: bool = False) -> Pin | None:
        """The one that goes first: of those that nobody asked for the one not used for longest; then, unless only
        `system` ones may go, of the others."""
        found = [pin for pin in self._pins if pin.system or not system]
        return min(found, key=lambda pin: (not pin.system, pin.used), default=None)
