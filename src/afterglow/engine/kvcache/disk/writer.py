"""Disk writer: a thread that writes blocks and checkpoints in the background, evicts files, and owns the index.

Disk problems never fail a request: a write that cannot be queued is dropped, a failed write leaves no file, and a file
that cannot be read is a prefix miss. Files are read by other threads, without the writer.
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
from afterglow.engine.kvcache.ram import MAX_PINNED_FRACTION
from afterglow.errors import Closed, InvalidState

ResultT = TypeVar("ResultT")
MAX_QUEUED_TASKS = 4096  # tasks hold keys, not data
LISTING_TIMEOUT_SECONDS = 5.0  # how long the start waits for the list of files
REPLY_TIMEOUT_SECONDS = 10.0  # how long index queries and `flush` wait
RETRY_AFTER_SECONDS = 60.0  # pause after an I/O error
POLL_INTERVAL_SECONDS = 1.0  # for files that other processes wrote
EVICTION_BATCH_FILES = 16
logger = logging.getLogger("afterglow.engine.kvcache.disk.writer")


@dataclass(frozen=True, slots=True)
class FileAdded:
    """A file was written, or found in the directory."""

    row: IndexRow


@dataclass(frozen=True, slots=True)
class FileRemoved:
    """A file was evicted."""

    kind: FileKind
    key: bytes


FileEvent: TypeAlias = FileAdded | FileRemoved
FileBuilder: TypeAlias = Callable[[FileKind, bytes], CacheFile | None]


@dataclass(slots=True)
class DiskCounters:
    """Totals of the disk writer since it started."""

    written_files: int = 0
    written_bytes: int = 0
    dropped_writes: int = 0  # the queue was full, the disk was failing, or there was no space
    evictions: int = 0
    corrupt_files: int = 0  # files that failed a check and were removed
    io_errors: int = 0


class DiskWriter:
    """Writes the files of one model to a directory that any number of processes may share.

    `build_file` returns the file to write, on the writer's thread; None if its contents have left RAM meanwhile.
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
        self._last_row_number = 0  # largest index row number reported so far
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
            self._warn("is slow; its files are used as soon as they are listed")

    # --- called by the engine's thread; only `load`, `query_index`, `flush` and `close` wait for the disk

    def drain_events(self) -> list[FileEvent]:
        """Return the file events since the last call."""
        events: list[FileEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def enqueue(self, kind: FileKind, key: bytes) -> None:
        """Queue the block or checkpoint with this key for writing."""
        name = build_file_name(kind, key)
        if name not in self._queued_names:
            self._queued_names.add(name)
            if not self._submit(functools.partial(self._write_file, kind, key)):
                self._queued_names.discard(name)

    def touch(self, names: Iterable[str]) -> None:
        """Record the use of files."""
        self._submit(functools.partial(self._with_index, lambda index: index.touch(list(names))))

    def pin(self, names: Iterable[str], *, pinned: bool) -> None:
        """Pin or unpin files."""
        self._submit(functools.partial(self._with_index, lambda index: index.pin(list(names), pinned=pinned)))

    def remove(self, kind: FileKind, key: bytes) -> None:
        """Delete a file."""
        self._submit(functools.partial(self._delete_files, [build_file_name(kind, key)]))

    def clear(self) -> None:
        """Delete every file of this model."""
        self._submit(functools.partial(self._with_index, self._evict_all))

    def load(self, kind: FileKind, key: bytes) -> LoadedFile:
        """Read and check a file. Thread-safe. Raise `InvalidState`, and delete the file, if it is damaged."""
        path = self._folder / build_file_name(kind, key)
        try:
            loaded = disk_files.load_file(path)
            if (loaded.file.kind, loaded.file.key, loaded.file.model) != (kind, key, self._model):
                raise InvalidState("it belongs to another model")
        except (InvalidState, OSError, ValueError) as error:
            self.counters.corrupt_files += not isinstance(error, FileNotFoundError)
            self.remove(kind, key)
            raise InvalidState(f"{path.name}: {error}") from error
        return loaded

    def query_index(
        self, query: Callable[[DiskIndex], ResultT], timeout: float = REPLY_TIMEOUT_SECONDS
    ) -> ResultT | None:
        """Run a query on the index; return None if it fails or takes longer than `timeout` seconds."""
        future: Future[ResultT] = Future()

        def reply() -> None:
            try:
                if self._index is not None:
                    future.set_result(query(self._index))
                    return
                future.set_exception(Closed("disk tier"))
            except Exception as error:
                future.set_exception(error)

        if not self._submit(reply):
            return None
        with contextlib.suppress(TimeoutError, Closed, OSError, sqlite3.Error):
            return future.result(timeout)
        return None

    def flush(self, timeout: float = REPLY_TIMEOUT_SECONDS) -> bool:
        """Wait until everything in the queue is written; return False if it is not within `timeout` seconds."""
        done = threading.Event()
        return self._submit(done.set) and done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Write what is queued, for at most `timeout` seconds, and stop the thread."""
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._tasks.put_nowait(None)
        self._thread.join(timeout + 1.0)

    def _submit(self, task: Callable[[], None]) -> bool:
        if not self._thread.is_alive():  # closed: the task would never run
            return False
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.counters.dropped_writes += 1
            return False
        return True

    # --- the writer's thread

    def _run(self, listed: threading.Event) -> None:
        self._run_task(self._open_index)
        listed.set()
        last_poll = time.monotonic()
        while not (self._closing.is_set() and (self._tasks.empty() or time.monotonic() > self._deadline)):
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(timeout=POLL_INTERVAL_SECONDS)
                if task is not None:
                    self._run_task(task)
            if time.monotonic() - last_poll > POLL_INTERVAL_SECONDS:
                last_poll = time.monotonic()
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
            self._warn(f"failed: {error}")
        except Exception:  # a bug must not stop the thread silently
            self.counters.io_errors += 1
            logger.exception("unexpected error in the disk cache")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("disk cache in %s %s; requests continue without it", self.directory, problem)

    def _open_index(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        disk_files.write_label(self._folder, self._label)
        self._index = DiskIndex(self.directory)
        self._index.reconcile()
        self._version = self._index.version
        self._report_new_files()

    def _report_new_files(self) -> None:
        """Send events for index rows that were not reported yet."""
        assert self._index is not None
        for row in self._index.list_rows(self._model.hex(), self._last_row_number):
            self._last_row_number = max(self._last_row_number, row.number)
            self._events.put(FileAdded(row))

    def _poll_index(self) -> None:
        """Report files that other processes wrote; open the index if that failed before."""
        if self._index is None:
            if not self._is_backing_off:
                self._open_index()
        elif (version := self._index.version) != self._version:
            self._version = version
            self._report_new_files()

    @property
    def _is_backing_off(self) -> bool:
        """Whether an I/O error was less than `RETRY_AFTER_SECONDS` ago."""
        return self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_AFTER_SECONDS

    def _with_index(self, task: Callable[[DiskIndex], None]) -> None:
        if self._index is not None and not self._is_backing_off:
            task(self._index)

    def _write_file(self, kind: FileKind, key: bytes) -> None:
        self._queued_names.discard(build_file_name(kind, key))
        if self._index is None or self._is_backing_off:
            self.counters.dropped_writes += 1
            return
        file = self._build_file(kind, key)
        if file is None or (self._folder / file.name).exists():  # another process has written it
            return
        max_bytes = sum(len(part) for part in file.payload) + 8 * len(file.entries) + len(file.layout) + 512
        if not self._evict_until_free(self._index, max_bytes):
            self.counters.dropped_writes += 1
            return
        nbytes = disk_files.write_file(self._folder, file)
        self._index.add(file, nbytes, pinned=file.pinned)
        self.counters.written_files += 1
        self.counters.written_bytes += nbytes
        self._report_new_files()

    def _evict_until_free(self, index: DiskIndex, nbytes: int) -> bool:
        """Evict files by lowest value until `nbytes` fit within the limit; return False if that is not possible."""
        if nbytes > self.limit:
            return False
        self._enforce_pin_limit(index)
        while (total := index.count_bytes()) + nbytes > self.limit:
            excess = total + nbytes - self.limit
            candidates = index.find_eviction_candidates(EVICTION_BATCH_FILES)
            if not candidates:
                return False
            for row in candidates:
                if excess <= 0:
                    break
                excess -= self._evict_file(index, row)
        return True

    def _enforce_pin_limit(self, index: DiskIndex) -> None:
        """Unpin the least recently used files while pinned files exceed their share of the limit."""
        while index.count_bytes(pinned_only=True) > self.limit * MAX_PINNED_FRACTION:
            index.pin([row.name for row in index.find_lru_pinned(EVICTION_BATCH_FILES)], pinned=False)

    def _evict_file(self, index: DiskIndex, row: IndexRow) -> int:
        """Delete a file and its dependents, except pinned ones; return the number of bytes freed."""
        freed, pending = 0, [row]
        while pending:
            victim = pending.pop()
            if not victim.pinned or victim is row:
                pending += index.find_dependents(victim)
                (self.directory / victim.model / victim.name).unlink(missing_ok=True)
                index.remove([victim.name])
                freed += victim.nbytes
                self.counters.evictions += 1
                if victim.model == self._model.hex():
                    self._events.put(FileRemoved(victim.kind, victim.key))
        return freed

    def _evict_all(self, index: DiskIndex) -> None:
        for row in index.list_rows(self._model.hex()):
            self._evict_file(index, row)

    def _delete_files(self, names: list[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        if self._index is not None:
            self._index.remove(names)
