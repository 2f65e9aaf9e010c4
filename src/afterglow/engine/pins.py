"""Beginnings that are never let go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afterglow.engine.entries import Ids, common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A beginning that is never let go."""

    salt: str
    ids: Ids


class Pins:
    """All pins of an engine."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    def add(self, ids: Ids, salt: str) -> None:
        self._pins.append(Pin(salt, ids.copy()))

    def remove(self, ids: Ids, salt: str) -> bool:
        """Take a pin back; False: there was none on exactly these entries."""
        found = [pin for pin in self._pins if pin.salt == salt and np.array_equal(pin.ids, ids)]
        self._pins = [pin for pin in self._pins if pin not in found]
        return bool(found)

    def hold(self, ids: Ids, salt: str, index: int) -> bool:
        """Whether the entry with this index belongs to a pinned beginning."""
        return any(pin.salt == salt and common_prefix(pin.ids, ids) > index for pin in self._pins)
