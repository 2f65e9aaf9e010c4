"""Long work over the state of an engine, in slices that run while the engine thread does not use this state."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias, TypeVar

from afterglow.errors import AfterglowError

ResultT = TypeVar("ResultT")
WaitKind: TypeAlias = Literal["decode", "logits", "media", "command"]
SLICE_SECONDS = 0.0005  # of one slice; the last turn may exceed it
PAUSE_SECONDS = 0.00005  # between two slices: otherwise the engine thread waits 5 ms for the interpreter lock
USED_FRACTION = 0.8  # of the expected duration of a wait
STALLED_SECONDS = 0.02  # without a slice, after which the engine thread runs one itself
RECENT_WAITS = 4  # a wait is expected to last as long as the shortest of these


class SlicedWork:
    """Queue of generators that yield often. Their return values are the results of futures.

    The engine thread owns the state that they read. While it waits for native code, it lends the state to a thread
    that continues the generators and stops before the wait is expected to end, so that the engine does not wait for
    it. This thread exists only while the queue is not empty.

    >>> def count(limit):
    ...     for number in range(limit):
    ...         yield
    ...     return limit
    >>> work = SlicedWork()
    >>> future = work.add(count(3))
    >>> with work.run_meanwhile("command"):
    ...     future.result()
    3
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._recent: dict[WaitKind, deque[float]] = {}  # durations of waits in seconds
        self._state_lock = threading.Lock()  # held by the thread that may use the state of the engine
        self._state_lock.acquire()
        self._waits = threading.Semaphore(0)  # one for each wait in which the thread may run
        self._deadline = 0.0  # of the last slice in the current wait
        self._thread: threading.Thread | None = None
        self._last_slice = 0.0  # time of its end, or of the start of the work

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, work: Generator[None, None, ResultT]) -> Future[ResultT]:
        """Queue a generator; return the future of its result or exception."""
        future: Future[ResultT] = Future()
        if not self._queue:
            self._last_slice = time.perf_counter()
        self._queue.append((work, future))
        return future

    @contextlib.contextmanager
    def run_meanwhile(self, kind: WaitKind) -> Iterator[None]:
        """Continue the work on another thread inside a block that waits and does not use the state of the engine.

        A wait for a command has no expected end; others are expected to last as long as the last ones of their kind.
        """
        if not self._queue:
            yield
            return
        recent = self._recent.setdefault(kind, deque(maxlen=RECENT_WAITS))
        expected = math.inf if kind == "command" else USED_FRACTION * min(recent, default=0.0)
        started = time.perf_counter()
        try:
            if expected < SLICE_SECONDS:
                yield
            else:
                with self._allow_slices(started + expected):
                    yield
        finally:
            recent.append(time.perf_counter() - started)

    @contextlib.contextmanager
    def _allow_slices(self, deadline: float) -> Iterator[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="afterglow-slices", daemon=True)
            self._thread.start()
        self._deadline = deadline
        self._waits.release()
        self._state_lock.release()
        try:
            yield
        finally:
            self._state_lock.acquire()

    def _run(self) -> None:
        while True:
            self._waits.acquire()
            while True:
                with self._state_lock:
                    if not self._queue:
                        self._thread = None
                        return
                    if time.perf_counter() > self._deadline:
                        break
                    self.run_slice()
                time.sleep(PAUSE_SECONDS)

    def ensure_progress(self) -> None:
        """Run a slice on this thread if none ran for a while: work ends even if all waits are short."""
        if self._queue and time.perf_counter() - self._last_slice >= STALLED_SECONDS:
            self.run_slice()

    def run_slice(self, seconds: float = SLICE_SECONDS) -> bool:
        """Continue the first generator for at least one turn and about `seconds`; return False if there is none."""
        if not self._queue:
            return False
        work, future = self._queue[0]
        deadline = time.perf_counter() + seconds
        try:
            while True:
                next(work)
                self._last_slice = time.perf_counter()
                if self._last_slice > deadline:
                    return True
        except StopIteration as end:
            self._queue.popleft()
            future.set_result(end.value)
        except Exception as error:  # raised in the caller that waits for the result
            self._queue.popleft()
            future.set_exception(error)
        return True

    def close(self, error: AfterglowError) -> None:
        """Fail everything in the queue."""
        while self._queue:
            work, future = self._queue.popleft()
            work.close()
            future.set_exception(error)
        if (thread := self._thread) is not None:
            self._waits.release()
            self._state_lock.release()
            thread.join()
            self._state_lock.acquire()
