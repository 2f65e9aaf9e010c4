"""Takes what a child process sends: on the thread that looks after it, or in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from afterglow.engine.wire import Wire


class Listener:
    """Gives every message to `take`, in order. `wait` is called again and again by one thread.

    In an event loop, where their readers are, tokens come with one thread less to be woken: on two busy cores that was
    a millisecond of ten for each. Should the loop be held up, or closed, the waiting thread reads.
    """

    def __init__(self, wire: Wire, take: Callable[..., None]) -> None:
        self._wire, self._take = wire, take
        self._reading = threading.Lock()  # who has it reads, and hands on
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard = False  # in the loop, since the last look
        self._trouble: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def move(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Read in this loop from now on, or, without one, on the thread that waits. From any thread."""
        self._loop = loop
        if loop is not None:
            number = self._wire.fileno()
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(loop.add_reader, number, self._arrived, loop, number)
        self._trouble.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait so long for something to come and be taken; whether it did. Raises what went wrong with it."""
        if self._loop is None:
            return self._wire.wait(seconds) and self._read()
        try:
            trouble = self._trouble.get(timeout=seconds)
        except queue.Empty:
            heard, self._heard = self._heard, False
            return heard or self._read()
        if trouble is not None:
            raise trouble
        return False

    def _read(self) -> bool:
        """Take what is there, without waiting; whether there was something."""
        with self._reading:
            messages = self._wire.receive(wait=False)
            for message in messages:
                self._take(*message)
        return bool(messages)

    def _arrived(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Called in the loop, for the socket of this number: it may be closed by now, and have none."""
        try:
            if self._loop is loop:
                self._heard = self._read() or self._heard
                return
        except BaseException as trouble:  # the thread that waits decides what becomes of it
            self._trouble.put(trouble)
        loop.remove_reader(number)
