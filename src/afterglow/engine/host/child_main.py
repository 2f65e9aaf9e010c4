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
from afterglow.engine.host.pipe import MessagePipe, Outbox
from afterglow.engine.host.thread import CallResult, EngineLoop, close_engine, describe_error, try_call
from afterglow.engine.types.request import EngineEvent, Failed, Usage
from afterglow.errors import AfterglowError, EngineError, InvalidArgument

PR_SET_PDEATHSIG = 1
ENGINE_NICENESS = (
    2  # computing gives way to whoever writes the tokens out: on a busy core that took 4 ms of a first token's 90
)


class ChildHost:
    """Reads messages on one thread, steps the engine on another, and writes back on a third."""

    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe = pipe
        # Whoever reads takes a processor at once, so the engine does not wait for it: with eight streams it computed a
        # millisecond of 36 later.
        self._outbox = Outbox(pipe, on_disconnect=exit_immediately)
        self._factory: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._loop = EngineLoop(self._deliver)

    def read_messages(self) -> None:
        """Take messages as they come, also while the engine computes. Without a parent there is no more to do."""
        self._send("pong")
        while True:
            try:
                messages = self._pipe.receive()
            except (EOFError, OSError):
                exit_immediately()
            for message in messages:
                self._handle_message(*message)

    def flush(self) -> None:
        """Wait until everything is sent."""
        self._outbox.close()
        self._outbox.join()

    def _handle_message(self, kind: str, key: Any, content: bytes) -> None:
        match kind:
            case "ping":
                self._send("pong")
            case "make":
                self._factory.put(content)
            case "submit":
                self._submit(key, content)
            case "together":
                self._loop.submit(*unpack("requests", content))
            case "coming":
                self._loop.expect_requests(key)
            case "cancel":
                self._loop.cancel(key)
            case "call":
                self._loop.enqueue(functools.partial(self._call, key, content))
            case "close":
                self._loop.close()

    def run_engine(self) -> bool:
        """Make the engine and run it until closed. False: it crashed, and is not closed: who knows what it would do."""
        try:
            engine: Engine = unpack("make", self._factory.get())()
        except BaseException as error:
            self._send("failed", content=to_portable_error(error))
            return True
        self._send("ready")
        try:
            self._loop.run(engine)
        except BaseException as error:
            self._send("crashed", describe_error(error), traceback.format_exc())
            return False
        close_engine(engine)
        return True

    def _submit(self, id: str, content: bytes) -> None:
        try:
            self._loop.submit(unpack("request", content))
        except InvalidArgument as error:
            self._deliver([Failed(id, error, Usage())])

    def _call(self, number: int, content: bytes, engine: Engine) -> None:
        result: CallResult = try_call(lambda engine: unpack("function", content)(engine), engine)
        try:
            packed = pack("function", (result[0], None if result[1] is None else to_portable_error(result[1])))
        except InvalidArgument as error:
            packed = pack("function", (None, error))
        self._send("answer", number, packed)

    def _deliver(self, events: list[EngineEvent]) -> None:
        self._send("events", content=[to_portable_event(event) for event in events])

    def _send(self, kind: str, key: object = None, content: object = None) -> None:
        self._outbox.put((kind, key, content))


def pack(name: str, value: object) -> bytes:
    """Pickle something of the caller's; `InvalidArgument` says what is wrong with it."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs whatever the value's class says
        raise InvalidArgument(name, f"cannot travel between processes: {describe_error(error)}") from error


def unpack(name: str, content: bytes) -> Any:
    """The reverse, on the other side."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise InvalidArgument(name, f"cannot travel between processes: {describe_error(error)}") from error


def to_portable_error(error: BaseException) -> BaseException:
    """The error itself where it survives the way to the parent; else what it says."""
    try:
        unpack("error", pack("error", error))
    except InvalidArgument:
        return EngineError(describe_error(error))
    return error


def to_portable_event(event: EngineEvent) -> EngineEvent:
    """The event, with an error that survives the way to the parent."""
    if not isinstance(event, Failed):
        return event
    error = to_portable_error(event.error)
    assert isinstance(error, AfterglowError)
    return replace(event, error=error)


def exit_immediately() -> NoReturn:
    """End at once, with everything that was started here. We lead a group of our own."""
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def exit_with_parent(parent_pid: int) -> None:
    """Leave no orphan: the kernel ends us with our parent, where it can; else the closed pipe does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        exit_immediately()


def main() -> None:
    """Called with a file descriptor to speak through and the parent's process id."""
    descriptor, parent = map(int, sys.argv[1:])
    exit_with_parent(parent)
    os.set_inheritable(descriptor, False)
    service = ChildHost(MessagePipe(socket.socket(fileno=descriptor)))
    threading.Thread(target=service.read_messages, name="afterglow-reader", daemon=True).start()
    os.nice(ENGINE_NICENESS)  # on Linux of this thread, which computes, and of those that llama.cpp starts from it
    whole = service.run_engine()
    service.flush()
    if not whole:
        os._exit(1)
