"""An engine in a thread of this process: submit from anywhere, events come back through streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.request import Event, Failed, Finished, Request, Usage
from afterglow.engine.stream import Stream
from afterglow.errors import AfterglowError, Closed, EngineCrashed

T = TypeVar("T")


class EngineThread:
    """Owns an engine and the one thread that touches it.

    >>> with EngineThread(lambda: Engine(backend)) as engine:
    ...     events = list(engine.submit(Request(id="a", entries=[1, 2, 3])))
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._engine: Engine | None = None
        self._dead: AfterglowError | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make,), name="afterglow-engine", daemon=True)
        self._thread.start()
        self._ready.result()

    def submit(self, request: Request) -> Stream:
        """Hand a request in. What is wrong with it comes as its only event."""
        stream = Stream(request.id, self.cancel)

        def begin(engine: Engine) -> None:
            try:
                engine.submit(request)
                self._streams[request.id] = stream
            except AfterglowError as error:
                stream.put(Failed(request.id, error, Usage()))

        self._send(begin)
        return stream

    def cancel(self, id: str) -> None:
        """End a request now, also in the middle of a decode."""
        if (engine := self._engine) is not None:
            engine.cancel(id)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run something on the engine's thread, between two steps, and wait for what it returns."""
        answer: Future[T] = Future()

        def run(engine: Engine) -> None:
            try:
                answer.set_result(function(engine))
            except BaseException as error:
                answer.set_exception(error)

        self._send(run)
        return answer.result()

    def close(self) -> None:
        """End every request, and the thread. Closing twice is allowed."""
        if self._dead is None:
            self._dead = Closed("engine")
            self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, command: Callable[[Engine], None]) -> None:
        if self._dead is not None:
            raise self._dead
        self._commands.put(command)

    def _run(self, make: Callable[[], Engine]) -> None:
        try:
            engine = self._engine = make()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        reason: AfterglowError = Closed("engine")
        try:
            while self._obey(engine):
                for event in engine.step():
                    self._deliver(event)
        except Exception as error:  # a bug in the engine must not leave anybody waiting
            reason = EngineCrashed(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._dead = reason
            for stream in self._streams.values():
                stream.put(Failed(stream.id, reason, Usage()))
            self._streams.clear()
            engine.close()

    def _obey(self, engine: Engine) -> bool:
        """Do what was asked since the last step; wait for something where there is no work. False: the end."""
        while True:
            try:
                command = self._commands.get(block=not engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _deliver(self, event: Event) -> None:
        stream = self._streams[event.id]
        if isinstance(event, Finished | Failed):
            del self._streams[event.id]
        stream.put(event)
