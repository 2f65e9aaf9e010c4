"""An engine in a thread of this process: submit from anywhere, events come back through streams."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host.stream import EventStream, PendingRequests, build_failed_stream
from afterglow.engine.sampling.token_constraints import TokenConstraint
from afterglow.engine.types.request import EngineEvent, Failed, Finished, Request, Usage
from afterglow.errors import AfterglowError, Cancelled, Closed, EngineCrashed, InvalidArgument

T = TypeVar("T")
Command: TypeAlias = Callable[[Engine], None]
CallResult: TypeAlias = tuple[Any, BaseException | None]  # what came of a call: a value or an error
IDLE_AFTER_SECONDS = 0.25  # seconds without work after which what can wait is done: an agent's next turn comes sooner
MAX_COALESCE_WAIT_SECONDS = (
    0.02  # seconds that prompts wait for others that are on their way, so that all are computed together
)
logger = logging.getLogger("afterglow.engine")


class EngineLoop:
    """Steps an engine, and does between the steps what others ask for. All but `run` is for any thread."""

    def __init__(self, deliver: Callable[[list[EngineEvent]], None]) -> None:
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._last_step = 0.0  # when there was work
        self._expected_requests = 0  # requests that are on their way; the engine's thread owns this
        self._active_ids: set[str] = set()  # the requests that the engine has
        self._compiling_ids: set[str] = set()  # those whose grammar is being compiled; the engine's thread owns this
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="afterglow-grammar")  # threads come when needed

    def submit(self, *requests: Request) -> None:
        """Begin requests before the next step; what is wrong with one is delivered as its only event."""
        self._commands.put(functools.partial(self._submit, requests))

    def cancel(self, id: str) -> None:
        """End a request now, also in the middle of a decode; one that is on its way, as soon as it is there."""

        def end(engine: Engine) -> None:
            if id in self._active_ids:
                engine.cancel(id)

        def end_for_sure(engine: Engine) -> None:
            end(engine)
            if id in self._compiling_ids:
                self._compiling_ids.discard(id)
                self._fail_request(id, Cancelled(f"request {id} was cancelled"))

        if (engine := self._engine) is not None:
            end(engine)
        self._commands.put(end_for_sure)

    def expect_requests(self, change: int) -> None:
        """So many more requests are on their way, or, below 0, fewer."""

        def note(engine: Engine) -> None:
            self._expected_requests = max(0, self._expected_requests + change)

        self._commands.put(note)

    def enqueue(self, command: Command) -> None:
        """Run something between two steps. An error in it is an error of the engine."""
        self._commands.put(command)

    def close(self) -> None:
        """Let `run` return soon, also in the middle of a decode. Commands given before are still obeyed."""
        if (engine := self._engine) is not None:
            for id in self._active_ids.copy():
                engine.cancel(id)
        self._commands.put(None)

    def run(self, engine: Engine) -> None:
        """Serve until closed. Raises whatever the engine raises; it cannot be used any more then."""
        self._engine = engine
        try:
            while self._run_commands(engine):
                events = engine.step()
                self._last_step = time.monotonic()
                if events:
                    self._active_ids.difference_update(
                        event.request_id for event in events if isinstance(event, Finished | Failed)
                    )
                    self._deliver(events)
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _run_commands(self, engine: Engine) -> bool:
        """Do what was asked since the last step; wait for something where there is no work. False: the end."""
        began = time.monotonic()
        while True:
            try:
                if engine.is_busy:
                    command = self._commands.get(timeout=self._get_coalesce_wait(engine, began))
                else:
                    command = self._wait_for_command(engine)
                    began = time.monotonic()
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _get_coalesce_wait(self, engine: Engine, started: float) -> float:
        """Seconds that prompts wait for others. Not where an answer is being written, and not for long."""
        return (
            max(0.0, started + MAX_COALESCE_WAIT_SECONDS - time.monotonic())
            if self._expected_requests and not engine.has_started_decoding
            else 0.0
        )

    def _wait_for_command(self, engine: Engine) -> Command | None:
        """The next thing that is asked. Once it was quiet for a while, what can wait is done meanwhile."""
        patience: float | None = max(0.0, self._last_step + IDLE_AFTER_SECONDS - time.monotonic())
        while True:
            try:
                return self._commands.get(timeout=patience)
            except queue.Empty:
                patience = 0.0 if engine.run_idle_task() else None

    def _submit(self, requests: Sequence[Request], engine: Engine) -> None:
        """Begin requests; those that go together with one whose grammar must be compiled wait for that, elsewhere."""
        if not any(request.is_constrained for request in requests):
            return self._start_requests([(request, None) for request in requests], engine)
        self._compiling_ids.update(request.id for request in requests)

        def prepare() -> None:
            prepared = [(one, try_call(engine.constraint_factory.build, one)) for one in requests]
            self._commands.put(functools.partial(self._submit_compiled, prepared))

        self._compilers.submit(prepare)

    def _submit_compiled(self, compiled: Sequence[tuple[Request, CallResult]], engine: Engine) -> None:
        ready: list[tuple[Request, TokenConstraint | None]] = []
        for request, (guide, error) in compiled:
            if request.id not in self._compiling_ids:
                continue  # it was cancelled meanwhile
            self._compiling_ids.discard(request.id)
            if error is None:
                ready.append((request, guide))
            else:
                self._fail_request(request.id, error)
        self._start_requests(ready, engine)

    def _start_requests(self, requests: Sequence[tuple[Request, TokenConstraint | None]], engine: Engine) -> None:
        for request, guide in requests:
            try:
                engine.submit(request, guide)
            except Exception as error:  # nothing was begun: it is the request's fault, and nobody else's trouble
                self._fail_request(request.id, error)
            else:
                self._active_ids.add(request.id)
        engine.admit()  # while others are on their way: storing what has to go takes a few milliseconds

    def _fail_request(self, id: str, error: BaseException) -> None:
        if not isinstance(error, AfterglowError):
            error = InvalidArgument("request", f"cannot be served: {describe_error(error)}")
        self._deliver([Failed(id, error, Usage())])


class EngineThread(Closeable):
    """Owns an engine and the one thread that touches it.

    >>> with EngineThread(lambda: Engine(backend)) as engine:
    ...     events = list(engine.submit(Request(id="a", entries=[1, 2, 3])))
    """

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self._pending = PendingRequests(self.cancel)
        self._loop = EngineLoop(self._pending.deliver)
        self._engine: Engine | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(factory,), name="afterglow-engine", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:  # also Ctrl-C while a model loads: then it is closed as soon as it is there
            self._loop.close()
            raise
        atexit.register(self.close)  # the library must not be torn down while the thread is inside it

    def submit(self, request: Request) -> EventStream:
        """Hand a request in. What is wrong with it comes as its only event."""
        try:
            stream = self._pending.add_stream(request.id)
        except InvalidArgument as error:
            return build_failed_stream(request.id, error)
        self._loop.submit(request)
        return stream

    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Hand several in at once: none begins before all are there, so a common prompt is computed once."""
        streams = [self._pending.add_stream(request.id) for request in requests]
        self._loop.submit(*requests)
        return streams

    def cancel(self, id: str) -> None:
        """End a request now, also in the middle of a decode. One that is not there is no error."""
        self._loop.cancel(id)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run something on the engine's thread, between two steps, and wait for what it returns."""
        if threading.current_thread() is self._thread:  # from inside another call: waiting would be for ever
            assert self._engine is not None
            return function(self._engine)
        number, answer = self._pending.add_call()
        self._loop.enqueue(lambda engine: self._pending.resolve_call(number, try_call(function, engine)))
        value, error = answer.result()
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End every request, and the thread. Closing twice is allowed."""
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
        except BaseException as error:  # a bug in the engine must not leave anybody waiting
            logger.exception("the engine crashed")
            reason = EngineCrashed(describe_error(error))
        self._pending.close(reason)
        self._pending.fail_all(reason)
        close_engine(engine)


def try_call(function: Callable[[T], Any], argument: T) -> CallResult:
    """What a function returns or raises, as a value: it is somebody else's answer."""
    try:
        return function(argument), None
    except BaseException as error:
        return None, error


def close_engine(engine: Engine) -> None:
    """Close an engine, which may be one that crashed: what it holds natively is given back in any case."""
    try:
        engine.close()
    except Exception:
        logger.exception("the engine could not be closed in order")
        engine.backend.close()


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
