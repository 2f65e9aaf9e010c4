"""Prefetcher: reads and checks files of the disk tier on a thread, while the engine computes other requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from afterglow.engine.kvcache.disk.files import FileKind, LoadedFile
from afterglow.engine.kvcache.ram import RamTier

FileKey: TypeAlias = tuple[FileKind, bytes]
STALE_AFTER_SECONDS = 30.0  # after this time without `submit`, the request of a file was cancelled


@dataclass(slots=True)
class _PendingFile:
    nbytes: int  # held until it is popped
    future: Future[tuple[LoadedFile, float] | None]
    last_submitted: float


class FileReader(Protocol):
    """Reads and checks files. Thread-safe."""

    def load(self, kind: FileKind, key: bytes) -> LoadedFile: ...


class Prefetcher:
    """Reads files by key and holds them, in the budget of the RAM tier, until they are popped.

    If there is no space in RAM, a file is read, but only the page cache of the system holds it.
    """

    def __init__(self, reader: FileReader, ram: RamTier, threads: int = 1) -> None:
        self._reader = reader
        self._ram = ram
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="afterglow-read")
        self._pending: dict[FileKey, _PendingFile] = {}

    def submit(self, sizes: Mapping[FileKey, int], protected: AbstractSet[bytes] = frozenset()) -> bool:
        """Start reading files, with their sizes, evicting no `protected` block; return whether some are incomplete."""
        now = time.monotonic()
        for file_key, nbytes in sizes.items():
            pending = self._pending.get(file_key)
            if pending is None:
                hold = self._ram.reserve("prefetch", nbytes, protected)
                future = self._pool.submit(self._timed_load, *file_key, hold)
                pending = self._pending[file_key] = _PendingFile(nbytes if hold else 0, future, now)
            pending.last_submitted = now
        return not all(self._pending[file_key].future.done() for file_key in sizes)

    def pop(self, kind: FileKind, key: bytes, timeout: float = 0.0) -> tuple[LoadedFile, float] | None:
        """Return a file that was read and the seconds it took; None if it is not held or is damaged.

        Waits for at most `timeout` seconds if it is being read, and raises `TimeoutError` after that.
        """
        pending = self._forget((kind, key))
        if pending is not None and timeout and not wait([pending.future], timeout).done:
            raise TimeoutError("reading took too long")
        if pending is None or not pending.future.done() or pending.future.cancelled():
            return None
        return None if pending.future.exception() is not None else pending.future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def drop_stale(self) -> None:
        """Drop the files of requests that were cancelled."""
        now = time.monotonic()
        for file_key, pending in list(self._pending.items()):
            if now - pending.last_submitted > STALE_AFTER_SECONDS:
                self._forget(file_key)
                pending.future.cancel()

    def _forget(self, file_key: FileKey) -> _PendingFile | None:
        pending = self._pending.pop(file_key, None)
        if pending is not None:
            self._ram.budget.remove("prefetch", pending.nbytes)
        return pending

    def _timed_load(self, kind: FileKind, key: bytes, hold: bool) -> tuple[LoadedFile, float] | None:
        started = time.perf_counter()
        loaded = self._reader.load(kind, key)
        return (loaded, time.perf_counter() - started) if hold else None
