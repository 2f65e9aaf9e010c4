"""Log of the changes of the cached state, for observers."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

MAX_CACHE_EVENTS = 1024
CacheEventKind: TypeAlias = Literal["stored", "loaded", "evicted"]


class CacheEvent(NamedTuple):
    """Entries that were stored in a tier, loaded from it or evicted from it. Contains no content."""

    kind: CacheEventKind
    tier: str  # "device", "ram", "disk", "shared", or "checkpoint" for partial states in RAM
    entries: int
    nbytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheEventPage:
    """Events after a number, oldest first. `log_id` is another one after a restart of the engine."""

    log_id: str
    last_number: int
    events: tuple[CacheEvent, ...]


class CacheEventLog:
    """The last events of an engine, numbered from 1. The parts of the prefix cache record them here.

    >>> log = CacheEventLog()
    >>> log.record("stored", "ram", entries=64, nbytes=4096)
    >>> log.get_page(after=0).events[0].tier
    'ram'
    """

    def __init__(self) -> None:
        self._log_id = os.urandom(8).hex()
        self._last_number = 0
        self._events: deque[CacheEvent] = deque(maxlen=MAX_CACHE_EVENTS)

    def record(self, kind: CacheEventKind, tier: str, *, entries: int, nbytes: float, seconds: float = 0.0) -> None:
        """Record an event, unless it concerns nothing."""
        if entries > 0 or nbytes > 0:
            self._events.append(CacheEvent(kind, tier, entries, int(nbytes), seconds))
            self._last_number += 1

    def get_page(self, after: int) -> CacheEventPage:
        """Return the events after a number, as far as they are still in the log."""
        count = min(max(0, self._last_number - after), len(self._events))
        events = tuple(self._events)[len(self._events) - count :]
        return CacheEventPage(self._log_id, self._last_number, events)
