"""Numbered events of the server: requests, prefix caches and engines. A ring of the last ones, and its readers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from afterglow.server.sse import encode_json

MAX_EVENTS = 4096
EventType: TypeAlias = Literal[
    "admitted", "plan", "progress", "first_token", "decoding", "finished", "failed", "stored", "loaded", "evicted",
    "engine",
]  # fmt: skip
PRIVATE_FIELDS = frozenset({"request", "reason", "error"})  # only the tenant of a request sees them


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `salt` is that of the tenant whose request it concerns; None: every tenant sees all of it."""

    number: int
    fields: dict[str, Any]
    salt: str | None

    def format(self, salt: str) -> bytes:
        """Format the event for a tenant. Of other tenants it shows sizes only.

        >>> ServerEvent(7, {"type": "failed", "error": "text"}, salt="a").format("b")
        b'id: 7\\ndata: {"type":"failed"}\\n\\n'
        """
        fields = self.fields
        if self.salt not in (None, salt):
            fields = {name: value for name, value in fields.items() if name not in PRIVATE_FIELDS}
        return f"id: {self.number}\ndata: {encode_json(fields)}\n\n".encode()


class EventRing:
    """The last events of a server. Used in its event loop only."""

    def __init__(self, capacity: int = MAX_EVENTS) -> None:
        self._events: deque[ServerEvent] = deque(maxlen=capacity)
        self._last_number = 0
        self._readers: set[asyncio.Event] = set()
        self._is_closed = False

    @property
    def last_number(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last_number

    @property
    def reader_count(self) -> int:
        """Number of clients that read the events."""
        return len(self._readers)

    def add(self, type: EventType, *, model: str, salt: str | None = None, **fields: Any) -> None:
        """Add an event and wake the readers."""
        self._last_number += 1
        content = {"type": type, "time": round(time.time(), 3), "model": model, **fields}
        self._events.append(ServerEvent(self._last_number, content, salt))
        for reader in self._readers:
            reader.set()

    async def read(self, salt: str, after: int | None = None) -> AsyncIterator[bytes]:
        """Yield the events after a number, formatted for a tenant; None: only new ones. Ends when the ring is closed.

        If some of them are gone, or the number is from an earlier start of the server, the first event is a gap.
        """
        arrived = asyncio.Event()
        self._readers.add(arrived)
        try:
            last = self._last_number if after is None else after
            while not self._is_closed:
                arrived.clear()
                oldest = self._events[0].number if self._events else self._last_number + 1
                if last > self._last_number or last < oldest - 1:
                    yield b'data: {"type":"gap"}\n\n'
                    last = oldest - 1
                for event in self._list_after(last):
                    last = event.number
                    yield event.format(salt)
                if last == self._last_number:
                    await arrived.wait()
        finally:
            self._readers.discard(arrived)

    def _list_after(self, number: int) -> list[ServerEvent]:
        """Return the events after a number. A slow reader continues with what is left of them."""
        count = min(self._last_number - number, len(self._events))
        return [self._events[index] for index in range(len(self._events) - count, len(self._events))]

    def close(self) -> None:
        """End all readers."""
        self._is_closed = True
        for reader in self._readers:
            reader.set()
