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

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.files import CacheFile, FileKind, LoadedFile, build_file_name
from afterglow.engine.kvcache.disk.index import DiskIndex, IndexRow
from afterglow.engine.kvcache.pins import MAX_PINNED_FRACTION
from afterglow.errors import Closed, InvalidState

T = TypeVar("T")
MAX_QUEUED_TASKS = 4096  # things to do; none of them holds bytes
LISTING_TIMEOUT_SECONDS = 5.0  # seconds that a start waits for the list of what is there
REPLY_TIMEOUT_SECONDS = 10.0  # seconds that people wait for an answer of the disk
RETRY_AFTER_SECONDS = 60.0  # seconds without writing after the disk refused
POLL_INTERVAL_SECONDS = 1.0  # seconds between looks at what other processes wrote
EVICTION_BATCH_FILES = 16  # files at once
logger = logging.getLogger("afterglow.engine.kvcache.disk.writer")


@dataclass(frozen=True, slots=True)
class FileAdded:
    """There is a file."""

    row: IndexRow


@dataclass(frozen=True, slots=True)
class FileRemoved:
    """There is a file no more."""

    kind: FileKind
    key: bytes


FileEvent: TypeAlias = FileAdded | FileRemoved
FileBuilder: TypeAlias = Callable[[FileKind, bytes], CacheFile | None]


@dataclass(slots=True)
class DiskCounters:
    """What the disk tier did so far."""

    written_files: int = 0  # files
    written_bytes: int = 0
    dropped_writes: int = 0  # there was too much to do
    evictions: int = 0
    corrupt_files: int = 0  # files that were not what they should be, and are gone
    io_errors: int = 0  # of the disk


