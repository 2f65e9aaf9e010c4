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

from afterglow.closing import Closing
from afterglow.engine.child import pack, unpack
from afterglow.engine.engine import Engine
from afterglow.engine.request import Failed, Request, Usage
from afterglow.engine.spawn import Child
from afterglow.engine.stream import Stream, Waiting, refused
from afterglow.engine.thread import describe, logger
from afterglow.errors import AfterglowError, Cancelled, Closed, EngineCrashed, InvalidArgument

T = TypeVar("T")
START_TIMEOUT = 600.0  # loading a large model takes its time
SILENCE = 10.0  # without a sign of life the child counts as dead
MAX_STARTS = 3  # again, in a row, without becoming ready
YOUNG = 10.0  # a child that died before this age is followed by a pause
LONGEST_PAUSE = 5.0
HEARTBEAT = 1.0


class EngineProcess(Closing):
    """Owns a child process with an engine in it, and starts another when it dies.

    `make` is pickled: a function of a module, or an object like `LlamaEngine`, that makes the engine over there.
    `silence` is how many seconds without a sign of life count as death.

    While a child is being started again, requests wait for it. They fail only when that is given up.
    """

    def __init__(
        self, make: Callable[[], Engine], *, silence: float = SILENCE, start_timeout: float = START_TIMEOUT
    ) -> None:
        self.restarts = 0  # how often another child had to be started
        self._make = pack("make", make)
        self._silence, self._start_timeout = silence, start_timeout
        self._heartbeat = min(HEARTBEAT, silence / 4)
        self._waiting = Waiting(self.cancel)  # its lock is over what follows, too; nothing under it ever blocks
        self._child: Child | None = None
        self._unsent: dict[tuple[str, str | int], bytes] = {}  # what waits until a child is ready, by kind and key
        self._loop: asyncio.AbstractEventLoop | None = None  # where what the child sends is read
        self._closing = threading.Event()
        self._started: Future[None] = Future()
        self._keeper = threading.Thread(target=self._keep, name="afterglow-keeper", daemon=True)
        self._keeper.start()
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

    def submit(self, request: Request) -> Stream:
        """Hand a request in; never waits. What is wrong with it comes as its only event."""
        try:
            content = pack("request", request)
            with self._waiting.lock:
                stream = self._waiting.stream(request.id)
                self._post("submit", request.id, content)
        except InvalidArgument as error:
            return refused(request.id, error)
        return stream

    def submit_together(self, requests: Sequence[Request]) -> list[Stream]:
        """Hand several in at once: none begins before all are there, so a common prompt is computed once."""
        content = pack("request", tuple(requests))
        with self._waiting.lock:
            streams = [self._waiting.stream(request.id) for request in requests]
            self._post("together", requests[0].id, content)
        return streams

    def expect(self, change: int) -> None:
        """So many more requests are on their way, or, below 0, fewer: what begins waits a moment for its company."""
        with self._waiting.lock:
            if self._child is not None and self._child.ready:
                self._child.send("coming", change)

    def cancel(self, id: str) -> None:
        """End a request now, also in the middle of a decode. One that is not there is no error."""
        with self._waiting.lock:
            if self._unsent.pop(("submit", id), None) is not None:
                self._waiting.deliver([Failed(id, Cancelled(f"request {id} was cancelled"), Usage())])
            else:
                self._post("cancel", id, b"")

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of a module on the engine, over there; what it returns comes back pickled."""
        content = pack("function", function)
        with self._waiting.lock:
            number, answer = self._waiting.answer()
            self._post("call", number, content)
        value, error = unpack("function", answer.result())
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End every request and the child. Closing twice is allowed."""
        with self._waiting.lock:
            self._waiting.refuse(Closed("engine"))
            if self._child is not None and not self._closing.is_set():
                self._child.dismiss()
            self._closing.set()
            self._listen_in(None)
        if threading.current_thread() is not self._keeper:
            self._keeper.join()
        atexit.unregister(self.close)

    def listen_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what the child sends in this event loop, where its readers are: tokens come with less to be woken."""
        with self._waiting.lock:
            if loop is not self._loop and not self._closing.is_set():
                self._listen_in(loop)

    def _listen_in(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        if self._child is not None:
            self._child.listener.move(loop)

    def _post(self, kind: str, key: str | int, content: bytes) -> None:
        """Hand a message to the child, or keep it until there is one that is ready."""
        if self._child is not None and self._child.ready:
            self._child.send(kind, key, content)
        else:
            self._unsent[kind, key] = content

    # --- the keeper's thread

    def _keep(self) -> None:
        try:
            error = self._supervise()
        except BaseException as unexpected:  # a bug here must not leave anybody waiting
            logger.exception("the keeper of the engine's process crashed")
            error = EngineCrashed(describe(unexpected))
        reason = error if isinstance(error, AfterglowError) else EngineCrashed(describe(error))
        self._waiting.refuse(reason)
        self._waiting.fail(reason)
        if not self._started.done():
            self._started.set_exception(error)

    def _supervise(self) -> BaseException:
        """Have a child live, one after the other; why that is over."""
        failures, pause = 0, 0.0
        while not self._closing.wait(pause):
            born = time.monotonic()
            error, was_ready = self._raise_child()
            if not self._started.done():
                return error  # whoever made us wants to know
            failures = 0 if was_ready else failures + 1
            if failures == MAX_STARTS:
                why = error.reason if isinstance(error, EngineCrashed) else describe(error)
                return EngineCrashed(f"it could not be started again: {why}")
            self.restarts += 1
            pause = min(2 * pause + 0.25, LONGEST_PAUSE) if time.monotonic() - born < YOUNG else 0.0
        return Closed("engine")

    def _raise_child(self) -> tuple[BaseException, bool]:
        """One child from its start to its end: what ended it, and whether it was ever ready."""
        try:
            child = Child(self._make, self._receive, start_timeout=self._start_timeout)
        except OSError as error:
            return EngineCrashed(f"no process could be started: {error}"), False
        with self._waiting.lock:
            self._child = child
            child.listener.move(self._loop)
            if self._closing.is_set():
                child.dismiss()
        try:
            why = self._listen(child)
        finally:
            how = child.end()
        crash = EngineCrashed(child.last_words or f"{why} ({how})")
        with self._waiting.lock:
            self._child = None
            if child.ready and not self._closing.is_set():  # where it never was, everybody waits for the next
                self._waiting.fail(crash)
        return child.failure or crash, child.ready

    def _listen(self, child: Child) -> str:
        """Take what the child sends until it is gone, or has to go; why.

        What is counted are missed answers and not seconds: a computer that slept missed one.
        """
        missed = 0
        while missed * self._heartbeat < self._silence:
            if child.overdue:
                child.kill()
                return "it took too long"
            try:
                if child.listener.wait(self._heartbeat):
                    missed = 0
                    continue
            except (EOFError, OSError):
                return "it ended"
            except Exception as error:
                child.kill()
                return f"it sent what cannot be read, {describe(error)}"
            missed += child.heard  # before its first word it is importing, which may take long on a cold disk
            child.send("ping")
        child.kill()
        return f"it gave no sign of life for {self._silence:.0f} s"

    def _receive(self, child: Child, kind: str, key: Any, content: Any) -> None:
        child.heard = True
        match kind:
            case "events":
                self._waiting.deliver(content)
            case "answer":
                self._waiting.resolve(key, content)
            case "ready":
                self._welcome(child)
            case "failed":
                child.failure = content
                child.expect_end()
            case "crashed":
                child.last_words = key
                child.expect_end()
                logger.error("the engine crashed in its process\n%s", content)

    def _welcome(self, child: Child) -> None:
        with self._waiting.lock:
            child.ready, child.deadline = True, None
            unsent, self._unsent = self._unsent, {}
            for (kind, key), content in unsent.items():
                child.send(kind, key, content)
        if not self._started.done():
            self._started.set_result(None)
