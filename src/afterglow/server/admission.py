"""How many answers a model may have waiting. Beyond that a request is told when to come again."""

from __future__ import annotations

import math
import time

from afterglow.server.errors import Refusal

SMOOTHING = 0.2  # of the running mean of how long answers take
LONGEST_WAIT = 60


class Ticket:
    """The right to have so many answers made; given back once."""

    def __init__(self, gate: Gate, count: int) -> None:
        self._gate: Gate | None = gate
        self._count = count
        self._since = time.monotonic()

    def release(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.leave(self._count, time.monotonic() - self._since)


class Gate:
    """Counts the answers of one model that run or wait.

    >>> gate = Gate(running=2, waiting=0)
    >>> ticket = gate.enter(2)
    >>> gate.enter(1)
    Traceback (most recent call last):
    afterglow.server.errors.Refusal: 2 answers are being made or waiting, and there is room for 2: come again later
    """

    def __init__(self, *, running: int, waiting: int) -> None:
        self.inside = 0
        self._running = running
        self._limit = running + waiting
        self._seconds = 1.0  # that an answer takes

    @property
    def waiting(self) -> int:
        """Answers that wait for a sequence."""
        return max(0, self.inside - self._running)

    def enter(self, count: int) -> Ticket:
        """Begin `count` answers, or a 429. Where nothing runs, any number may."""
        if self.inside and self.inside + count > self._limit:
            raise Refusal(
                429,
                f"{self.inside} answers are being made or waiting, and there is room for {self._limit}: "
                "come again later",
                kind="rate_limit_error",
                code="queue_full",
                retry_after=self._estimate(),
            )
        self.inside += count
        return Ticket(self, count)

    def leave(self, count: int, seconds: float) -> None:
        self.inside -= count
        self._seconds += SMOOTHING * (seconds - self._seconds)

    def _estimate(self) -> int:
        """Seconds until a place is likely to be free."""
        return max(1, min(LONGEST_WAIT, math.ceil(self._seconds / self._running)))