class DiskWriter:
    """One model's part of a directory that any number of processes may share.

    `find` gives the thing with a name, on the disk's thread: None where it is gone from RAM before it was written.
    """

    def __init__(self, directory: Path, *, limit: int, model: bytes, build_file: FileBuilder, label: str = "") -> None:
        self.counters = DiskCounters()
        self.limit = limit
        self.directory = directory
        self._model = model
        self._folder = directory / model.hex()
        self._build_file = build_file
        self._label = label
        self._events: queue.SimpleQueue[FileEvent] = queue.SimpleQueue()
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED_TASKS)
        self._queued_names: set[str] = set()
        self._index: DiskIndex | None = None
        self._last_row_number = 0  # the largest number of a row
        self._version = 0
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._failed_at: float | None = None
        self._warned = False
        disk_files.prepare_directory(directory)
        listed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listed,), name="afterglow-disk", daemon=True)
        self._thread.start()
        if not listed.wait(LISTING_TIMEOUT_SECONDS):
            self._warn("is slow: what it holds is used as soon as it is known")

    # --- for the engine's thread: nothing here waits for the disk, except `load`

    def drain_events(self) -> list[FileEvent]:
        """What came and went since the last call."""
        found: list[FileEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def enqueue(self, kind: FileKind, key: bytes) -> None:
        """Write the thing of this name, some time."""
        name = build_file_name(kind, key)
        if name not in self._queued_names:
            self._queued_names.add(name)
            if not self._submit(functools.partial(self._write_file, kind, key)):
                self._queued_names.discard(name)

    def touch(self, names: Iterable[str]) -> None:
        """Note that files were used."""
        self._submit(functools.partial(self._with_index, lambda index: index.touch(list(names))))

    def pin(self, names: Iterable[str], *, pinned: bool) -> None:
        """Never let go of these files, or let go of them again."""
        self._submit(functools.partial(self._with_index, lambda index: index.pin(list(names), pinned=pinned)))

    def remove(self, kind: FileKind, key: bytes) -> None:
        """Forget a file."""
        self._submit(functools.partial(self._delete_files, [build_file_name(kind, key)]))

    def clear(self) -> None:
        """Forget every file of this model."""
        self._submit(functools.partial(self._with_index, self._evict_all))

    def load(self, kind: FileKind, key: bytes) -> LoadedFile:
        """A file, checked; `InvalidState` where it is not what it should be, and then it is gone."""
        path = self._folder / build_file_name(kind, key)
        try:
            loaded = disk_files.load_file(path)
            if (loaded.file.kind, loaded.file.key, loaded.file.model) != (kind, key, self._model):
                raise InvalidState("it is of another model")
        except (InvalidState, OSError, ValueError) as error:
            self.counters.corrupt_files += not isinstance(error, FileNotFoundError)
            self.remove(kind, key)
            raise InvalidState(f"{path.name}: {error}") from error
        return loaded

    def query_index(self, query: Callable[[DiskIndex], T], timeout: float = REPLY_TIMEOUT_SECONDS) -> T | None:
        """Something of the table, for people; None where the disk does not answer in time."""
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                if self._index is not None:
                    answer.set_result(query(self._index))
                    return
                answer.set_exception(Closed("disk tier"))
            except Exception as error:
                answer.set_exception(error)

        if not self._submit(reply):
            return None
        with contextlib.suppress(TimeoutError, Closed, OSError, sqlite3.Error):
            return answer.result(timeout)
        return None

    def flush(self, timeout: float = REPLY_TIMEOUT_SECONDS) -> bool:
        """Wait until everything that was offered is written; False: it is not, within that time."""
        done = threading.Event()
        return self._submit(done.set) and done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Write what is queued, for so long at most, and end."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._tasks.put_nowait(None)
        self._thread.join(timeout + 1.0)

    def _submit(self, task: Callable[[], None]) -> bool:
        if not self._thread.is_alive():  # it was closed, and nobody would ever do it
            return False
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.counters.dropped_writes += 1
            return False
        return True

    # --- the disk's thread

    def _run(self, listed: threading.Event) -> None:
        self._run_task(self._open_index)
        listed.set()
        looked = time.monotonic()
        while not (self._closing.is_set() and (self._tasks.empty() or time.monotonic() > self._deadline)):
            with contextlib.suppress(queue.Empty):
                work = self._tasks.get(timeout=POLL_INTERVAL_SECONDS)
                if work is not None:
                    self._run_task(work)
            if time.monotonic() - looked > POLL_INTERVAL_SECONDS:
                looked = time.monotonic()
                self._run_task(self._poll_index)
        if self._index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._index.close()

    def _run_task(self, task: Callable[[], None]) -> None:
        try:
            task()
        except (OSError, sqlite3.Error) as error:
            self.counters.io_errors += 1
            self._failed_at = time.monotonic()
            self._warn(f"cannot be used now: {error}")
        except Exception:  # a bug here must not end the tier in silence
            self.counters.io_errors += 1
            logger.exception("the disk tier failed")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the prefix cache in %s %s; afterglow goes on without it", self.directory, problem)

    def _open_index(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        disk_files.write_label(self._folder, self._label)
        self._index = DiskIndex(self.directory)
        self._index.reconcile()
        self._version = self._index.version
        self._report_new_files()

    def _report_new_files(self) -> None:
        """Tell the engine of files that it may not know."""
        assert self._index is not None
        for row in self._index.list_rows(self._model.hex(), self._last_row_number):
            self._last_row_number = max(self._last_row_number, row.number)
            self._events.put(FileAdded(row))

    def _poll_index(self) -> None:
        """See what other processes wrote."""
        if self._index is None:
            if not self._is_backing_off:
                self._open_index()
        elif (version := self._index.version) != self._version:
            self._version = version
            self._report_new_files()

    @property
    def _is_backing_off(self) -> bool:
        """Whether the disk refused a moment ago."""
        return self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_AFTER_SECONDS

    def _with_index(self, task: Callable[[DiskIndex], None]) -> None:
        if self._index is not None and not self._is_backing_off:
            task(self._index)

    def _write_file(self, kind: FileKind, key: bytes) -> None:
        self._queued_names.discard(build_file_name(kind, key))
        if self._index is None or self._is_backing_off:
            self.counters.dropped_writes += 1
            return
        item = self._build_file(kind, key)
        if item is None or (self._folder / item.name).exists():  # somebody else was faster
            return
        size = sum(len(part) for part in item.payload) + 8 * len(item.entries) + len(item.layout) + 512
        if not self._evict_until_free(self._index, size):
            self.counters.dropped_writes += 1
            return
        nbytes = disk_files.write_file(self._folder, item)
        self._index.add(item, nbytes, pinned=item.pinned)
        self.counters.written_files += 1
        self.counters.written_bytes += nbytes
        self._report_new_files()

    def _evict_until_free(self, index: DiskIndex, nbytes: int) -> bool:
        if nbytes > self.limit:
            return False
        self._enforce_pin_limit(index)
        while (total := index.count_bytes()) + nbytes > self.limit:
            too_much = total + nbytes - self.limit
            worst = index.find_eviction_candidates(EVICTION_BATCH_FILES)
            if not worst:
                return False
            for row in worst:
                if too_much <= 0:
                    break
                too_much -= self._evict_file(index, row)
        return True

    def _enforce_pin_limit(self, index: DiskIndex) -> None:
        """Pinned files have a share of the limit; beyond it those not used for longest are as the rest."""
        while index.count_bytes(pinned_only=True) > self.limit * MAX_PINNED_FRACTION:
            index.pin([row.name for row in index.find_lru_pinned(EVICTION_BATCH_FILES)], pinned=False)

    def _evict_file(self, index: DiskIndex, row: IndexRow) -> int:
        """Remove a file and all that is of no use without it; the bytes that are free now."""
        freed, waiting = 0, [row]
        while waiting:
            one = waiting.pop()
            if not one.pinned or one is row:
                waiting += index.find_dependents(one)
                (self.directory / one.model / one.name).unlink(missing_ok=True)
                index.remove([one.name])
                freed += one.nbytes
                self.counters.evictions += 1
                if one.model == self._model.hex():
                    self._events.put(FileRemoved(one.kind, one.key))
        return freed

    def _evict_all(self, index: DiskIndex) -> None:
        for row in index.list_rows(self._model.hex()):
            self._evict_file(index, row)

    def _delete_files(self, names: list[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        if self._index is not None:
            self._index.remove(names)
