"""Main program of the child process of `EngineProcess`, and the encoding of its messages: (kind, key, content).

User content is a separate pickle inside the message. If it cannot be unpickled, only that call or request fails, and
the thread that reads the pipe never runs user code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.loop import CallResult, EngineLoop, close_engine, describe_error, try_call
from afterglow.engine.host.pipe import MessagePipe, Outbox
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.request import EngineEvent, Failed, Finished, PrefillProgress, Token, Usage
from afterglow.errors import AfterglowError, EngineError, InvalidArgument
from afterglow.llama.library.cpu import list_usable_cores

PR_SET_PDEATHSIG = 1
# Run the engine at lower priority than the process that streams tokens: on a busy core that saved 4 of 90 ms to the
# first token. With 2, other busy programs would get 1.6 times the share of the engine.
ENGINE_NICENESS = 1
PortableEvent: TypeAlias = PrefillProgress | Finished | Failed | tuple[Any, ...]
"""An event as it is sent through the pipe; tokens are plain tuples."""
MIN_PROGRESS_FRACTION = 0.01  # between two reports of a load


class ChildHost:
    """Runs the engine in the child: one thread reads messages, one steps the engine, one writes messages."""

    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe = pipe
        self._outbox = Outbox(pipe, on_disconnect=exit_immediately)
        self._has_spare_core = False  # the parent can run while the engine computes
        self._factory: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._loop = EngineLoop(self._deliver)
        self._reported_fraction = 0.0  # of the load
        self._store_timeout = CLOSE_TIMEOUT_SECONDS  # for the prefix cache, when the engine closes

    def read_messages(self) -> None:
        """Handle messages as they arrive, also while the engine computes. Exit if the parent is gone."""
        self._send("pong")
        while True:
            try:
                messages = self._pipe.receive()
            except (EOFError, OSError):
                exit_immediately()
            for message in messages:
                self._handle_message(*message)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._outbox.close()
        self._outbox.join()

    def _handle_message(self, kind: str, key: Any, content: bytes) -> None:
        match kind:
            case "ping":
                self._send("pong")
            case "build":
                self._factory.put(content)
            case "submit":
                self._submit(key, content)
            case "cancel":
                self._loop.cancel(key)
            case "call":
                self._loop.enqueue(functools.partial(self._call, key, content))
            case "close":
                self._store_timeout = key
                self._loop.close()

    def run_engine(self) -> bool:
        """Run the engine until closed. Return False if it crashed: it stays open, as its native state is unknown."""
        try:
            factory = unpack("factory", self._factory.get())
            engine: Engine = factory(self._report_progress) if isinstance(factory, EngineSpec) else factory()
        except BaseException as error:
            self._send("failed", content=to_portable_error(error))
            return True
        # A restart skips what this start has found out. None: the same factory.
        restart_spec = factory.build_restart_spec(engine) if isinstance(factory, EngineSpec) else None
        self._has_spare_core = engine.backend.capabilities.decode_threads < len(list_usable_cores())
        gc.collect()
        gc.freeze()  # what exists now lives as long as the engine: collections beside decodes need not visit it
        self._send("ready", content=None if restart_spec is None else pack("factory", restart_spec))
        try:
            self._loop.run(engine)
        except BaseException as error:
            self._send("crashed", describe_error(error), traceback.format_exc())
            return False
        self._send("closed", content=close_engine(engine, self._store_timeout))
        return True

    def _report_progress(self, fraction: float) -> None:
        if fraction in (0.0, 1.0) or fraction - self._reported_fraction >= MIN_PROGRESS_FRACTION:
            self._reported_fraction = fraction
            self._send("progress", fraction)

    def _submit(self, ids: Sequence[str], content: bytes) -> None:
        try:
            self._loop.submit(*unpack("request", content))
        except InvalidArgument as error:
            self._deliver([Failed(id, error, Usage()) for id in ids])

    def _call(self, number: int, content: bytes, engine: Engine) -> None:
        result: CallResult = try_call(lambda engine: unpack("function", content)(engine), engine)
        if isinstance(result[0], Future):
            result[0].add_done_callback(lambda future: self._answer(number, try_call(Future.result, future)))
        else:
            self._answer(number, result)

    def _answer(self, number: int, result: CallResult) -> None:
        try:
            packed = pack("function", (result[0], None if result[1] is None else to_portable_error(result[1])))
        except InvalidArgument as error:
            packed = pack("function", (None, error))
        self._send("answer", number, packed)

    def _deliver(self, events: list[EngineEvent]) -> None:
        """Send events at once if the parent, which wakes up, has a core of its own.

        Otherwise it takes the core of the engine, which would wait before its next decode: 1 of 36 ms with eight
        streams. So the sender thread sends as soon as the decode has begun.
        """
        message = "events", None, [to_portable_event(event) for event in events]
        if self._has_spare_core:
            self._outbox.send(message)
        else:
            self._outbox.put(message)

    def _send(self, kind: str, key: object = None, content: object = None) -> None:
        self._outbox.put((kind, key, content))


def pack(name: str, value: object) -> bytes:
    """Pickle user content. Raises `InvalidArgument` for the argument `name` if that fails."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs code of the class of the value
        raise InvalidArgument(name, f"cannot be sent to another process: {describe_error(error)}") from error


def unpack(name: str, content: bytes) -> Any:
    """Unpickle user content. Raises `InvalidArgument` for the argument `name` if that fails."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise InvalidArgument(name, f"cannot be sent to another process: {describe_error(error)}") from error


def to_portable_error(error: BaseException) -> BaseException:
    """Return the error itself if it can be pickled, otherwise an `EngineError` with its text."""
    try:
        unpack("error", pack("error", error))
    except InvalidArgument:
        return EngineError(describe_error(error))
    return error


def to_portable_event(event: EngineEvent) -> PortableEvent:
    """Return the event as it is sent: a token as a plain tuple, a failure with an error that can be pickled.

    A pickle names the class of every other object, and reading one looks it up: that took longer than the rest.
    """
    if isinstance(event, Token):
        return tuple(event)
    if not isinstance(event, Failed):
        return event
    error = to_portable_error(event.error)
    assert isinstance(error, AfterglowError)
    return replace(event, error=error)


def from_portable_event(event: PortableEvent) -> EngineEvent:
    """Return the event that was sent."""
    return Token._make(event) if isinstance(event, tuple) else event


def exit_immediately() -> NoReturn:
    """Kill this process and everything it started: it leads its own process group."""
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run the child. Arguments: the file descriptor of the pipe and the process id of the parent."""
    descriptor, parent_pid = map(int, sys.argv[1:])
    # Leave no orphan: on Linux the kernel kills this process with its parent; elsewhere the closed pipe ends it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the prctl call
        exit_immediately()
    os.set_inheritable(descriptor, False)
    host = ChildHost(MessagePipe(socket.socket(fileno=descriptor)))
    threading.Thread(target=host.read_messages, name="afterglow-reader", daemon=True).start()
    os.nice(ENGINE_NICENESS)  # on Linux only for this thread, which computes, and the threads llama.cpp starts from it
    ended_cleanly = host.run_engine()
    host.flush()
    if not ended_cleanly:
        os._exit(1)
