"""Event streams of requests, and the table of pending requests and calls of a host.

Knows threads and asyncio, but not whether the engine runs in a thread or a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import Any

from afterglow.engine.host.owner import OwnerProcess
from afterglow.engine.types.request import EndEvent, EngineEvent, Failed, Finished, Usage
from afterglow.errors import AfterglowError, Cancelled, Closed, InvalidArgument

CANCEL_POLL_SECONDS = 0.02  # interval between checks of a cancel event


class EventStream:
    """Events of one request. Iterate with `for` or `async for` until the request ends; leaving early cancels it.

    A stream has one reader at a time. A slow reader never blocks the engine: its events wait in a queue, which is
    unbounded unless `limit_buffer` is called.

    >>> for event in engine_thread.submit(request):
    ...     print(type(event).__name__)
    PrefillProgress
    Token
    Finished
    """

    def __init__(self, id: str, cancel: Callable[[EventStream], None]) -> None:
        self.id = id
        self.owner = OwnerProcess("stream")
        self.end_event: EndEvent | None = None  # set once it has been read
        self.is_cancelled = False  # cancellation was requested
        self._cancel = cancel
        self._queue: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._max_buffered_events: int | None = None
        self._is_overfull = False  # the request was cancelled because too many events waited for the reader
        self._has_ended = False  # the last event is in the queue
        self._end_callbacks: list[Callable[[], None]] = []
        self._event_arrived: asyncio.Event | None = None  # wakes an asyncio reader
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def put(self, event: EngineEvent) -> asyncio.AbstractEventLoop | None:
        """Add an event, from the thread of the host. Return the event loop of an asyncio reader that must be woken."""
        if isinstance(event, Finished | Failed):
            if self._is_overfull and isinstance(event, Failed):
                reason = f"the client read too slowly: more than {self._max_buffered_events} tokens were waiting"
                event = replace(event, error=Cancelled(reason))
            self._queue.put(event)
            self._has_ended = True
            self._run_end_callbacks()
        else:
            self._queue.put(event)
            limit = self._max_buffered_events
            if limit is not None and self._queue.qsize() > limit and not self._is_overfull:
                self._is_overfull = True
                self.cancel()
        return self._event_loop

    def limit_buffer(self, max_events: int) -> None:
        """Cancel the request if more than `max_events` events wait for the reader."""
        self._max_buffered_events = max_events

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the request ends, even if nobody reads the events. May run in any thread."""
        self._end_callbacks.append(callback)
        if self._has_ended:
            self._run_end_callbacks()

    def _run_end_callbacks(self) -> None:
        while self._end_callbacks:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._end_callbacks.pop()()

    def wake_reader(self) -> None:
        """Wake the asyncio reader. Must be called in its event loop."""
        if self._event_arrived is not None:
            self._event_arrived.set()

    def handle_loop_closed(self) -> None:
        """Cancel the request because the event loop of its reader is closed."""
        self._event_loop = None
        self.cancel()

    def cancel(self) -> None:
        """Request cancellation. The stream then ends with `Failed(Cancelled)`, unless it has already ended."""
        self.is_cancelled = True
        self._cancel(self)

    def move_to(self, cancel: Callable[[EventStream], None]) -> None:
        """Continue with the events of another host, which cancels the request with `cancel` from now on."""
        self._cancel = cancel

    def __iter__(self) -> Iterator[EngineEvent]:
        return self.iterate_until(None)

    def iterate_until(self, cancel_event: threading.Event | None) -> Iterator[EngineEvent]:
        """Iterate over the events; cancel the request once `cancel_event` is set."""
        stop_polling = cancel_event is None
        try:
            while self.end_event is None:
                self.owner.check()
                if cancel_event is not None and not stop_polling and cancel_event.is_set():
                    stop_polling = True
                    self.cancel()
                try:
                    event = self._queue.get(timeout=None if stop_polling else CANCEL_POLL_SECONDS)
                except queue.Empty:
                    continue
                yield self._record_end(event)
        finally:
            self.cancel_unfinished()

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        self._event_arrived = arrived = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        try:
            while self.end_event is None:
                self.owner.check()
                arrived.clear()  # before the check: an event that arrives after it sets this again
                try:
                    event = self._queue.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                else:
                    yield self._record_end(event)
        finally:
            self._event_loop = None
            self.cancel_unfinished()

    def _record_end(self, event: EngineEvent) -> EngineEvent:
        if isinstance(event, Finished | Failed):
            self.end_event = event
        return event

    def cancel_unfinished(self) -> None:
        """Request cancellation if the end was not read: the reader is gone."""
        if self.end_event is None:
            self.cancel()


