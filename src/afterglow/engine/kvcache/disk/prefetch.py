"""Files of the disk tier that are read and checked on a thread of their own, while the engine goes on with others."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from afterglow.engine.kvcache.disk.files import FileKind, LoadedFile

FileKey: TypeAlias = tuple[FileKind, bytes]
MAX_PENDING_FILES = 4096  # files that are remembered; they are mapped, so that they take no memory of ours


class Prefetcher:
    """Reads by name; what was read waits here to be taken."""

    def __init__(self, load: Callable[[FileKind, bytes], LoadedFile]) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="afterglow-read")
        self._pending: OrderedDict[FileKey, Future[tuple[LoadedFile, float]]] = OrderedDict()

    def submit(self, file_keys: Iterable[FileKey]) -> bool:
        """Read these, if nobody does yet. True: not all of them are there."""
        waiting = False
        for name in file_keys:
            file = self._pending.get(name)
            if file is None:
                file = self._pending[name] = self._pool.submit(self._timed_load, *name)
            waiting = waiting or not file.done()
        while len(self._pending) > MAX_PENDING_FILES:
            self._pending.popitem(last=False)[1].cancel()
        return waiting

    def pop(self, kind: FileKind, key: bytes) -> tuple[LoadedFile, float] | None:
        """A file that was read, and the seconds that took; None: it was not, or is broken."""
        file = self._pending.pop((kind, key), None)
        if file is None or not file.done() or file.cancelled() or file.exception() is not None:
            return None
        return file.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed_load(self, kind: FileKind, key: bytes) -> tuple[LoadedFile, float]:
        started = time.perf_counter()
        return self._load(kind, key), time.perf_counter() - started
