"""Files of the disk tier that are read and checked on a thread of their own, while the engine goes on with others."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from afterglow.engine.disk_files import Kind, Loaded

Name: TypeAlias = tuple[Kind, bytes]
MOST = 4096  # files that are remembered; they are mapped, so that they take no memory of ours


class ReadAhead:
    """Reads by name; what was read waits here to be taken."""

    def __init__(self, load: Callable[[Kind, bytes], Loaded]) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="afterglow-read")
        self._files: OrderedDict[Name, Future[tuple[Loaded, float]]] = OrderedDict()

    def begin(self, names: Iterable[Name]) -> bool:
        """Read these, if nobody does yet. True: not all of them are there."""
        waiting = False
        for name in names:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self._pool.submit(self._read, *name)
            waiting = waiting or not file.done()
        while len(self._files) > MOST:
            self._files.popitem(last=False)[1].cancel()
        return waiting

    def take(self, kind: Kind, key: bytes) -> tuple[Loaded, float] | None:
        """A file that was read, and the seconds that took; None: it was not, or is broken."""
        file = self._files.pop((kind, key), None)
        if file is None or not file.done() or file.cancelled() or file.exception() is not None:
            return None
        return file.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, kind: Kind, key: bytes) -> tuple[Loaded, float]:
        started = time.perf_counter()
        return self._load(kind, key), time.perf_counter() - started
