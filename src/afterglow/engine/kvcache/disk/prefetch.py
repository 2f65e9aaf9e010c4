"""Prefetcher: reads and checks files of the disk tier on a thread, while the engine computes other requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from afterglow.engine.kvcache.disk.files import FileKind, LoadedFile

FileKey: TypeAlias = tuple[FileKind, bytes]
MAX_PENDING_FILES = 4096  # they are memory-mapped, so that they use no RAM of this process


class Prefetcher:
    """Reads files by key and holds them until they are popped."""

    def __init__(self, load: Callable[[FileKind, bytes], LoadedFile]) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="afterglow-read")
        self._pending: OrderedDict[FileKey, Future[tuple[LoadedFile, float]]] = OrderedDict()

    def submit(self, file_keys: Iterable[FileKey]) -> bool:
        """Start reading the files that are not being read yet; return whether some are not complete."""
        incomplete = False
        for file_key in file_keys:
            future = self._pending.get(file_key)
            if future is None:
                future = self._pending[file_key] = self._pool.submit(self._timed_load, *file_key)
            incomplete = incomplete or not future.done()
        while len(self._pending) > MAX_PENDING_FILES:
            self._pending.popitem(last=False)[1].cancel()
        return incomplete

    def pop(self, kind: FileKind, key: bytes) -> tuple[LoadedFile, float] | None:
        """Return a file that was read and the seconds it took; None if it was not read or is damaged."""
        future = self._pending.pop((kind, key), None)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed_load(self, kind: FileKind, key: bytes) -> tuple[LoadedFile, float]:
        started = time.perf_counter()
        return self._load(kind, key), time.perf_counter() - started
