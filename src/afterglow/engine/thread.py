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

from afterglow.closing import Closing
from afterglow.engine.engine import Engine
from afterglow.engine.guide import Guide
from afterglow.engine.request import Event, Failed, Finished, Request, Usage
from afterglow.engine.stream import Stream, Waiting, refused
from afterglow.errors import AfterglowError, Cancelled, Closed, EngineCrashed, InvalidArgument

T = TypeVar("T")
Command: TypeAlias = Callable[[Engine], None]
Attempt: TypeAlias = tuple[Any, BaseException | None]  # what came of a call: a value or an error
QUIET = 0.25  # seconds without work after which what can wait is done: an agent's next turn comes sooner
COMPANY = 0.02  # seconds that prompts wait for others that are on their way, so that all are computed together
logger = logging.getLogger("afterglow.engine")


class EngineLoop:
    """Steps an engine, and does between the steps what others ask for. All but `run` is for any thread."""

    def __init__(self, deliver: Callable[[list[Event]], None]) -> None:
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._stepped = 0.0  # when there was work
        self._coming = 0  # requests that are on their way; the engine's thread owns this
        self._live: set[str] = set()  # the requests that the engine has
        self._preparing: set[str] = set()  # those whose grammar is being compiled; the engine's thread owns this
        self._preparers = ThreadPoolExecutor(2, thread_name_prefix="afterglow-grammar")  # threads come when needed

    def submit(self, *requests: Request) -> None:
        """Begin requests before the next step; what is wrong with one is delivered as its only event."""
        self._commands.put(functools.partial(self._receive, requests))

    def cancel(self, id: str) -> None:
        """End a request now, also in the middle of a decode; one that is on its way, as soon as it is there."""

        def end(engine: Engine) -> None:
            if id in self._live:
                engine.cancel(id)

        def end_for_sure(engine: Engine) -> None:
            end(engine)
            if id in self._preparing:
                self._preparing.discard(id)
                self._refuse(id, Cancelled(f"request {id} was cancelled"))

        if (engine := self._engine) is not None:
            end(engine)
        self._commands.put(end_for_sure)

    def expect(self, change: int) -> None:
        """So many more requests are on their way, or, below 0, fewer."""

        def note(engine: Engine) -> None:
            self._coming = max(0, self._coming + change)

        self._commands.put(note)

    def do(self, command: Command) -> None:
        """Run something between two steps. An error in it is an error of the engine."""
        self._commands.put(command)

    def close(self) -> None:
        """Let `run` return soon, also in the middle of a decode. Commands given before are still obeyed."""
        if (engine := self._engine) is not None:
            for id in self._live.copy():
                engine.cancel(id)
        self._commands.put(None)

    def run(self, engine: Engine) -> None:
        """Serve until closed. Raises whatever the engine raises; it cannot be used any more then."""
        self._engine = engine
        try:
            while self._obey(engine):
                events = engine.step()
                self._stepped = time.monotonic()
                if events:
                    self._live.difference_update(event.id for event in events if isinstance(event, Finished | Failed))
                    self._deliver(events)
        finally:
            self._preparers.shutdown(wait=False, cancel_futures=True)

    def _obey(self, engine: Engine) -> bool:
        """Do what was asked since the last step; wait for something where there is no work. False: the end."""
        began = time.monotonic()
        while True:
            try:
                if engine.busy:
                    command = self._commands.get(timeout=self._company(engine, began))
                else:
                    command = self._wait(engine)
                    began = time.monotonic()
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _company(self, engine: Engine, began: float) -> float:
        """Seconds that prompts wait for others. Not where an answer is being written, and not for long."""
        return max(0.0, began + COMPANY - time.monotonic()) if self._coming and not engine.underway else 0.0

    def _wait(self, engine: Engine) -> Command | None:
        """The next thing that is asked. Once it was quiet for a while, what can wait is done meanwhile."""
        patience: float | None = max(0.0, self._stepped + QUIET - time.monotonic())
        while True:
            try:
                return self._commands.get(timeout=patience)
            except queue.Empty:
                patience = 0.0 if engine.tidy() else None

    def _receive(self, requests: Sequence[Request], engine: Engine) -> None:
        """Begin requests; those that go together with one whose grammar must be compiled wait for that, elsewhere."""
        if not any(request.guided for request in requests):
            return self._begin([(request, None) for request in requests], engine)
        self._preparing.update(request.id for request in requests)

        def prepare() -> None:
            prepared = [(one, attempt(engine.guides.prepare, one)) for one in requests]
            self._commands.put(functools.partial(self._take_prepared, prepared))

        self._preparers.submit(prepare)

    def _take_prepared(self, prepared: Sequence[tuple[Request, Attempt]], engine: Engine) -> None:
        ready: list[tuple[Request, Guide | None]] = []
        for request, (guide, error) in prepared:
            if request.id not in self._preparing:
                continue  # it was cancelled meanwhile
            self._preparing.discard(request.id)
            if error is None:
                ready.append((request, guide))
            else:
                self._refuse(request.id, error)
        self._begin(ready, engine)

    def _begin(self, requests: Sequence[tuple[Request, Guide | None]], engine: Engine) -> None:
        for request, guide in requests:
            try:
                engine.submit(request, guide)
            except Exception as error:  # nothing was begun: it is the request's fault, and nobody else's trouble
                self._refuse(request.id, error)
            else:
                self._live.add(request.id)
        engine.admit()  # while others are on their way: storing what has to go takes a few milliseconds

    def _refuse(self, id: str, error: BaseException) -> None:
        if not isinstance(error, AfterglowError):
            error = InvalidArgument("request", f"cannot be served: {describe(error)}")
        self._deliver([Failed(id, error, Usage())])


