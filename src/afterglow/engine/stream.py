"""The events of one request, on their way to whoever asked: from threads and from asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from afterglow.engine.request import Event, Failed, Finished

POLL = 0.02  # seconds between looks at a cancel flag


class Stream:
    """Iterate over it, in a thread or with `async for`, until the request ends.

    >>> for event in engine_thread.submit(request):
    ...     print(event)
    """

    def __init__(self, id: str, cancel: Callable[[str], None]) -> None:
        self.id = id
        self.end: Finished | Failed | None = None
        self._cancel = cancel
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], Any] | None = None

    def put(self, event: Event) -> None:
        """Called by the engine's side, from its thread."""
        self._queue.put(event)
        if (wake := self._wake) is not None:
            wake()

    def cancel(self) -> None:
        """Ask for an end; it comes as `Failed(Cancelled)`."""
        self._cancel(self.id)

    def __iter__(self) -> Iterator[Event]:
        try:
            while self.end is None:
                yield self._note(self._queue.get())
        finally:
            self._abandon()

    def until(self, cancel: threading.Event | None) -> Iterator[Event]:
        """Iterate, and cancel the request once `cancel` is set."""
        if cancel is None:
            yield from self
            return
        asked = False
        while self.end is None:
            if cancel.is_set() and not asked:
                asked = True
                self.cancel()
            try:
                yield self._note(self._queue.get(timeout=POLL))
            except queue.Empty:
                continue

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        try:
            while self.end is None:
                while not self._queue.empty() and self.end is None:
                    yield self._note(self._queue.get())
                if self.end is None:
                    arrived.clear()
                    if self._queue.empty():
                        await arrived.wait()
        finally:
            self._wake = None
            self._abandon()

    def _note(self, event: Event) -> Event:
        if isinstance(event, Finished | Failed):
            self.end = event
        return event

    def _abandon(self) -> None:
        if self.end is None:  # nobody is listening any more
            self.cancel()
