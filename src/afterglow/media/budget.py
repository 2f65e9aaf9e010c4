"""Byte budget that several threads share."""

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


class ByteBudget:
    """Counts the bytes that are in use. A thread waits until its bytes fit, or until it is the only one.

    >>> budget = ByteBudget()
    >>> with budget.reserve(60, limit=100):
    ...     budget.used_bytes
    60
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._condition = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int, limit: int) -> Iterator[None]:
        """Use `nbytes` inside the `with` block. Waits while all uses together would exceed `limit`."""
        with self._condition:
            self._condition.wait_for(lambda: not self.used_bytes or self.used_bytes + nbytes <= limit)
            self.used_bytes += nbytes
        try:
            yield
        finally:
            if nbytes >= MIN_TRIMMED_BYTES:
                release_free_memory()
            with self._condition:
                self.used_bytes -= nbytes
                self._condition.notify_all()


DECODE_BUDGET = ByteBudget()  # working memory of all decoders of this process
