"""The other end of `EngineProcess`, and what travels between the two: (kind, key, content).

Content that is the caller's own travels as bytes inside the message, so that what cannot be unpickled is one caller's
error, and whoever reads the pipe never runs foreign code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from dataclasses import replace
from typing import Any, NoReturn

from afterglow.engine.engine import Engine
from afterglow.engine.request import Event, Failed, Usage
from afterglow.engine.thread import Attempt, EngineLoop, attempt, describe, shut
from afterglow.engine.wire import Outbox, Wire
from afterglow.errors import AfterglowError, EngineError, InvalidArgument

PR_SET_PDEATHSIG = 1
NICE = 2  # computing gives way to whoever writes the tokens out: on a busy core that took 4 ms of a first token's 90


class Service:
    """Reads messages on one thread, steps the engine on another, and writes back on a third."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # Whoever reads takes a processor at once, so the engine does not wait for it: with eight streams it computed a
        # millisecond of 36 later.
        self._outbox = Outbox(wire, gone=vanish)
        self._recipe: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._loop = EngineLoop(self._deliver)

    def read(self) -> None:
        """Take messages as they come, also while the engine computes. Without a parent there is no more to do."""
        self._send("pong")
        while True:
            try:
                messages = self._wire.receive()
            except (EOFError, OSError):
                vanish()
            for message in messages:
                self._take(*message)

    def end(self) -> None:
        """Wait until everything is sent."""
        self._outbox.close()
        self._outbox.join()

    def _take(self, kind: str, key: Any, content: bytes) -> None:
        match kind:
            case "ping":
                self._send("pong")
            case "make":
                self._recipe.put(content)
            case "submit":
                self._submit(key, content)
            case "together":
                self._loop.submit(*unpack("requests", content))
            case "coming":
                self._loop.expect(key)
            case "cancel":
                self._loop.cancel(key)
            case "call":
                self._loop.do(functools.partial(self._call, key, content))
            case "close":
                self._loop.close()

    def serve(self) -> bool:
        """Make the engine and run it until closed. False: it crashed, and is not closed: who knows what it would do."""
        try:
            engine: Engine = unpack("make", self._recipe.get())()
        except BaseException as error:
            self._send("failed", content=portable(error))
            return True
        self._send("ready")
        try:
            self._loop.run(engine)
        except BaseException as error:
            self._send("crashed", describe(error), traceback.format_exc())
            return False
        shut(engine)
        return True

    def _submit(self, id: str, content: bytes) -> None:
        try:
            self._loop.submit(unpack("request", content))
        except InvalidArgument as error:
            self._deliver([Failed(id, error, Usage())])

    def _call(self, number: int, content: bytes, engine: Engine) -> None:
        result: Attempt = attempt(lambda engine: unpack("function", content)(engine), engine)
        try:
            packed = pack("function", (result[0], None if result[1] is None else portable(result[1])))
        except InvalidArgument as error:
            packed = pack("function", (None, error))
        self._send("answer", number, packed)

    def _deliver(self, events: list[Event]) -> None:
        self._send("events", content=[sendable(event) for event in events])

    def _send(self, kind: str, key: object = None, content: object = None) -> None:
        self._outbox.put((kind, key, content))


def pack(name: str, value: object) -> bytes:
    """Pickle something of the caller's; `InvalidArgument` says what is wrong with it."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs whatever the value's class says
        raise InvalidArgument(name, f"cannot travel between processes: {describe(error)}") from error


def unpack(name: str, content: bytes) -> Any:
    """The reverse, on the other side."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise InvalidArgument(name, f"cannot travel between processes: {describe(error)}") from error


def portable(error: BaseException) -> BaseException:
    """The error itself where it survives the way to the parent; else what it says."""
    try:
        unpack("error", pack("error", error))
    except InvalidArgument:
        return EngineError(describe(error))
    return error


def sendable(event: Event) -> Event:
    """The event, with an error that survives the way to the parent."""
    if not isinstance(event, Failed):
        return event
    error = portable(event.error)
    assert isinstance(error, AfterglowError)
    return replace(event, error=error)


def vanish() -> NoReturn:
    """End at once, with everything that was started here. We lead a group of our own."""
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def die_with(parent: int) -> None:
    """Leave no orphan: the kernel ends us with our parent, where it can; else the closed pipe does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        vanish()


def main() -> None:
    """Called with a file descriptor to speak through and the parent's process id."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    os.set_inheritable(descriptor, False)
    service = Service(Wire(socket.socket(fileno=descriptor)))
    threading.Thread(target=service.read, name="afterglow-reader", daemon=True).start()
    os.nice(NICE)  # on Linux of this thread, which computes, and of those that llama.cpp starts from it
    whole = service.serve()
    service.end()
    if not whole:
        os._exit(1)
