"""Beginnings that are never let go. Which ones there are, and which goes first where they take too much."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from afterglow.engine.types.entries import Entries, common_prefix_length

MAX_PINNED_FRACTION = 0.5  # of a budget that pinned things may take: something has to be left for everything else


@dataclass(slots=True, eq=False)
class Pin:
    """A beginning that is never let go. `system`: nobody asked for this one, it is the system prompt of requests."""

    salt: str
    entries: Entries
    is_system: bool = False
    last_used: float = field(default_factory=time.monotonic)


class Pins:
    """All pins of an engine."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins))

    @property
    def total_entries(self) -> int:
        """Of all together."""
        return sum(len(pin.entries) for pin in self._pins)

    def add(self, entries: Entries, salt: str, *, is_system: bool = False) -> None:
        self._pins.append(Pin(salt, entries.copy(), is_system))

    def find(self, entries: Entries, salt: str) -> Pin | None:
        """The pin on exactly these entries."""
        return next((pin for pin in self._pins if pin.salt == salt and np.array_equal(pin.entries, entries)), None)

    def remove(self, entries: Entries, salt: str) -> bool:
        """Take a pin back; False: there was none on exactly these entries."""
        pin = self.find(entries, salt)
        if pin is not None:
            self._pins.remove(pin)
        return pin is not None

    def is_pinned(self, entries: Entries, salt: str, index: int) -> bool:
        """Whether the entry with this index belongs to a pinned beginning."""
        return any(pin.salt == salt and common_prefix_length(pin.entries, entries) > index for pin in self._pins)

    def find_positions(self, entries: Entries, salt: str) -> list[int]:
        """Where pinned beginnings of these entries end."""
        own = [pin for pin in self._pins if pin.salt == salt]
        return [len(pin.entries) for pin in own if common_prefix_length(pin.entries, entries) == len(pin.entries)]

    def find_lru(self, *, system_only: bool = False) -> Pin | None:
        """The one that goes first: of those that nobody asked for the one not used for longest; then, unless only
        `system` ones may go, of the others."""
        found = [pin for pin in self._pins if pin.is_system or not system_only]
        return min(found, key=lambda pin: (not pin.is_system, pin.last_used), default=None)
