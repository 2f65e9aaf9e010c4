"""Thread host: an engine in a thread of this process. Requests come from any thread, events return through streams."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.loop import EngineLoop, close_engine, describe_error, logger, try_call
from afterglow.engine.host.stream import EventStream, PendingRequests
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.request import Request
from afterglow.errors import AfterglowError, Closed, EngineCrashed

ResultT = TypeVar("ResultT")


class EngineThread(EngineHost):
    """Owns an engine and the only thread that uses it.

    >>> with EngineThread(lambda: Engine(backend)) as engine:
    ...     events = list(engine.submit(Request(id="a", entries=[1, 2, 3])))
    """

    def __init__(self, factory: Callable[[], Engine]) -> None:
        """Start the thread and wait until `factory` has built the engine. Raises what `factory` raises."""
        self._pending = PendingRequests(self.cancel)
        self._loop = EngineLoop(self._pending.deliver)
        self.has_crashed = False
        self.store_report: StoreReport | None = None  # set by `close`
        self._store_timeout = CLOSE_TIMEOUT_SECONDS
        self._engine: Engine | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(factory,), name="afterglow-engine", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:  # also Ctrl-C while a model loads: the engine is then closed once it is built
            self._loop.close()
            raise
        atexit.register(self.close)  # the library must not be unloaded while the thread is inside it

    restarts = 0  # a crashed thread is not restarted

    @property
    def is_ready(self) -> bool:
        """Whether the engine runs."""
        return not self.has_crashed

    @property
    def has_given_up(self) -> bool:
        """Whether the engine crashed, so that every request and call raises `EngineCrashed`."""
        return self.has_crashed

    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Submit several requests at once, so that a common prefix is prefilled once."""
        streams = self._pending.add_streams([request.id for request in requests])
        self._loop.submit(*requests)
        return streams

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has no effect: events reach an event loop directly from the engine thread."""

    def cancel(self, id: str) -> None:
        """Cancel a request, even during a decode. An unknown id is ignored."""
        self._loop.cancel(id)

    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT:
        """Run a function on the engine thread, between two steps; return its result, or that of its future."""
        if threading.current_thread() is self._thread:  # a call inside a call: waiting would deadlock
            assert self._engine is not None
            return _resolve(function(self._engine))
        number, future = self._pending.add_call()
        self._loop.enqueue(lambda engine: self._pending.resolve_call(number, try_call(function, engine)))
        value, error = future.result()
        if error is not None:
            raise error
        return _resolve(value)  # type: ignore[no-any-return]

    def close(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End every request with `Closed` and stop the thread, with `store_timeout` seconds for the prefix cache.

        May be called twice. Has no effect in a fork. `store_report` says what was stored.
        """
        if not self._pending.owner.is_current:
            return
        self._store_timeout = store_timeout
        self._pending.close(Closed("engine"))
        self._loop.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self, factory: Callable[[], Engine]) -> None:
        try:
            engine = self._engine = factory()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        reason: AfterglowError = Closed("engine")
        try:
            self._loop.run(engine)
        except BaseException as error:  # an engine bug must not leave a client waiting
            logger.exception("the engine crashed")
            reason = EngineCrashed(describe_error(error))
            self.has_crashed = True
        self._pending.close(reason)
        self._pending.fail_all(reason)
        self.store_report = close_engine(engine, self._store_timeout)


def _resolve(value: ResultT | Future[ResultT]) -> ResultT:
    return value.result() if isinstance(value, Future) else value
