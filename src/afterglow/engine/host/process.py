"""An engine in a child process: a crash costs the requests in flight, never the program that asked.

The same interface as `EngineThread`. A busy Python thread beside the engine would slow every native call down, too.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host.child_main import pack, unpack
from afterglow.engine.host.child_process import ChildProcess
from afterglow.engine.host.stream import EventStream, PendingRequests, build_failed_stream
from afterglow.engine.host.thread import describe_error, logger
from afterglow.engine.types.request import Failed, Request, Usage
from afterglow.errors import AfterglowError, Cancelled, Closed, EngineCrashed, InvalidArgument

T = TypeVar("T")
START_TIMEOUT_SECONDS = 600.0  # loading a large model takes its time
MAX_SILENCE_SECONDS = 10.0  # without a sign of life the child counts as dead
MAX_FAILED_STARTS = 3  # again, in a row, without becoming ready
EARLY_EXIT_SECONDS = 10.0  # a child that died before this age is followed by a pause
MAX_RESTART_DELAY_SECONDS = 5.0
HEARTBEAT_SECONDS = 1.0


class EngineProcess(Closeable):
    """Owns a child process with an engine in it, and starts another when it dies.

    `make` is pickled: a function of a module, or an object like `LlamaEngine`, that makes the engine over there.
    `silence` is how many seconds without a sign of life count as death.

    While a child is being started again, requests wait for it. They fail only when that is given up.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        *,
        silence_timeout: float = MAX_SILENCE_SECONDS,
        start_timeout: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.restarts = 0  # how often another child had to be started
        self._factory = pack("make", factory)
        self._silence_timeout, self._start_timeout = silence_timeout, start_timeout
        self._heartbeat_seconds = min(HEARTBEAT_SECONDS, silence_timeout / 4)
        self._pending = PendingRequests(self.cancel)  # its lock is over what follows, too; nothing under it ever blocks
        self._child: ChildProcess | None = None
        self._unsent: dict[tuple[str, str | int], bytes] = {}  # what waits until a child is ready, by kind and key
        self._event_loop: asyncio.AbstractEventLoop | None = None  # where what the child sends is read
        self._closing = threading.Event()
        self._started: Future[None] = Future()
        self._supervisor = threading.Thread(target=self._run_supervisor, name="afterglow-keeper", daemon=True)
        self._supervisor.start()
        atexit.register(self.close)
        try:
            self._started.result()
        except BaseException:  # also Ctrl-C while a model loads
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    def submit(self, request: Request) -> EventStream:
        """Hand a request in; never waits. What is wrong with it comes as its only event."""
        try:
            content = pack("request", request)
            with self._pending.lock:
                stream = self._pending.add_stream(request.id)
                self._post("submit", request.id, content)
        except InvalidArgument as error:
            return build_failed_stream(request.id, error)
        return stream

    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Hand several in at once: none begins before all are there, so a common prompt is computed once."""
        content = pack("request", tuple(requests))
        with self._pending.lock:
            streams = [self._pending.add_stream(request.id) for request in requests]
            self._post("together", requests[0].id, content)
        return streams

    def expect_requests(self, change: int) -> None:
        """So many more requests are on their way, or, below 0, fewer: what begins waits a moment for its company."""
        with self._pending.lock:
            if self._child is not None and self._child.is_ready:
                self._child.send("coming", change)

    def cancel(self, id: str) -> None:
        """End a request now, also in the middle of a decode. One that is not there is no error."""
        with self._pending.lock:
            if self._unsent.pop(("submit", id), None) is not None:
                self._pending.deliver([Failed(id, Cancelled(f"request {id} was cancelled"), Usage())])
            else:
                self._post("cancel", id, b"")

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of a module on the engine, over there; what it returns comes back pickled."""
        content = pack("function", function)
        with self._pending.lock:
            number, answer = self._pending.add_call()
            self._post("call", number, content)
        value, error = unpack("function", answer.result())
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End every request and the child. Closing twice is allowed."""
        with self._pending.lock:
            self._pending.close(Closed("engine"))
            if self._child is not None and not self._closing.is_set():
                self._child.shut_down()
            self._closing.set()
            self._attach_event_loop(None)
        if threading.current_thread() is not self._supervisor:
            self._supervisor.join()
        atexit.unregister(self.close)

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what the child sends in this event loop, where its readers are: tokens come with less to be woken."""
        with self._pending.lock:
            if loop is not self._event_loop and not self._closing.is_set():
                self._attach_event_loop(loop)

    def _attach_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._event_loop = loop
        if self._child is not None:
            self._child.listener.attach_event_loop(loop)

    def _post(self, kind: str, key: str | int, content: bytes) -> None:
        """Hand a message to the child, or keep it until there is one that is ready."""
        if self._child is not None and self._child.is_ready:
            self._child.send(kind, key, content)
        else:
            self._unsent[kind, key] = content

    # --- the keeper's thread

    def _run_supervisor(self) -> None:
        try:
            error = self._supervise()
        except BaseException as unexpected:  # a bug here must not leave anybody waiting
            logger.exception("the keeper of the engine's process crashed")
            error = EngineCrashed(describe_error(unexpected))
        reason = error if isinstance(error, AfterglowError) else EngineCrashed(describe_error(error))
        self._pending.close(reason)
        self._pending.fail_all(reason)
        if not self._started.done():
            self._started.set_exception(error)

    def _supervise(self) -> BaseException:
        """Have a child live, one after the other; why that is over."""
        failures, pause = 0, 0.0
        while not self._closing.wait(pause):
            born = time.monotonic()
            error, was_ready = self._run_child()
            if not self._started.done():
                return error  # whoever made us wants to know
            failures = 0 if was_ready else failures + 1
            if failures == MAX_FAILED_STARTS:
                why = error.reason if isinstance(error, EngineCrashed) else describe_error(error)
                return EngineCrashed(f"it could not be started again: {why}")
            self.restarts += 1
            pause = (
                min(2 * pause + 0.25, MAX_RESTART_DELAY_SECONDS)
                if time.monotonic() - born < EARLY_EXIT_SECONDS
                else 0.0
            )
        return Closed("engine")

    def _run_child(self) -> tuple[BaseException, bool]:
        """One child from its start to its end: what ended it, and whether it was ever ready."""
        try:
            child = ChildProcess(self._factory, self._handle_message, start_timeout=self._start_timeout)
        except OSError as error:
            return EngineCrashed(f"no process could be started: {error}"), False
        with self._pending.lock:
            self._child = child
            child.listener.attach_event_loop(self._event_loop)
            if self._closing.is_set():
                child.shut_down()
        try:
            why = self._monitor_child(child)
        finally:
            how = child.reap()
        crash = EngineCrashed(child.crash_reason or f"{why} ({how})")
        with self._pending.lock:
            self._child = None
            if child.is_ready and not self._closing.is_set():  # where it never was, everybody waits for the next
                self._pending.fail_all(crash)
        return child.start_error or crash, child.is_ready

    def _monitor_child(self, child: ChildProcess) -> str:
        """Take what the child sends until it is gone, or has to go; why.

        What is counted are missed answers and not seconds: a computer that slept missed one.
        """
        missed = 0
        while missed * self._heartbeat_seconds < self._silence_timeout:
            if child.is_overdue:
                child.kill()
                return "it took too long"
            try:
                if child.listener.wait(self._heartbeat_seconds):
                    missed = 0
                    continue
            except (EOFError, OSError):
                return "it ended"
            except Exception as error:
                child.kill()
                return f"it sent what cannot be read, {describe_error(error)}"
            missed += child.has_responded  # before its first word it is importing, which may take long on a cold disk
            child.send("ping")
        child.kill()
        return f"it gave no sign of life for {self._silence_timeout:.0f} s"

    def _handle_message(self, child: ChildProcess, kind: str, key: Any, content: Any) -> None:
        child.has_responded = True
        match kind:
            case "events":
                self._pending.deliver(content)
            case "answer":
                self._pending.resolve_call(key, content)
            case "ready":
                self._mark_ready(child)
            case "failed":
                child.start_error = content
                child.set_exit_deadline()
            case "crashed":
                child.crash_reason = key
                child.set_exit_deadline()
                logger.error("the engine crashed in its process\n%s", content)

    def _mark_ready(self, child: ChildProcess) -> None:
        with self._pending.lock:
            child.is_ready, child.deadline = True, None
            unsent, self._unsent = self._unsent, {}
            for (kind, key), content in unsent.items():
                child.send(kind, key, content)
        if not self._started.done():
            self._started.set_result(None)
