"""Long work on the engine thread, divided into slices that run between two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from afterglow.errors import AfterglowError

ResultT = TypeVar("ResultT")
SLICE_SECONDS = 0.0005  # of one slice, which delays a step of the engine; the last turn may exceed it


class SlicedWork:
    """Queue of generators that yield often. Their return values are the results of futures.

    >>> def count(limit):
    ...     for number in range(limit):
    ...         yield
    ...     return limit
    >>> work = SlicedWork()
    >>> future = work.add(count(3))
    >>> while work.run_slice():
    ...     pass
    >>> future.result()
    3
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, work: Generator[None, None, ResultT]) -> Future[ResultT]:
        """Queue a generator; return the future of its result. An exception in it is that of the future."""
        future: Future[ResultT] = Future()
        self._queue.append((work, future))
        return future

    def run_slice(self, seconds: float = SLICE_SECONDS) -> bool:
        """Continue the first generator for at least one turn and about `seconds`; return False if there is none."""
        if not self._queue:
            return False
        work, future = self._queue[0]
        deadline = time.perf_counter() + seconds
        try:
            while True:
                next(work)
                if time.perf_counter() > deadline:
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
