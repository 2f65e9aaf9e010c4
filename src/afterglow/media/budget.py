"""Byte budget of media files and their decoders, shared by threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MIN_TRIMMED_BYTES = 16 * 1024 * 1024
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def release_free_memory() -> None:
    """Return freed memory to the operating system. Otherwise glibc keeps up to 64 MiB for each thread."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class MediaBudget:
    """Counts the bytes that are in use. More fit if they do not exceed a limit, or if they are the only ones.

    >>> budget = MediaBudget()
    >>> with budget.reserve(60, limit=100):
    ...     budget.used_bytes, budget.try_reserve(60, limit=100)
    (60, False)
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._condition = threading.Condition()

    def try_reserve(self, nbytes: int, limit: int) -> bool:
        """Use `nbytes` if they fit, and return whether they do. `release` returns them."""
        with self._condition:
            if fits := self._fits(nbytes, limit):
                self.used_bytes += nbytes
            return fits

    def release(self, nbytes: int) -> None:
        """Return bytes that are no longer in use."""
        with self._condition:
            self.used_bytes -= nbytes
            self._condition.notify_all()

    @contextmanager
    def reserve(self, nbytes: int, limit: int) -> Iterator[None]:
        """Use `nbytes` inside the `with` block. Waits until they fit."""
        with self._condition:
            self._condition.wait_for(lambda: self._fits(nbytes, limit))
            self.used_bytes += nbytes
        try:
            yield
        finally:
            if nbytes >= MIN_TRIMMED_BYTES:
                release_free_memory()
            self.release(nbytes)

    def _fits(self, nbytes: int, limit: int) -> bool:
        return not self.used_bytes or self.used_bytes + nbytes <= limit


DECODE_BUDGET = MediaBudget()  # working memory of all decoders of this process
