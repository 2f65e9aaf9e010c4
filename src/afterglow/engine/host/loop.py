"""Engine loop: steps an engine on one thread and runs the commands of other threads between the steps.

Used by both hosts: in a thread of this process and in the child process. It does not know how events reach the client.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.sampling.token_constraints import TokenConstraint
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.request import EngineEvent, Failed, Finished, Request, Usage
from afterglow.errors import AfterglowError, Cancelled, InvalidArgument

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")
Command: TypeAlias = Callable[[Engine], None]
CallResult: TypeAlias = tuple[Any, BaseException | None]
"""Value or error of a call."""
IDLE_AFTER_SECONDS = 0.25  # idle tasks start after this time without work: the next turn of an agent comes sooner
logger = logging.getLogger("afterglow.engine")


class EngineLoop:
    """Steps an engine and runs commands between the steps. All methods except `run` may be called from any thread."""

    def __init__(self, deliver: Callable[[list[EngineEvent]], None]) -> None:
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._last_step = 0.0
        self._active_ids: set[str] = set()  # requests inside the engine
        self._compiling_ids: set[str] = set()  # requests whose grammar compiles; only the engine thread uses this
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="afterglow-grammar")  # starts threads on demand

    def submit(self, *requests: Request) -> None:
        """Submit requests before the next step. An invalid request gets its error as its only event."""
        self._commands.put(functools.partial(self._submit, requests))

    def cancel(self, id: str) -> None:
        """Cancel a request, even during a decode. A request still in the queue is cancelled on arrival."""

        def cancel_active(engine: Engine) -> None:
            if id in self._active_ids:
                engine.cancel(id)

        def cancel_active_or_compiling(engine: Engine) -> None:
            cancel_active(engine)
            if id in self._compiling_ids:
                self._compiling_ids.discard(id)
                self._fail_request(id, Cancelled(f"request {id} was cancelled"))

        if (engine := self._engine) is not None:
            cancel_active(engine)
        self._commands.put(cancel_active_or_compiling)

    def enqueue(self, command: Command) -> None:
        """Run a command between two steps. An exception in it crashes the engine."""
        self._commands.put(command)

    def close(self) -> None:
        """Make `run` return soon, even during a decode. Commands enqueued earlier still run."""
        if (engine := self._engine) is not None:
            for id in self._active_ids.copy():
                engine.cancel(id)
        self._commands.put(None)

    def run(self, engine: Engine) -> None:
        """Run until closed. Raises what the engine raises; the engine is then unusable."""
        self._engine = engine
        try:
            while self._run_commands(engine):
                events = engine.step()
                self._last_step = time.monotonic()
                if self._deliver_events(events):
                    engine.write_through()  # after the events: the client does not wait for it
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _deliver_events(self, events: list[EngineEvent]) -> bool:
        """Deliver events. Return whether there are any."""
        if events:
            self._active_ids.difference_update(
                event.request_id for event in events if isinstance(event, Finished | Failed)
            )
            self._deliver(events)
        return bool(events)

    def _run_commands(self, engine: Engine) -> bool:
        """Run the commands that arrived since the last step; block if the engine is idle. Return False to stop."""
        while True:
            try:
                command = self._commands.get_nowait() if engine.is_busy else self._wait_for_command(engine)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._deliver_events(engine.settle())
            command(engine)

    def _wait_for_command(self, engine: Engine) -> Command | None:
        """Return the next command. After an idle period, run idle tasks while waiting."""
        timeout: float | None = max(0.0, self._last_step + IDLE_AFTER_SECONDS - time.monotonic())
        while True:
            try:
                with engine.sliced_work.run_meanwhile("command"):
                    return self._commands.get(timeout=timeout)
            except queue.Empty:
                timeout = 0.0 if engine.run_idle_task() else None

    def _submit(self, requests: Sequence[Request], engine: Engine) -> None:
        """Start requests. If any of them needs a grammar, compile it on another thread and start all of them then."""
        if not any(request.is_constrained for request in requests):
            return self._start_requests([(request, None) for request in requests], engine)
        self._compiling_ids.update(request.id for request in requests)

        def compile_constraints() -> None:
            compiled = [(request, try_call(engine.constraint_factory.build, request)) for request in requests]
            self._commands.put(functools.partial(self._submit_compiled, compiled))

        self._compilers.submit(compile_constraints)

    def _submit_compiled(self, compiled: Sequence[tuple[Request, CallResult]], engine: Engine) -> None:
        ready: list[tuple[Request, TokenConstraint | None]] = []
        for request, (constraint, error) in compiled:
            if request.id not in self._compiling_ids:
                continue  # cancelled while it compiled
            self._compiling_ids.discard(request.id)
            if error is None:
                ready.append((request, constraint))
            else:
                self._fail_request(request.id, error)
        self._start_requests(ready, engine)

    def _start_requests(self, requests: Sequence[tuple[Request, TokenConstraint | None]], engine: Engine) -> None:
        for request, constraint in requests:
            try:
                engine.submit(request, constraint)
            except Exception as error:  # nothing was started, so only this request fails
                self._fail_request(request.id, error)
            else:
                self._active_ids.add(request.id)

    def _fail_request(self, id: str, error: BaseException) -> None:
        if not isinstance(error, AfterglowError):
            error = InvalidArgument("request", f"cannot be served: {describe_error(error)}")
        self._deliver([Failed(id, error, Usage())])


def try_call(function: Callable[[ArgumentT], Any], argument: ArgumentT) -> CallResult:
    """Call a function and return its value or its exception, so that another thread can receive either."""
    try:
        return function(argument), None
    except BaseException as error:
        return None, error


def call_with_sequence(engine: Engine, *, function: Callable[..., ResultT], sequence: int | None) -> ResultT:
    """Call a function of an engine and the keyword `sequence`. For `call` of a host."""
    return function(engine, sequence=sequence)


def close_engine(engine: Engine, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> StoreReport:
    """Close an engine, even one that crashed. Native resources are always released."""
    try:
        return engine.close(store_timeout)
    except Exception:
        logger.exception("the engine did not close cleanly")
        engine.backend.close()
        return StoreReport()


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
