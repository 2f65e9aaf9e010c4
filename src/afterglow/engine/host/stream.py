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

from afterglow.engine.types.request import EndEvent, EngineEvent, Failed, Finished, Usage
from afterglow.errors import AfterglowError, Closed, InvalidArgument

CANCEL_POLL_SECONDS = 0.02  # seconds between looks at a cancel flag


class EventStream:
    """Iterate over it, in a thread or with `async for`, until the request ends. Leaving early cancels it.

    It is for one reader at a time. Events wait in it without bound, so a slow reader holds nobody up.

    >>> for event in engine_thread.submit(request):
    ...     print(event)
    """

    def __init__(self, id: str, cancel: Callable[[EventStream], None]) -> None:
        self.id = id
        self.end_event: EndEvent | None = None  # once it was read
        self._cancel = cancel
        self._queue: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._event_arrived: asyncio.Event | None = None  # of a reader in an event loop
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def put(self, event: EngineEvent) -> asyncio.AbstractEventLoop | None:
        """Called by the engine's side, from its thread. The loop in which the reader has to be woken, if in one."""
        self._queue.put(event)
        return self._event_loop

    def wake_reader(self) -> None:
        """Called in the reader's loop: something is there."""
        if self._event_arrived is not None:
            self._event_arrived.set()

    def handle_loop_closed(self) -> None:
        """The reader's loop was closed: nobody will ever read on."""
        self._event_loop = None
        self.cancel()

    def cancel(self) -> None:
        """Ask for an end; it comes as `Failed(Cancelled)`, unless another end is on its way already."""
        self._cancel(self)

    def __iter__(self) -> Iterator[EngineEvent]:
        return self.iterate_until(None)

    def iterate_until(self, cancel_event: threading.Event | None) -> Iterator[EngineEvent]:
        """Iterate, and cancel the request once `cancel` is set."""
        asked = cancel_event is None
        try:
            while self.end_event is None:
                if cancel_event is not None and not asked and cancel_event.is_set():
                    asked = True
                    self.cancel()
                try:
                    event = self._queue.get(timeout=None if asked else CANCEL_POLL_SECONDS)
                except queue.Empty:
                    continue
                yield self._record_end(event)
        finally:
            self._cancel_unfinished()

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        self._event_arrived = arrived = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        try:
            while self.end_event is None:
                arrived.clear()  # before the look: what comes after it sets it again
                try:
                    event = self._queue.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                else:
                    yield self._record_end(event)
        finally:
            self._event_loop = None
            self._cancel_unfinished()

    def _record_end(self, event: EngineEvent) -> EngineEvent:
        if isinstance(event, Finished | Failed):
            self.end_event = event
        return event

    def _cancel_unfinished(self) -> None:
        if self.end_event is None:  # nobody is listening any more
            self.cancel()


class PendingRequests:
    """Everybody who waits for the engine. Each gets exactly one end, and after `refuse` nobody begins to wait.

    Errors are handed out as copies: whoever raises one writes a traceback into it.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self.lock = threading.RLock()  # re-entrant: a forgotten stream may be collected, and cancel, at any moment
        self._cancel = cancel
        self._streams: dict[str, EventStream] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._close_reason: AfterglowError | None = None

    def add_stream(self, id: str) -> EventStream:
        """A place for the events of a new request."""
        with self.lock:
            self._check_open()
            if id in self._streams:
                raise InvalidArgument("id", f"{id!r} is being served already")
            stream = self._streams[id] = EventStream(id, self._cancel_stream)
            return stream

    def add_call(self) -> tuple[int, Future[Any]]:
        """A place for the answer to a call, and its number."""
        with self.lock:
            self._check_open()
            number, answer = next(self._call_numbers), Future[Any]()
            self._calls[number] = answer
            return number, answer

    def deliver(self, events: Iterable[EngineEvent]) -> None:
        deliveries = []
        with self.lock:
            for event in events:
                ended = isinstance(event, Finished | Failed)
                stream = self._streams.pop(event.request_id, None) if ended else self._streams.get(event.request_id)
                if stream is not None:
                    deliveries.append((stream, event))
        deliver_events(deliveries)

    def resolve_call(self, number: int, value: object) -> None:
        """Give a call its answer."""
        with self.lock:
            answer = self._calls.pop(number, None)
        if answer is not None:
            answer.set_result(value)

    def close(self, error: AfterglowError) -> None:
        """From now on there is nothing to wait for, and this is why. Closed is stronger than crashed."""
        with self.lock:
            if not isinstance(self._close_reason, Closed):
                self._close_reason = error

    def fail_all(self, error: AfterglowError) -> None:
        """Everybody who waits now gets this error."""
        with self.lock:
            streams, self._streams = self._streams, {}
            answers, self._calls = self._calls, {}
        deliver_events([(stream, Failed(stream.id, copy(error), Usage())) for stream in streams.values()])
        for answer in answers.values():
            answer.set_exception(copy(error))

    def _check_open(self) -> None:
        if self._close_reason is not None:
            raise copy(self._close_reason)

    def _cancel_stream(self, stream: EventStream) -> None:
        """Without the lock: a stream is collected, and cancels, also in a thread that holds the engine's own."""
        if self._streams.get(stream.id) is stream:  # its id may be another request's by now
            self._cancel(stream.id)


def deliver_events(deliveries: Iterable[tuple[EventStream, EngineEvent]]) -> None:
    """Put events into streams. An event loop is woken once for all of its readers: every wake is a system call."""
    woken: dict[asyncio.AbstractEventLoop, list[EventStream]] = {}
    for stream, event in deliveries:
        if (loop := stream.put(event)) is not None:
            woken.setdefault(loop, []).append(stream)
    for loop, streams in woken.items():
        if is_current_loop(loop):
            _wake_readers(streams)
            continue
        try:
            loop.call_soon_threadsafe(_wake_readers, streams)
        except RuntimeError:
            for stream in streams:
                stream.handle_loop_closed()


def is_current_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether we are in this event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _wake_readers(streams: Iterable[EventStream]) -> None:
    for stream in streams:
        stream.wake_reader()


def build_failed_stream(id: str, error: AfterglowError) -> EventStream:
    """The stream of a request that was not accepted: what is wrong with it is its only event."""
    stream = EventStream(id, cancel=lambda _: None)
    stream.put(Failed(id, error, Usage()))
    return stream
