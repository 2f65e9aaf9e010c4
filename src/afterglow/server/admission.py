"""How many answers a model may have waiting. Beyond that a request is told when to come again."""

from __future__ import annotations

import math
import time

from afterglow.server.errors import APIError

DURATION_SMOOTHING = 0.2  # of the running mean of how long answers take
MAX_RETRY_AFTER_SECONDS = 60


class Ticket:
    """The right to have so many answers made; given back once."""

    def __init__(self, queue: AdmissionQueue, count: int) -> None:
        self._queue: AdmissionQueue | None = queue
        self._count = count
        self._started = time.monotonic()

    def release(self) -> None:
        gate, self._queue = self._queue, None
        if gate is not None:
            gate.release(self._count, time.monotonic() - self._started)


class AdmissionQueue:
    """Counts the answers of one model that run or wait.

    >>> gate = Gate(running=2, waiting=0)
    >>> ticket = gate.enter(2)
    >>> gate.enter(1)
    Traceback (most recent call last):
    afterglow.server.errors.Refusal: 2 answers are being made or waiting, and there is room for 2: come again later
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.in_flight = 0
        self._max_running = max_running
        self._max_in_flight = max_running + max_waiting
        self._mean_seconds = 1.0  # that an answer takes

    @property
    def waiting(self) -> int:
        """Answers that wait for a sequence."""
        return max(0, self.in_flight - self._max_running)

    def admit(self, count: int) -> Ticket:
        """Begin `count` answers, or a 429. Where nothing runs, any number may."""
        if self.in_flight and self.in_flight + count > self._max_in_flight:
            raise APIError(
                429,
                f"{self.in_flight} answers are being made or waiting, and there is room for {self._max_in_flight}: "
                "come again later",
                error_type="rate_limit_error",
                code="queue_full",
                retry_after=self._estimate_wait_seconds(),
            )
        self.in_flight += count
        return Ticket(self, count)

    def release(self, count: int, seconds: float) -> None:
        self.in_flight -= count
        self._mean_seconds += DURATION_SMOOTHING * (seconds - self._mean_seconds)

    def _estimate_wait_seconds(self) -> int:
        """Seconds until a place is likely to be free."""
        return max(1, min(MAX_RETRY_AFTER_SECONDS, math.ceil(self._mean_seconds / self._max_running)))
