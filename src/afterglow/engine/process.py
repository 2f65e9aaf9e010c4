"""An engine in a child process: a crash costs the requests in flight, never the program that asked.

The same interface as `EngineThread`. A busy Python thread beside the engine would slow every native call down, too.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.request import Failed, Finished, Request, Usage
from afterglow.engine.stream import Stream
from afterglow.errors import AfterglowError, Closed, EngineCrashed

T = TypeVar("T")
START_TIMEOUT = 600.0  # loading a large model takes its time
HEARTBEAT = 1.0
SILENCE = 10.0  # without a sign of life the child counts as dead
MAX_STARTS = 3  # in a row, without becoming ready


class EngineProcess:
    """Owns a child process with an engine in it, and starts another when it dies.

    `make` is pickled: a function of a module, or an object like `LlamaEngine`, that makes the engine over there.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._streams: dict[str, Stream] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._closing = False
        self._broken: AfterglowError | None = None
        self._child: Child | None = None
        self.restarts = 0
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._keeper = threading.Thread(target=self._keep, name="afterglow-keeper", daemon=True)
        self._keeper.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    def submit(self, request: Request) -> Stream:
        """Hand a request in. What is wrong with it comes as its only event."""
        stream = Stream(request.id, self.cancel)
        with self._lock:
            self._check()
            if request.id in self._streams:
                raise AfterglowError(f"request {request.id!r} is being served already")
            self._streams[request.id] = stream
            self._send("submit", request)
        return stream

    def cancel(self, id: str) -> None:
        with self._lock:
            self._send("cancel", id)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of a module on the engine, over there; what it returns comes back pickled."""
        answer: Future[T] = Future()
        with self._lock:
            self._check()
            number = next(self._numbers)
            self._answers[number] = answer
            self._send("call", (number, function))
        return answer.result()

    def close(self) -> None:
        """End every request and the child. Closing twice is allowed."""
        with self._lock:
            self._closing = True
            self._send("close", None)
        self._keeper.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._closing:
            raise Closed("engine")
        if self._broken is not None:
            raise self._broken
        if self._child is None:
            raise EngineCrashed("it is being started again; try in a moment")

    def _send(self, kind: str, content: object) -> None:
        if self._child is not None:
            self._child.send(kind, content)

    # --- the keeper's thread

    def _keep(self) -> None:
        """Start children and listen to them until closed, or until they die at birth too often."""
        failures = 0
        while not self._closing and failures < MAX_STARTS:
            try:
                child = Child(self._make)
            except AfterglowError as error:
                failures += 1
                self._error = self._broken = error
                if not self._ready.is_set():
                    break  # the first start: whoever made us wants to know
                continue
            failures, self._broken = 0, None
            with self._lock:
                self._child = child
            self._ready.set()
            reason = self._listen(child)
            with self._lock:
                self._child = None
                self._fail_all(Closed("engine") if self._closing else EngineCrashed(reason))
            self.restarts += not self._closing
        self._ready.set()

    def _listen(self, child: Child) -> str:
        heard = asked = time.monotonic()
        while True:
            now = time.monotonic()
            if now - asked > HEARTBEAT:
                child.send("ping", None)
                asked = now
            if now - heard > SILENCE:
                return child.end(f"it gave no sign of life for {SILENCE:.0f} s")
            try:
                if child.connection.poll(HEARTBEAT):
                    self._receive(*child.connection.recv())
                    heard = time.monotonic()
            except (EOFError, OSError):
                return child.end("it ended")

    def _receive(self, kind: str, content: Any) -> None:
        if kind == "events":
            for event in content:
                stream = self._streams.get(event.id)
                if isinstance(event, Finished | Failed):
                    self._streams.pop(event.id, None)
                if stream is not None:
                    stream.put(event)
        elif kind == "answer":
            number, value, error = content
            future = self._answers.pop(number)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def _fail_all(self, reason: AfterglowError) -> None:
        streams, self._streams = self._streams, {}
        answers, self._answers = self._answers, {}
        for stream in streams.values():
            stream.put(Failed(stream.id, reason, Usage()))
        for answer in answers.values():
            answer.set_exception(reason)


class Child:
    """One child process, ready to serve."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "afterglow.engine.child", str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.connection = Connection(ours.detach())
        self._sending = threading.Lock()
        try:
            self.send("make", make)
            if not self.connection.poll(START_TIMEOUT):
                raise EngineCrashed(self.end(f"it was not ready within {START_TIMEOUT:.0f} s"))
            kind, content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise EngineCrashed(self.end("it ended while it was starting")) from error
        if kind == "failed":
            self.end("")
            raise content

    def send(self, kind: str, content: object) -> None:
        """A child that is gone hears nothing; its end is noticed by whoever listens."""
        try:
            with self._sending:
                self.connection.send((kind, content))
        except (OSError, ValueError):
            return

    def end(self, reason: str) -> str:
        """Make sure that the process is gone; `reason` with how it went."""
        self.connection.close()
        try:
            code = self.process.wait(5 if reason.startswith("it ended") else 0.1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{reason} ({how})"