class PendingRequests:
    """Pending requests and calls of a host. Each gets exactly one end, and none is added after `close`.

    Errors are delivered as copies, because raising an error writes a traceback into it.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self.owner = OwnerProcess("engine")
        self.lock = threading.RLock()  # re-entrant: garbage collection of a stream may cancel it at any moment
        self._cancel = cancel
        self._streams: dict[str, EventStream] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._close_reason: AfterglowError | None = None

    def add_streams(self, ids: Sequence[str]) -> list[EventStream]:
        """Create the streams of new requests: all of them, or none if an id is in use."""
        self.owner.check()
        with self.lock:
            self._check_open()
            for index, id in enumerate(ids):
                if id in self._streams or id in ids[:index]:
                    raise InvalidArgument("id", f"{id!r} is already in use by another request")
            streams = [EventStream(id, self._cancel_stream) for id in ids]
            self._streams.update(zip(ids, streams, strict=True))
            return streams

    def adopt_streams(self, streams: Sequence[EventStream]) -> None:
        """Take over the streams of requests that another host could not serve."""
        with self.lock:
            self._check_open()
            for stream in streams:
                stream.move_to(self._cancel_stream)
                self._streams[stream.id] = stream

    def remove_streams(self, ids: Container[str]) -> list[EventStream]:
        """Remove the streams of requests that another host takes over."""
        with self.lock:
            return [self._streams.pop(id) for id in list(self._streams) if id in ids]

    def add_call(self) -> tuple[int, Future[Any]]:
        """Create the number and the future of a new call."""
        self.owner.check()
        with self.lock:
            self._check_open()
            number, future = next(self._call_numbers), Future[Any]()
            self._calls[number] = future
            return number, future

    def deliver(self, events: Iterable[EngineEvent]) -> None:
        """Put events into their streams; remove streams that end."""
        deliveries = []
        with self.lock:
            for event in events:
                ended = isinstance(event, Finished | Failed)
                stream = self._streams.pop(event.request_id, None) if ended else self._streams.get(event.request_id)
                if stream is not None:
                    deliveries.append((stream, event))
        deliver_events(deliveries)

    def resolve_call(self, number: int, value: object) -> None:
        """Set the result of a call."""
        with self.lock:
            future = self._calls.pop(number, None)
        if future is not None:
            future.set_result(value)

    def close(self, error: AfterglowError) -> None:
        """Reject new requests and calls with this error. `Closed` takes precedence over a crash."""
        with self.lock:
            if not isinstance(self._close_reason, Closed):
                self._close_reason = error

    def fail_all(
        self, error: AfterglowError, *, except_requests: Container[str] = (), except_calls: Container[int] = ()
    ) -> None:
        """Fail the pending requests and calls with this error, except those with these ids and numbers."""
        with self.lock:
            streams = [self._streams.pop(id) for id in list(self._streams) if id not in except_requests]
            futures = [self._calls.pop(number) for number in list(self._calls) if number not in except_calls]
        deliver_events([(stream, Failed(stream.id, copy(error), Usage())) for stream in streams])
        for future in futures:
            future.set_exception(copy(error))

    def _check_open(self) -> None:
        if self._close_reason is not None:
            raise copy(self._close_reason)

    def _cancel_stream(self, stream: EventStream) -> None:
        """Cancel without the lock: a stream may be garbage collected in a thread that holds the lock of the engine."""
        if self.owner.is_current and self._streams.get(stream.id) is stream:  # a later request may have the same id
            self._cancel(stream.id)


def deliver_events(deliveries: Iterable[tuple[EventStream, EngineEvent]]) -> None:
    """Put events into streams. Wakes each event loop once for all its readers, because a wake is a system call."""
    streams_by_loop: dict[asyncio.AbstractEventLoop, list[EventStream]] = {}
    for stream, event in deliveries:
        if (loop := stream.put(event)) is not None:
            streams_by_loop.setdefault(loop, []).append(stream)
    for loop, streams in streams_by_loop.items():
        if is_current_loop(loop):
            _wake_readers(streams)
            continue
        try:
            loop.call_soon_threadsafe(_wake_readers, streams)
        except RuntimeError:
            for stream in streams:
                stream.handle_loop_closed()


def is_current_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the caller runs in this event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _wake_readers(streams: Iterable[EventStream]) -> None:
    for stream in streams:
        stream.wake_reader()


def build_failed_stream(id: str, error: AfterglowError) -> EventStream:
    """Build the stream of a rejected request; the error is its only event."""
    stream = EventStream(id, cancel=lambda _: None)
    stream.put(Failed(id, error, Usage()))
    return stream
