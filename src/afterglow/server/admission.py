"""Admission control: bounds the choices of a model and the media files of all requests; rejects the rest with 429."""

from __future__ import annotations

import math
import threading
import time

from afterglow.media.budget import MediaBudget
from afterglow.server.errors import APIError

DURATION_SMOOTHING = 0.2  # weight of the newest duration in the moving average
MAX_RETRY_AFTER_SECONDS = 60


class Ticket:
    """Admission of a number of choices. Each place is released once. All methods may be called from any thread."""

    def __init__(self, queue: AdmissionQueue, count: int, *, is_background: bool = False) -> None:
        self._queue = queue
        self._count = count
        self._is_background = is_background
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def release(self) -> None:
        """Return all places that are left to the queue."""
        self._release(self._count)

    def release_one(self) -> None:
        """Return the place of one choice, whose generation has ended."""
        self._release(1)

    def _release(self, count: int) -> None:
        with self._lock:
            count = min(count, self._count)
            self._count -= count
        if count:
            self._queue.release(count, time.monotonic() - self._started, is_background=self._is_background)


class AdmissionQueue:
    """Counts the choices of one model that run or wait. Background ones take no place of the others.

    >>> queue = AdmissionQueue(max_running=2, max_waiting=0)
    >>> ticket = queue.admit(2)
    >>> queue.admit(1)
    Traceback (most recent call last):
    afterglow.server.errors.APIError: the queue is full: 2 choices are running or waiting, the limit is 2; retry later
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.in_flight = 0
        self.background = 0  # of those in flight
        self._lock = threading.Lock()
        self.max_running = max_running  # replicas may join and leave
        self._max_waiting = max_waiting
        self._mean_seconds = 1.0  # moving average of the duration of a request

    @property
    def waiting(self) -> int:
        """Choices that wait for a sequence."""
        return max(0, self.in_flight - self.max_running)

    def admit(self, count: int, *, is_background: bool = False) -> Ticket:
        """Admit `count` choices or raise a 429 error. An idle model admits any number."""
        with self._lock:
            taken = self.in_flight if is_background else self.in_flight - self.background
            limit = self.max_running + self._max_waiting
            if taken and taken + count > limit:
                raise APIError(
                    429,
                    f"the queue is full: {taken} choices are running or waiting, the limit is {limit}; retry later",
                    error_type="rate_limit_error",
                    code="queue_full",
                    retry_after=self._estimate_wait_seconds(),
                )
            self.in_flight += count
            self.background += count if is_background else 0
        return Ticket(self, count, is_background=is_background)

    def release(self, count: int, seconds: float, *, is_background: bool = False) -> None:
        """Remove `count` choices that took `seconds`."""
        with self._lock:
            self.in_flight -= count
            self.background -= count if is_background else 0
            self._mean_seconds += DURATION_SMOOTHING * (seconds - self._mean_seconds)

    def _estimate_wait_seconds(self) -> int:
        """Estimate the seconds until a sequence becomes free."""
        return max(1, min(MAX_RETRY_AFTER_SECONDS, math.ceil(self._mean_seconds / self.max_running)))


class MediaReservation:
    """Bytes of the media files that one request keeps in this process, out of the budget of all requests.

    >>> reservation = MediaReservation(MediaBudget(), max_bytes=100)
    >>> reservation.resize(60)
    >>> reservation.release()
    """

    def __init__(self, budget: MediaBudget, max_bytes: int) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Change the size or raise a 429 error. Called in the event loop only."""
        self.release()
        if not self._budget.try_reserve(nbytes, self._max_bytes):
            raise APIError(
                429,
                f"the media of running requests takes {self._budget.used_bytes:,} bytes and this request has "
                f"{nbytes:,}; the limit is {self._max_bytes:,} (server setting `max_decoded_media_bytes`); retry later",
                error_type="rate_limit_error",
                code="media_memory_full",
                retry_after=1,
            )
        self._nbytes = nbytes

    def release(self) -> None:
        """Return all bytes to the budget. Only the first call has an effect."""
        self._budget.release(self._nbytes)
        self._nbytes = 0
