"""The disk tier: a thread that writes segments and checkpoints behind the engine's back, and reads for the next start.

Whatever the disk does, the engine goes on: what cannot be queued is dropped, what cannot be written is not there, what
cannot be read is a miss. The thread owns the table; files are mapped by whoever needs them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from afterglow.engine import disk_files
from afterglow.engine.disk_files import Item, Kind, Loaded, file_name
from afterglow.engine.disk_index import DiskIndex, Row
from afterglow.engine.pins import SHARE
from afterglow.errors import Closed, InvalidState

T = TypeVar("T")
QUEUE = 4096  # things to do; none of them holds bytes
LISTING = 5.0  # seconds that a start waits for the list of what is there
PATIENCE = 10.0  # seconds that people wait for an answer of the disk
PAUSE = 60.0  # seconds without writing after the disk refused
LOOK = 1.0  # seconds between looks at what other processes wrote
EVICTED = 16  # files at once
logger = logging.getLogger("afterglow.engine.disk")


@dataclass(frozen=True, slots=True)
class Found:
    """There is a file."""

    row: Row


@dataclass(frozen=True, slots=True)
class Gone:
    """There is a file no more."""

    kind: Kind
    key: bytes


News: TypeAlias = Found | Gone
Find: TypeAlias = Callable[[Kind, bytes], Item | None]


@dataclass(slots=True)
class DiskCounters:
    """What the disk tier did so far."""

    written: int = 0  # files
    written_bytes: int = 0
    dropped: int = 0  # there was too much to do
    evictions: int = 0
    broken: int = 0  # files that were not what they should be, and are gone
    errors: int = 0  # of the disk


class Disk:
    """One model's part of a directory that any number of processes may share.

    `find` gives the thing with a name, on the disk's thread: None where it is gone from RAM before it was written.
    """

    def __init__(self, directory: Path, *, limit: int, model: bytes, find: Find, label: str = "") -> None:
        self.counters = DiskCounters()
        self.limit = limit
        self.directory = directory
        self._model = model
        self._folder = directory / model.hex()
        self._find = find
        self._label = label
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE)
        self._queued: set[str] = set()
        self._index: DiskIndex | None = None
        self._seen = 0  # the largest number of a row
        self._version = 0
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._refused_at: float | None = None
        self._warned = False
        disk_files.prepare(directory)
        listed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listed,), name="afterglow-disk", daemon=True)
        self._thread.start()
        if not listed.wait(LISTING):
            self._warn("is slow: what it holds is used as soon as it is known")

    # --- for the engine's thread: nothing here waits for the disk, except `load`

    def news(self) -> list[News]:
        """What came and went since the last call."""
        found: list[News] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def offer(self, kind: Kind, key: bytes) -> None:
        """Write the thing of this name, some time."""
        name = file_name(kind, key)
        if name not in self._queued:
            self._queued.add(name)
            if not self._do(functools.partial(self._write, kind, key)):
                self._queued.discard(name)

    def touch(self, names: Iterable[str]) -> None:
        """Note that files were used."""
        self._do(functools.partial(self._on_index, lambda index: index.touch(list(names))))

    def pin(self, names: Iterable[str], *, pinned: bool) -> None:
        """Never let go of these files, or let go of them again."""
        self._do(functools.partial(self._on_index, lambda index: index.pin(list(names), pinned=pinned)))

    def remove(self, kind: Kind, key: bytes) -> None:
        """Forget a file."""
        self._do(functools.partial(self._delete, [file_name(kind, key)]))

    def clear(self) -> None:
        """Forget every file of this model."""
        self._do(functools.partial(self._on_index, self._clear))

    def load(self, kind: Kind, key: bytes) -> Loaded:
        """A file, checked; `InvalidState` where it is not what it should be, and then it is gone."""
        path = self._folder / file_name(kind, key)
        try:
            loaded = disk_files.load(path)
            if (loaded.item.kind, loaded.item.key, loaded.item.model) != (kind, key, self._model):
                raise InvalidState("it is of another model")
        except (InvalidState, OSError, ValueError) as error:
            self.counters.broken += not isinstance(error, FileNotFoundError)
            self.remove(kind, key)
            raise InvalidState(f"{path.name}: {error}") from error
        return loaded

    def ask(self, question: Callable[[DiskIndex], T], timeout: float = PATIENCE) -> T | None:
        """Something of the table, for people; None where the disk does not answer in time."""
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                if self._index is not None:
                    answer.set_result(question(self._index))
                    return
                answer.set_exception(Closed("disk tier"))
            except Exception as error:
                answer.set_exception(error)

        if not self._do(reply):
            return None
        with contextlib.suppress(TimeoutError, Closed, OSError, sqlite3.Error):
            return answer.result(timeout)
        return None

    def flush(self, timeout: float = PATIENCE) -> bool:
        """Wait until everything that was offered is written; False: it is not, within that time."""
        done = threading.Event()
        return self._do(done.set) and done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Write what is queued, for so long at most, and end."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._work.put_nowait(None)
        self._thread.join(timeout + 1.0)

    def _do(self, work: Callable[[], None]) -> bool:
        if not self._thread.is_alive():  # it was closed, and nobody would ever do it
            return False
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self.counters.dropped += 1
            return False
        return True

    # --- the disk's thread

    def _run(self, listed: threading.Event) -> None:
        self._attempt(self._open)
        listed.set()
        looked = time.monotonic()
        while not (self._closing.is_set() and (self._work.empty() or time.monotonic() > self._deadline)):
            with contextlib.suppress(queue.Empty):
                work = self._work.get(timeout=LOOK)
                if work is not None:
                    self._attempt(work)
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                self._attempt(self._look)
        if self._index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._index.close()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, sqlite3.Error) as error:
            self.counters.errors += 1
            self._refused_at = time.monotonic()
            self._warn(f"cannot be used now: {error}")
        except Exception:  # a bug here must not end the tier in silence
            self.counters.errors += 1
            logger.exception("the disk tier failed")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the prefix cache in %s %s; afterglow goes on without it", self.directory, what)

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        disk_files.write_label(self._folder, self._label)
        self._index = DiskIndex(self.directory)
        self._index.collect()
        self._version = self._index.version
        self._report()

    def _report(self) -> None:
        """Tell the engine of files that it may not know."""
        assert self._index is not None
        for row in self._index.rows(self._model.hex(), self._seen):
            self._seen = max(self._seen, row.number)
            self._news.put(Found(row))

    def _look(self) -> None:
        """See what other processes wrote."""
        if self._index is None:
            if not self._resting:
                self._open()
        elif (version := self._index.version) != self._version:
            self._version = version
            self._report()

    @property
    def _resting(self) -> bool:
        """Whether the disk refused a moment ago."""
        return self._refused_at is not None and time.monotonic() - self._refused_at < PAUSE

    def _on_index(self, work: Callable[[DiskIndex], None]) -> None:
        if self._index is not None and not self._resting:
            work(self._index)

    def _write(self, kind: Kind, key: bytes) -> None:
        self._queued.discard(file_name(kind, key))
        if self._index is None or self._resting:
            self.counters.dropped += 1
            return
        item = self._find(kind, key)
        if item is None or (self._folder / item.name).exists():  # somebody else was faster
            return
        size = sum(len(part) for part in item.payload) + 8 * len(item.ids) + len(item.layout) + 512
        if not self._make_room(self._index, size):
            self.counters.dropped += 1
            return
        nbytes = disk_files.write(self._folder, item)
        self._index.add(item, nbytes, pinned=item.pinned)
        self.counters.written += 1
        self.counters.written_bytes += nbytes
        self._report()

    def _make_room(self, index: DiskIndex, nbytes: int) -> bool:
        if nbytes > self.limit:
            return False
        self._bound_pins(index)
        while (total := index.total()) + nbytes > self.limit:
            too_much = total + nbytes - self.limit
            worst = index.worst(EVICTED)
            if not worst:
                return False
            for row in worst:
                if too_much <= 0:
                    break
                too_much -= self._forget(index, row)
        return True

    def _bound_pins(self, index: DiskIndex) -> None:
        """Pinned files have a share of the limit; beyond it those not used for longest are as the rest."""
        while index.total(pinned=True) > self.limit * SHARE:
            index.pin([row.name for row in index.oldest_pinned(EVICTED)], pinned=False)

    def _forget(self, index: DiskIndex, row: Row) -> int:
        """Remove a file and all that is of no use without it; the bytes that are free now."""
        freed, waiting = 0, [row]
        while waiting:
            one = waiting.pop()
            if not one.pinned or one is row:
                waiting += index.dependents(one)
                (self.directory / one.model / one.name).unlink(missing_ok=True)
                index.remove([one.name])
                freed += one.nbytes
                self.counters.evictions += 1
                if one.model == self._model.hex():
                    self._news.put(Gone(one.kind, one.key))
        return freed

    def _clear(self, index: DiskIndex) -> None:
        for row in index.rows(self._model.hex()):
            self._forget(index, row)

    def _delete(self, names: list[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        if self._index is not None:
            self._index.remove(names)
