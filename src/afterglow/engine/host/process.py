"""Process host: an engine in a child process. A crash fails the requests that have streamed tokens or were repeated.

It has the same interface as `EngineThread`. It also keeps busy Python threads of the caller from slowing down native
calls through the GIL.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.child_main import PortableEvent, from_portable_event, pack, unpack
from afterglow.engine.host.child_process import ChildProcess
from afterglow.engine.host.loop import describe_error, logger
from afterglow.engine.host.stream import EventStream, PendingRequests, deliver_events
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.request import Failed, PrefillProgress, Request, Usage
from afterglow.errors import AfterglowError, Cancelled, Closed, EngineCrashed
from afterglow.llama.model import ProgressCallback

ResultT = TypeVar("ResultT")
START_TIMEOUT_SECONDS = 600.0  # a large model loads slowly
MAX_SILENCE_SECONDS = 10.0  # a child without a response for this long counts as dead
MAX_FAILED_STARTS = 3  # consecutive restarts that do not become ready
MAX_RESTART_DELAY_SECONDS = 5.0  # between restarts that fail or crash early
EARLY_CRASH_SECONDS = 2.0  # after a child became ready
HEARTBEAT_SECONDS = 1.0
TakeOver: TypeAlias = Callable[["Submission", Sequence[EventStream]], bool]
"""Serves the requests of a dead child on another host. Returns False if that is not possible."""
MessageKey: TypeAlias = str | int | tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """Requests that were submitted together, and when."""

    requests: tuple[Request, ...]
    submitted: float

    def build_repeat(self, ids: Container[str]) -> tuple[Request, ...]:
        """Return the requests with these ids, for another child. Their deadlines stay the same moments."""
        elapsed = time.monotonic() - self.submitted
        return tuple(
            request if request.deadline is None else replace(request, deadline=max(0.0, request.deadline - elapsed))
            for request in self.requests
            if request.id in ids
        )


class EngineProcess(EngineHost):
    """Owns a child process with an engine and restarts it after a crash.

    While a child restarts, new requests wait for it. They fail only if the restarts fail. Requests in flight that have
    no token yet, and calls, are repeated once on the new child: requests one after the other, because one of them may
    be what crashed the child.
    """

    restarts = 0

    def __init__(
        self,
        factory: Callable[[], Engine],
        *,
        progress: ProgressCallback | None = None,
        silence_timeout: float = MAX_SILENCE_SECONDS,
        start_timeout: float = START_TIMEOUT_SECONDS,
        wait: bool = True,
    ) -> None:
        """Start the child and wait until its engine is built; without `wait`, `wait_until_ready` does that later.

        `factory` builds the engine in the child. It is pickled, so it must be a function of a module or an object like
        `EngineSpec`. Only an `EngineSpec` reports `progress`; if that returns False, the start is cancelled. A child
        that does not respond for `silence_timeout` seconds is killed and restarted.
        """
        self.take_over: TakeOver | None = None  # gets the requests that would wait for a restart to be repeated
        self.store_report: StoreReport | None = None  # set by `close`; None: not closed, or the child died before
        self._label = str(getattr(factory, "path", "an engine"))  # in the log
        self._progress = progress
        self._factory = pack("factory", factory)
        self._silence_timeout, self._start_timeout = silence_timeout, start_timeout
        self._heartbeat_seconds = min(HEARTBEAT_SECONDS, silence_timeout / 4)
        self._pending = PendingRequests(self.cancel)  # its lock also guards the fields below; nothing blocks under it
        self._child: ChildProcess | None = None
        self._unsent: dict[tuple[str, MessageKey], bytes] = {}  # messages for the next ready child, by kind and key
        self._repeatable_requests: dict[str, Submission] = {}  # requests without a token, not yet repeated, by id
        self._repeats: deque[tuple[Submission, set[str]]] = deque()  # requests to repeat, one submission at a time
        self._repeated_ids: set[str] = set()  # requests that are being repeated and have no token yet
        self._repeatable_calls: dict[int, bytes] = {}  # calls in flight, not yet repeated, by number
        self._event_loop: asyncio.AbstractEventLoop | None = None  # reads the messages of the child
        self._closing = threading.Event()
        self._started: Future[None] = Future()
        self._supervisor = threading.Thread(target=self._run_supervisor, name="afterglow-supervisor", daemon=True)
        self._supervisor.start()
        atexit.register(self.close)
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the first engine is built. If that fails, close the host and raise the reason."""
        try:
            self._started.result()
        except BaseException:  # also Ctrl-C while a model loads
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the child, or None if there is no child."""
        child = self._child
        return None if child is None else child.process.pid

    @property
    def restart_factory(self) -> Callable[[], Engine]:
        """The factory with which the next child starts: it skips what the last one has found out."""
        factory: Callable[[], Engine] = unpack("factory", self._factory)
        return factory

    @property
    def is_ready(self) -> bool:
        """Whether a child with a built engine runs."""
        child = self._child
        return child is not None and child.is_ready

    @property
    def has_given_up(self) -> bool:
        """Whether the restarts failed, so that every request and call raises `EngineCrashed`."""
        return not self._supervisor.is_alive() and not self._closing.is_set()

    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Submit several requests at once, so that a common prefix is prefilled once."""
        self._pending.owner.check()
        content = pack("request", tuple(requests))
        submission = Submission(tuple(requests), time.monotonic())
        with self._pending.lock:
            streams = self._pending.add_streams([request.id for request in requests])
            self._repeatable_requests.update((request.id, submission) for request in requests)
            self._post("submit", tuple(request.id for request in requests), content)
        return streams

    def adopt(self, submission: Submission, streams: Sequence[EventStream]) -> None:
        """Serve the requests of another host, whose child died. Like all repeated requests, one after the other."""
        with self._pending.lock:
            self._pending.adopt_streams(streams)
            self._repeats.append((submission, {stream.id for stream in streams}))
            self._send_next_repeat()
        for stream in streams:
            if stream.is_cancelled:  # during the hand-over
                self.cancel(stream.id)

    def list_waiting(self) -> set[str]:
        """Return the ids of the requests that have no token yet."""
        with self._pending.lock:
            queued = {id for _, ids in self._repeats for id in ids}
            return queued | self._repeated_ids | set(self._repeatable_requests)

    def cancel(self, id: str) -> None:
        """Cancel a request, even during a decode. An unknown id is ignored."""
        with self._pending.lock:
            self._repeatable_requests.pop(id, None)
            queued_repeats = [ids for _, ids in self._repeats if id in ids]
            for ids in queued_repeats:
                ids.discard(id)
            if queued_repeats or self._unsent.pop(("submit", (id,)), None) is not None:
                self._pending.deliver([Failed(id, Cancelled(f"request {id} was cancelled"), Usage())])
            else:
                self._post("cancel", id, b"")

    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT:
        """Run a function of a module on the engine in the child and return its pickled result.

        If it returns a future, the engine continues and the caller waits for the result of the future.
        It must be safe to run twice: if the child dies during the call, the call is repeated once on the next child.
        """
        self._pending.owner.check()
        content = pack("function", function)
        with self._pending.lock:
            number, future = self._pending.add_call()
            self._repeatable_calls[number] = content
            self._post("call", number, content)
        value, error = unpack("function", future.result())
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End every request with `Closed` and stop the child, with `store_timeout` seconds for its prefix cache.

        May be called twice. Has no effect in a fork. `store_report` says what was stored.
        """
        if not self._pending.owner.is_current:  # the child belongs to the parent of this fork
            return
        with self._pending.lock:
            self._pending.close(Closed("engine"))
            if self._child is not None and not self._closing.is_set():
                self._child.shut_down(store_timeout)
            self._closing.set()
            self._attach_event_loop(None)
        if threading.current_thread() is not self._supervisor:
            self._supervisor.join()
        atexit.unregister(self.close)

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read messages of the child in the event loop of the clients, which wakes one thread less per token."""
        with self._pending.lock:
            if loop is not self._event_loop and not self._closing.is_set():
                self._attach_event_loop(loop)

    def _attach_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._event_loop = loop
        if self._child is not None:
            self._child.listener.attach_event_loop(loop)

    def _post(self, kind: str, key: MessageKey, content: bytes) -> None:
        """Send a message to the child, or store it until a child is ready."""
        if self._child is not None and self._child.is_ready:
            self._child.send(kind, key, content)
        else:
            self._unsent[kind, key] = content

    # --- supervisor thread

    def _run_supervisor(self) -> None:
        try:
            error = self._supervise()
        except BaseException as unexpected:  # a bug here must not leave a client waiting
            logger.exception("the supervisor of the engine process crashed")
            error = EngineCrashed(describe_error(unexpected))
        reason = error if isinstance(error, AfterglowError) else EngineCrashed(describe_error(error))
        self._pending.close(reason)
        self._pending.fail_all(reason)
        if not self._started.done():
            self._started.set_exception(error)

    def _supervise(self) -> BaseException:
        """Run one child after another; return the reason for the end."""
        failures, delay = 0, 0.0
        while not self._closing.wait(delay):
            error, uptime = self._run_child()
            if not self._started.done():
                return error  # the constructor raises it
            if self._closing.is_set():
                break
            failures = failures + 1 if uptime is None else 0
            reason = error.reason if isinstance(error, EngineCrashed) else describe_error(error)
            logger.error("the engine of %s died: %s", self._label, reason)
            if failures == MAX_FAILED_STARTS:
                logger.error("the engine of %s could not be restarted %d times", self._label, failures)
                return EngineCrashed(f"process could not be restarted: {reason}")
            self.restarts += 1
            is_early = uptime is None or uptime < EARLY_CRASH_SECONDS
            delay = min(2 * delay + 0.25, MAX_RESTART_DELAY_SECONDS) if is_early else 0.0
        return Closed("engine")

    def _run_child(self) -> tuple[BaseException, float | None]:
        """Run one child from start to exit; return what ended it, and its seconds since it was ready (None: never)."""
        try:
            child = ChildProcess(self._factory, self._handle_message, start_timeout=self._start_timeout)
        except OSError as error:
            return EngineCrashed(f"process could not be started: {error}"), None
        with self._pending.lock:
            self._child = child
            child.listener.attach_event_loop(self._event_loop)
            if self._closing.is_set():
                child.kill()
        try:
            reason = self._monitor_child(child)
        finally:
            exit_status = child.reap()
        crash = EngineCrashed(child.crash_reason or f"{reason} ({exit_status})")
        with self._pending.lock:
            self._child = None
            if child.is_ready and not self._closing.is_set():  # if it was never ready, requests wait for the next child
                ids, numbers = self._repeat_work()
                self._pending.fail_all(crash, except_requests=ids, except_calls=numbers)
        self._hand_over_repeats()
        uptime = None if child.ready_since is None else time.monotonic() - child.ready_since
        return child.start_error or crash, uptime

    def _repeat_work(self) -> tuple[set[str], set[int]]:
        """Queue the requests without a token and the calls of a dead child once more; return ids and numbers."""
        requests, self._repeatable_requests = self._repeatable_requests, {}
        calls, self._repeatable_calls = self._repeatable_calls, {}
        for submission in dict.fromkeys(requests.values()):
            self._repeats.append((submission, {id for id, other in requests.items() if other is submission}))
        self._repeated_ids = set()
        self._unsent.update((("call", number), content) for number, content in calls.items())
        return {id for _, ids in self._repeats for id in ids}, set(calls)

    def _hand_over_repeats(self) -> None:
        """Give the requests to repeat to another host, if there is one. Those that it cannot take stay here."""
        if (take_over := self.take_over) is None or self._closing.is_set():
            return
        with self._pending.lock:
            repeats, self._repeats = self._repeats, deque()
            orphans = [(submission, self._pending.remove_streams(ids)) for submission, ids in repeats]
        for submission, streams in orphans:  # without the lock: the other host may be handing over to this one
            try:
                if streams and not take_over(submission, streams):
                    self.adopt(submission, streams)
            except AfterglowError as error:  # closed meanwhile
                deliver_events([(stream, Failed(stream.id, copy(error), Usage())) for stream in streams])

    def _send_next_repeat(self) -> None:
        """Repeat the next submission once the one before it has tokens, so that one that crashes does so alone."""
        with self._pending.lock:
            while self._repeats and not self._repeated_ids and self._child is not None and self._child.is_ready:
                submission, self._repeated_ids = self._repeats.popleft()
                if self._repeated_ids:  # not cancelled
                    content = pack("request", submission.build_repeat(self._repeated_ids))
                    self._child.send("submit", tuple(self._repeated_ids), content)

    def _monitor_child(self, child: ChildProcess) -> str:
        """Receive messages until the child exits or must be killed; return the reason.

        Counts missed heartbeats instead of seconds: after a suspend of the computer only one is missed.
        """
        missed = 0
        while missed * self._heartbeat_seconds < self._silence_timeout:
            if child.deadline is not None and time.monotonic() > child.deadline:
                child.kill()
                return "process timed out"
            try:
                if child.listener.wait(self._heartbeat_seconds):
                    missed = 0
                    continue
            except (EOFError, OSError):
                return "process exited"
            except Exception as error:
                child.kill()
                return f"process sent an unreadable message: {describe_error(error)}"
            missed += child.has_responded  # before its first message it imports modules, slowly from a cold disk
            child.send("ping")
        child.kill()
        return f"process did not respond for {self._silence_timeout:.0f} s"

    def _handle_message(self, child: ChildProcess, kind: str, key: Any, content: Any) -> None:
        child.has_responded = True
        match kind:
            case "events":
                self._deliver_events(content)
            case "answer":
                self._repeatable_calls.pop(key, None)
                self._pending.resolve_call(key, content)
            case "progress":
                self._report_progress(child, key)
            case "ready":
                self._factory = content or self._factory
                self._mark_ready(child)
            case "closed":
                self.store_report = content
            case "failed":
                child.start_error = content
                child.set_exit_deadline()
            case "crashed":
                child.crash_reason = key
                child.set_exit_deadline()
                logger.error("the engine crashed in its process\n%s", content)

    def _deliver_events(self, portable_events: list[PortableEvent]) -> None:
        events = [from_portable_event(event) for event in portable_events]
        for event in events:
            if not isinstance(event, PrefillProgress):
                self._repeatable_requests.pop(event.request_id, None)
                self._repeated_ids.discard(event.request_id)
        self._pending.deliver(events)
        if self._repeats:
            self._send_next_repeat()

    def _report_progress(self, child: ChildProcess, fraction: float) -> None:
        if self._progress is None or self._started.done():  # a restart has no caller
            return
        try:
            if self._progress(fraction) is False:
                raise Cancelled("loading was cancelled by its progress callback")
        except BaseException as error:  # the constructor raises it
            child.start_error = error
            child.kill()

    def _mark_ready(self, child: ChildProcess) -> None:
        with self._pending.lock:
            child.ready_since, child.deadline = time.monotonic(), None
            unsent, self._unsent = self._unsent, {}
            for (kind, key), content in unsent.items():
                child.send(kind, key, content)
            self._send_next_repeat()
        if self._started.done():
            logger.warning("the engine of %s was restarted (restart %d)", self._label, self.restarts)
        else:
            self._started.set_result(None)