class EngineThread(Closing):
    """Owns an engine and the one thread that touches it.

    >>> with EngineThread(lambda: Engine(backend)) as engine:
    ...     events = list(engine.submit(Request(id="a", entries=[1, 2, 3])))
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._waiting = Waiting(self.cancel)
        self._loop = EngineLoop(self._waiting.deliver)
        self._engine: Engine | None = None
        self._made: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make,), name="afterglow-engine", daemon=True)
        self._thread.start()
        try:
            self._made.result()
        except BaseException:  # also Ctrl-C while a model loads: then it is closed as soon as it is there
            self._loop.close()
            raise
        atexit.register(self.close)  # the library must not be torn down while the thread is inside it

    def submit(self, request: Request) -> Stream:
        """Hand a request in. What is wrong with it comes as its only event."""
        try:
            stream = self._waiting.stream(request.id)
        except InvalidArgument as error:
            return refused(request.id, error)
        self._loop.submit(request)
        return stream

    def submit_together(self, requests: Sequence[Request]) -> list[Stream]:
        """Hand several in at once: none begins before all are there, so a common prompt is computed once."""
        streams = [self._waiting.stream(request.id) for request in requests]
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
        number, answer = self._waiting.answer()
        self._loop.do(lambda engine: self._waiting.resolve(number, attempt(function, engine)))
        value, error = answer.result()
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End every request, and the thread. Closing twice is allowed."""
        self._waiting.refuse(Closed("engine"))
        self._loop.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self, make: Callable[[], Engine]) -> None:
        try:
            engine = self._engine = make()
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(None)
        reason: AfterglowError = Closed("engine")
        try:
            self._loop.run(engine)
        except BaseException as error:  # a bug in the engine must not leave anybody waiting
            logger.exception("the engine crashed")
            reason = EngineCrashed(describe(error))
        self._waiting.refuse(reason)
        self._waiting.fail(reason)
        shut(engine)


def attempt(function: Callable[[T], Any], argument: T) -> Attempt:
    """What a function returns or raises, as a value: it is somebody else's answer."""
    try:
        return function(argument), None
    except BaseException as error:
        return None, error


def shut(engine: Engine) -> None:
    """Close an engine, which may be one that crashed: what it holds natively is given back in any case."""
    try:
        engine.close()
    except Exception:
        logger.exception("the engine could not be closed in order")
        engine.backend.close()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
