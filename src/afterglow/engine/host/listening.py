"""Takes what a child process sends: on the thread that looks after it, or in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from afterglow.engine.host.pipe import MessagePipe


class MessageListener:
    """Gives every message to `take`, in order. `wait` is called again and again by one thread.

    In an event loop, where their readers are, tokens come with one thread less to be woken: on two busy cores that was
    a millisecond of ten for each. Should the loop be held up, or closed, the waiting thread reads.
    """

    def __init__(self, pipe: MessagePipe, on_message: Callable[..., None]) -> None:
        self._pipe, self._on_message = pipe, on_message
        self._read_lock = threading.Lock()  # who has it reads, and hands on
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._has_read = False  # in the loop, since the last look
        self._errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Read in this loop from now on, or, without one, on the thread that waits. From any thread."""
        self._event_loop = loop
        if loop is not None:
            number = self._pipe.fileno()
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(loop.add_reader, number, self._on_readable, loop, number)
        self._errors.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait so long for something to come and be taken; whether it did. Raises what went wrong with it."""
        if self._event_loop is None:
            return self._pipe.wait(seconds) and self._read()
        try:
            trouble = self._errors.get(timeout=seconds)
        except queue.Empty:
            heard, self._has_read = self._has_read, False
            return heard or self._read()
        if trouble is not None:
            raise trouble
        return False

    def _read(self) -> bool:
        """Take what is there, without waiting; whether there was something."""
        with self._read_lock:
            messages = self._pipe.receive(blocking=False)
            for message in messages:
                self._on_message(*message)
        return bool(messages)

    def _on_readable(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        """Called in the loop, for the socket of this number: it may be closed by now, and have none."""
        try:
            if self._event_loop is loop:
                self._has_read = self._read() or self._has_read
                return
        except BaseException as trouble:  # the thread that waits decides what becomes of it
            self._errors.put(trouble)
        loop.remove_reader(descriptor)
