"""Admission control: bounds the choices that run or wait for a model and rejects the rest with 429."""

from __future__ import annotations

import math
import time

from afterglow.server.errors import APIError

DURATION_SMOOTHING = 0.2  # weight of the newest duration in the moving average
MAX_RETRY_AFTER_SECONDS = 60


class Ticket:
    """Admission of a number of choices. `release` takes effect once."""

    def __init__(self, queue: AdmissionQueue, count: int) -> None:
        self._queue: AdmissionQueue | None = queue
        self._count = count
        self._started = time.monotonic()

    def release(self) -> None:
        """Return the places to the queue."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.release(self._count, time.monotonic() - self._started)


class AdmissionQueue:
    """Counts the choices of one model that run or wait.

    >>> queue = AdmissionQueue(max_running=2, max_waiting=0)
    >>> ticket = queue.admit(2)
    >>> queue.admit(1)
    Traceback (most recent call last):
    afterglow.server.errors.APIError: the queue is full: 2 choices are running or waiting, the limit is 2; retry later
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.in_flight = 0
        self._max_running = max_running
        self._max_in_flight = max_running + max_waiting
        self._mean_seconds = 1.0  # moving average of the duration of a request

    @property
    def waiting(self) -> int:
        """Choices that wait for a sequence."""
        return max(0, self.in_flight - self._max_running)

    def admit(self, count: int) -> Ticket:
        """Admit `count` choices or raise a 429 error. An idle model admits any number."""
        if self.in_flight and self.in_flight + count > self._max_in_flight:
            raise APIError(
                429,
                f"the queue is full: {self.in_flight} choices are running or waiting, the limit is "
                f"{self._max_in_flight}; retry later",
                error_type="rate_limit_error",
                code="queue_full",
                retry_after=self._estimate_wait_seconds(),
            )
        self.in_flight += count
        return Ticket(self, count)

    def release(self, count: int, seconds: float) -> None:
        """Remove `count` choices that took `seconds`."""
        self.in_flight -= count
        self._mean_seconds += DURATION_SMOOTHING * (seconds - self._mean_seconds)

    def _estimate_wait_seconds(self) -> int:
        """Estimate the seconds until a sequence becomes free."""
        return max(1, min(MAX_RETRY_AFTER_SECONDS, math.ceil(self._mean_seconds / self._max_running)))
