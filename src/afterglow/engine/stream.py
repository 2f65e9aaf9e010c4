"""The events of one request, on their way to whoever asked, and the table of everybody who waits.

It knows threads and asyncio, and nothing of where the engine is.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from copy import copy
from typing import Any

from afterglow.engine.request import EndEvent, Event, Failed, Finished, Usage
from afterglow.errors import AfterglowError, Closed, InvalidArgument

POLL = 0.02  # seconds between looks at a cancel flag


class Stream:
    """Iterate over it, in a thread or with `async for`, until the request ends. Leaving early cancels it.

    It is for one reader at a time. Events wait in it without bound, so a slow reader holds nobody up.

    >>> for event in engine_thread.submit(request):
    ...     print(event)
    """

    def __init__(self, id: str, cancel: Callable[[Stream], None]) -> None:
        self.id = id
        self.end: EndEvent | None = None  # once it was read
        self._cancel = cancel
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._arrived: asyncio.Event | None = None  # of a reader in an event loop
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, event: Event) -> asyncio.AbstractEventLoop | None:
        """Called by the engine's side, from its thread. The loop in which the reader has to be woken, if in one."""
        self._queue.put(event)
        return self._loop

    def wake(self) -> None:
        """Called in the reader's loop: something is there."""
        if self._arrived is not None:
            self._arrived.set()

    def lost(self) -> None:
        """The reader's loop was closed: nobody will ever read on."""
        self._loop = None
        self.cancel()

    def cancel(self) -> None:
        """Ask for an end; it comes as `Failed(Cancelled)`, unless another end is on its way already."""
        self._cancel(self)

    def __iter__(self) -> Iterator[Event]:
        return self.until(None)

    def until(self, cancel: threading.Event | None) -> Iterator[Event]:
        """Iterate, and cancel the request once `cancel` is set."""
        asked = cancel is None
        try:
            while self.end is None:
                if cancel is not None and not asked and cancel.is_set():
                    asked = True
                    self.cancel()
                try:
                    event = self._queue.get(timeout=None if asked else POLL)
                except queue.Empty:
                    continue
                yield self._note(event)
        finally:
            self._abandon()

    async def __aiter__(self) -> AsyncIterator[Event]:
        self._arrived = arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            while self.end is None:
                arrived.clear()  # before the look: what comes after it sets it again
                try:
                    event = self._queue.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                else:
                    yield self._note(event)
        finally:
            self._loop = None
            self._abandon()

    def _note(self, event: Event) -> Event:
        if isinstance(event, Finished | Failed):
            self.end = event
        return event

    def _abandon(self) -> None:
        if self.end is None:  # nobody is listening any more
            self.cancel()


class Waiting:
    """Everybody who waits for the engine. Each gets exactly one end, and after `refuse` nobody begins to wait.

    Errors are handed out as copies: whoever raises one writes a traceback into it.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self.lock = threading.RLock()  # re-entrant: a forgotten stream may be collected, and cancel, at any moment
        self._cancel = cancel
        self._streams: dict[str, Stream] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._over: AfterglowError | None = None

    def stream(self, id: str) -> Stream:
        """A place for the events of a new request."""
        with self.lock:
            self._check()
            if id in self._streams:
                raise InvalidArgument("id", f"{id!r} is being served already")
            stream = self._streams[id] = Stream(id, self._cancel_stream)
            return stream

    def answer(self) -> tuple[int, Future[Any]]:
        """A place for the answer to a call, and its number."""
        with self.lock:
            self._check()
            number, answer = next(self._numbers), Future[Any]()
            self._answers[number] = answer
            return number, answer

    def deliver(self, events: Iterable[Event]) -> None:
        deliveries = []
        with self.lock:
            for event in events:
                ended = isinstance(event, Finished | Failed)
                stream = self._streams.pop(event.id, None) if ended else self._streams.get(event.id)
                if stream is not None:
                    deliveries.append((stream, event))
        hand_out(deliveries)

    def resolve(self, number: int, value: object) -> None:
        """Give a call its answer."""
        with self.lock:
            answer = self._answers.pop(number, None)
        if answer is not None:
            answer.set_result(value)

    def refuse(self, error: AfterglowError) -> None:
        """From now on there is nothing to wait for, and this is why. Closed is stronger than crashed."""
        with self.lock:
            if not isinstance(self._over, Closed):
                self._over = error

    def fail(self, error: AfterglowError) -> None:
        """Everybody who waits now gets this error."""
        with self.lock:
            streams, self._streams = self._streams, {}
            answers, self._answers = self._answers, {}
        hand_out([(stream, Failed(stream.id, copy(error), Usage())) for stream in streams.values()])
        for answer in answers.values():
            answer.set_exception(copy(error))

    def _check(self) -> None:
        if self._over is not None:
            raise copy(self._over)

    def _cancel_stream(self, stream: Stream) -> None:
        """Without the lock: a stream is collected, and cancels, also in a thread that holds the engine's own."""
        if self._streams.get(stream.id) is stream:  # its id may be another request's by now
            self._cancel(stream.id)


def hand_out(deliveries: Iterable[tuple[Stream, Event]]) -> None:
    """Put events into streams. An event loop is woken once for all of its readers: every wake is a system call."""
    woken: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream, event in deliveries:
        if (loop := stream.put(event)) is not None:
            woken.setdefault(loop, []).append(stream)
    for loop, streams in woken.items():
        if is_running(loop):
            _wake(streams)
            continue
        try:
            loop.call_soon_threadsafe(_wake, streams)
        except RuntimeError:
            for stream in streams:
                stream.lost()


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether we are in this event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _wake(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.wake()


def refused(id: str, error: AfterglowError) -> Stream:
    """The stream of a request that was not accepted: what is wrong with it is its only event."""
    stream = Stream(id, cancel=lambda _: None)
    stream.put(Failed(id, error, Usage()))
    return stream
