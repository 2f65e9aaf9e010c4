"""Disk writer: a thread that writes blocks and checkpoints in the background, evicts files, and owns the index.

Writes wait until the engine is idle, because they compete with its decodes for the cores, but only for some seconds:
what is not written is lost in a crash.

Disk problems never fail a request: a write that cannot be queued is dropped, a failed write leaves no file, and a file
that cannot be read is a prefix miss. Files are read by other threads, without the writer.

Other processes may add and remove files at any time. The writer reports both as events. It never writes a file without
the files before it: it writes those again if they are in RAM, otherwise it drops the write.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.files import CacheFile, FileKind, LoadedFile, build_file_name, parse_file_name
from afterglow.engine.kvcache.disk.index import DiskIndex, IndexRow, is_damage
from afterglow.engine.kvcache.eviction import MAX_PINNED_FRACTION, choose_victims
from afterglow.errors import InvalidArgument, InvalidState

MAX_QUEUED_TASKS = 4096  # tasks hold keys, not data
IDLE_AFTER_SECONDS = 0.25  # without a running request: the next one of an agent comes sooner
MAX_DELAY_SECONDS = 5.0  # of a write while requests run
IDLE_POLL_SECONDS = 0.05  # interval of the checks whether the engine is idle
LISTING_TIMEOUT_SECONDS = 5.0  # how long the start waits for the list of files
FLUSH_TIMEOUT_SECONDS = 10.0  # how long `flush` waits
RETRY_AFTER_SECONDS = 60.0  # pause after an I/O error
MAX_TASK_ATTEMPTS = 5  # while the folder is being deleted
POLL_INTERVAL_SECONDS = 1.0  # for files that other processes wrote
SHARED_POLL_INTERVAL_SECONDS = 0.1  # the same if they write them for this one: see `EngineSettings.write_through`
EVICTION_BATCH_FILES = 16
DAMAGE_ERRNOS = (errno.ELOOP, errno.EACCES, errno.EPERM)  # not a file of ours; other errors may pass
logger = logging.getLogger("afterglow.engine.kvcache.disk.writer")


@dataclass(frozen=True, slots=True)
class FileAdded:
    """A file was written, or found in the directory."""

    row: IndexRow


@dataclass(frozen=True, slots=True)
class FileRemoved:
    """A file was deleted, by this or another process."""

    kind: FileKind
    key: bytes


FileEvent: TypeAlias = FileAdded | FileRemoved


class FileSource(Protocol):
    """Has the contents of the files to write."""

    def build_file(self, kind: FileKind, key: bytes) -> CacheFile | None:
        """Return a file, on the writer's thread; None if its contents have left RAM meanwhile."""


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    """A file that waits to be written, and until when at most."""

    nbytes: int
    due: float


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
    """Writes the files of one model to a directory that any number of processes may share."""

    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        model: bytes,
        source: FileSource,
        max_waiting_bytes: float,
        label: str = "",
        is_shared: bool = False,
    ) -> None:
        """Writes wait for an idle engine while there are at most `max_waiting_bytes` of them.

        `is_shared`: other processes write files that this one needs soon, and need those of this one.
        """
        self._max_waiting_bytes = 0.0 if is_shared else max_waiting_bytes
        self._poll_seconds = SHARED_POLL_INTERVAL_SECONDS if is_shared else POLL_INTERVAL_SECONDS
        self.counters = DiskCounters()
        self.limit = limit
        self.directory = directory
        self._model = model
        self._folder = directory / model.hex()
        self._source = source
        self._label = label
        self._events: queue.SimpleQueue[FileEvent] = queue.SimpleQueue()
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED_TASKS)
        self.writes: dict[tuple[FileKind, bytes], QueuedWrite] = {}  # by kind and key, in their order
        self._waiting_bytes = 0  # of these writes
        self._writes_lock = threading.Lock()  # guards changes of the two above
        self._current: list[tuple[FileKind, bytes]] = []  # what is being written, and what comes after it
        self._idle_at = 0.0  # when the engine counts as idle; infinite while requests run
        self._index: DiskIndex | None = None
        self._last_row_number = 0  # largest index row number reported so far
        self._reported_names: set[str] = set()  # files that the engine knows
        self._version = 0
        self._folder_changed_at = 0  # modification time of the folder at the last search for removed files
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

    # --- called by the engine's thread; only `load`, `flush` and `close` wait for the disk

    def drain_events(self) -> list[FileEvent]:
        """Return the file events since the last call."""
        events: list[FileEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def enqueue(self, kind: FileKind, key: bytes, nbytes: int) -> None:
        """Queue the block, checkpoint or last logits with this key for writing."""
        if (kind, key) in self.writes or not self._thread.is_alive():
            return
        if len(self.writes) >= MAX_QUEUED_TASKS:
            self.counters.dropped_writes += 1
            return
        with self._writes_lock:
            self.writes[kind, key] = QueuedWrite(nbytes, due=time.monotonic() + MAX_DELAY_SECONDS)
            self._waiting_bytes += nbytes
        with contextlib.suppress(queue.Full):
            self._tasks.put_nowait(None)  # the thread may be waiting for a task

    def set_busy(self, is_busy: bool) -> None:
        """Note whether requests run."""
        self._idle_at = math.inf if is_busy else time.monotonic() + IDLE_AFTER_SECONDS

    def touch(self, names: Iterable[str]) -> None:
        """Record the use of files."""
        self._submit(functools.partial(self._with_index, lambda index: index.touch(list(names))))

    def pin(self, names: Iterable[str], *, until: float) -> None:
        """Pin files until a wall-clock time; 0 unpins them."""
        self._submit(functools.partial(self._with_index, lambda index: index.pin(list(names), until=until)))

    def remove(self, kind: FileKind, key: bytes) -> None:
        """Delete a file."""
        self._submit(functools.partial(self._delete_file, build_file_name(kind, key)))

    def remove_unfinished(self, kind: FileKind, key: bytes) -> None:
        """Delete a file if it is being written now. One that is only queued has left RAM by its turn."""
        if (kind, key) in self._current:
            self.remove(kind, key)

    def clear(self) -> None:
        """Delete every file of this model, and write none of those that are queued."""
        while self._pop_write() is not None:
            pass
        while not self._submit(self._delete_all) and self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._tasks.get_nowait()  # the queue is full of tasks that are not needed any more

    def load(self, kind: FileKind, key: bytes) -> LoadedFile:
        """Read and check a file. Thread-safe. Raise `InvalidState` if it cannot be read. Damaged files are deleted."""
        path = self._folder / build_file_name(kind, key)
        try:
            loaded = disk_files.load_file(path)
            if (loaded.file.kind, loaded.file.key, loaded.file.model) != (kind, key, self._model):
                raise InvalidState("it belongs to another model")
        except (InvalidState, OSError, ValueError, MemoryError) as error:
            is_damaged = isinstance(error, InvalidState | ValueError) or getattr(error, "errno", 0) in DAMAGE_ERRNOS
            self.counters.corrupt_files += is_damaged
            if isinstance(error, FileNotFoundError):
                self._submit(functools.partial(self._forget_file, path.name))
            elif is_damaged:
                self.remove(kind, key)
            raise InvalidState(f"{path.name}: {error}") from error
        return loaded

    def flush(self, timeout: float = FLUSH_TIMEOUT_SECONDS) -> bool:
        """Wait until everything in the queue is written, and what other processes removed is reported.

        Returns False if it is not within `timeout` seconds.
        """
        done = threading.Event()

        def write_all() -> None:
            while time.monotonic() <= self._deadline and (write := self._pop_write()) is not None:
                self._run_task(write)
            self._run_task(self._poll_index)
            done.set()

        return self._submit(write_all) and done.wait(timeout)

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
        while not (self._closing.is_set() and (self._is_done or time.monotonic() > self._deadline)):
            if (task := self._get_task()) is not None:
                self._run_task(task)
            if time.monotonic() - last_poll > self._poll_seconds:
                last_poll = time.monotonic()
                self._run_task(self._poll_index)
        if self._index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._index.close()

    @property
    def _is_done(self) -> bool:
        return self._tasks.empty() and not self.writes

    def _get_task(self) -> Callable[[], None] | None:
        """Return the next task, or a write if there is none; None after a while without both."""
        is_due = self._is_write_due()
        seconds = 0.0 if is_due else IDLE_POLL_SECONDS if self.writes else self._poll_seconds
        with contextlib.suppress(queue.Empty):
            if (task := self._tasks.get(timeout=seconds)) is not None:
                return task
        return self._pop_write() if is_due else None

    def _is_write_due(self) -> bool:
        """Whether the next write waits no longer: for an idle engine, for its time, or for more writes."""
        with self._writes_lock:
            first = next(iter(self.writes.values()), None)
            if first is None or self._closing.is_set() or self._waiting_bytes > self._max_waiting_bytes:
                return first is not None
            return time.monotonic() >= min(self._idle_at, first.due)

    def _pop_write(self) -> Callable[[], None] | None:
        """Remove the next write from the queue and return its task."""
        with self._writes_lock:
            if not self.writes:
                return None
            kind, key = next(iter(self.writes))
            self._waiting_bytes -= self.writes.pop((kind, key)).nbytes
            return functools.partial(self._write_file, kind, key)

    def _run_task(self, task: Callable[[], None]) -> None:
        """Run a task; again if the folder was deleted under it, since every task creates the folder."""
        for attempt in range(MAX_TASK_ATTEMPTS):
            try:
                return task()
            except Exception as error:
                if self._folder.exists() or attempt == MAX_TASK_ATTEMPTS - 1:
                    return self._record_error(error)

    def _record_error(self, error: Exception) -> None:
        self.counters.io_errors += 1
        if isinstance(error, sqlite3.Error) and self._index is not None and is_damage(error):
            self._index.close()
            self._index = None  # the next task opens it again, which rebuilds it
        else:
            self._failed_at = time.monotonic()
        if isinstance(error, OSError | sqlite3.Error | InvalidArgument):
            self._warn(f"failed: {error}")
        else:  # a bug must not stop the thread silently
            logger.error("unexpected error in the disk cache", exc_info=error)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("disk cache in %s %s; requests continue without it", self.directory, problem)

    def _get_index(self) -> DiskIndex | None:
        """Return the index, and open it if that is necessary; None for `RETRY_AFTER_SECONDS` after an I/O error."""
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_AFTER_SECONDS:
            return None
        if self._index is None or self._index.in_memory or not self._index.is_current:
            self._open_index()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return self._index

    def _open_index(self) -> None:
        """Open the index and report its files. If that fails, e.g. on a full disk, list the files instead."""
        try:
            disk_files.prepare_directory(self.directory)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(OSError):  # the label is not worth the cache
                disk_files.write_label(self._folder, self._label)
            index = DiskIndex(self.directory)
            try:
                index.reconcile()
            except BaseException:
                index.close()
                raise
            self._use_index(index)
        except (OSError, sqlite3.Error):
            if self._index is None:
                with contextlib.suppress(OSError, sqlite3.Error):
                    self._use_index(DiskIndex(self.directory, in_memory=True))
            raise

    def _use_index(self, index: DiskIndex) -> None:
        if self._index is not None:
            self._index.close()
        self._index, self._last_row_number = index, 0
        self._version = index.version
        self._report_new_files(index)
        self._report_removed_files(index)

    def _report_new_files(self, index: DiskIndex) -> None:
        """Send events for index rows that were not reported yet."""
        for row in index.list_rows(self._model.hex(), self._last_row_number):
            self._last_row_number = max(self._last_row_number, row.number)
            self._report_added(row)

    def _report_added(self, row: IndexRow) -> None:
        self._reported_names.add(row.name)
        self._events.put(FileAdded(row))

    def _report_removed_files(self, index: DiskIndex) -> None:
        """Send events for files that are gone, however they were removed."""
        self._folder_changed_at = self._folder.stat().st_mtime_ns
        gone = self._find_gone()
        if gone:
            index.remove(gone)
            self._report_removed(gone)

    def _find_gone(self) -> set[str]:
        """Return the names of reported files that are not in the folder any more."""
        return self._reported_names.difference(os.listdir(self._folder) if self._folder.is_dir() else ())

    def _report_removed(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._reported_names.discard(name)
            if (parsed := parse_file_name(name)) is not None:
                self._events.put(FileRemoved(*parsed))

    def _poll_index(self) -> None:
        """Report files that other processes wrote or removed; open the index if that failed before."""
        index = self._get_index()
        if index is None:
            return
        version = index.version
        if version != self._version:
            self._report_new_files(index)
        if version != self._version or self._folder.stat().st_mtime_ns != self._folder_changed_at:
            self._report_removed_files(index)
        self._version = version

    def _with_index(self, task: Callable[[DiskIndex], None]) -> None:
        index = self._get_index()
        if index is not None:
            task(index)

    def _write_file(self, kind: FileKind, key: bytes) -> None:
        """Write a file, after the files before it that are missing."""
        index = self._get_index()
        if index is None:
            self.counters.dropped_writes += 1
            return
        self._current = pending = [(kind, key)]
        while pending:
            file = self._source.build_file(*pending[-1])
            if file is None:  # it has left RAM
                if len(pending) > 1:  # neither in RAM nor on disk: the engine stores the conversation again
                    self.counters.dropped_writes += 1
                    self._report_removed_files(index)
                return
            if (self._folder / file.name).exists():  # another process has written it
                self._report_existing(index, file.name)
            elif file.parent_name is not None and not (self._folder / file.parent_name).exists():
                pending.append(("cells", file.parent))
                continue
            elif not self._write_one(index, file):
                return
            pending.pop()

    def _report_existing(self, index: DiskIndex, name: str) -> None:
        if index.find_row(name) is None:
            index.adopt(self._folder / name)
        row = index.find_row(name)
        if row is not None:
            self._report_added(row)

    def _write_one(self, index: DiskIndex, file: CacheFile) -> bool:
        """Write one file; return False if there is no space, or if the cells before it are gone."""
        max_bytes = sum(len(part) for part in file.payload) + 8 * len(file.entries) + len(file.layout) + 512
        if not self._evict_until_free(index, max_bytes) or not index.has_cells_for(file):
            self.counters.dropped_writes += 1
            return False
        path = self._folder / file.name
        temporary, nbytes = disk_files.write_temporary(self._folder, file)
        is_placed = False
        try:
            with index.transaction():
                if not index.has_cells_for(file):  # removed by another process meanwhile
                    self.counters.dropped_writes += 1
                    return False
                os.replace(temporary, path)
                is_placed = True
                index.add(file, nbytes)
        except BaseException:
            if is_placed:  # a file without a row would be in no budget
                disk_files.delete_file(path)
            raise
        finally:
            disk_files.delete_file(temporary)
        self.counters.written_files += 1
        self.counters.written_bytes += nbytes
        self._report_new_files(index)
        return True

    def _evict_until_free(self, index: DiskIndex, nbytes: int) -> bool:
        """Evict files by lowest value until `nbytes` fit within the limit; return False if that is not possible."""
        if nbytes > self.limit:
            return False
        # Unpin the least recently used files while pinned files exceed their share of the limit.
        while index.count_bytes(pinned_only=True) > self.limit * MAX_PINNED_FRACTION:
            index.pin([row.name for row in index.find_lru_pinned(EVICTION_BATCH_FILES)], until=0.0)
        while (excess := index.count_bytes() + nbytes - self.limit) > 0:
            candidates = index.find_eviction_candidates(EVICTION_BATCH_FILES)
            if not candidates:
                return False
            for row in choose_victims([(row, row.nbytes) for row in candidates], excess):
                victims = index.evict(row)
                self.counters.evictions += len(victims)
                self._report_removed(victim.name for victim in victims if victim.model == self._model.hex())
        return True

    def _delete_all(self) -> None:
        """Delete every file of this model, even if the disk has just failed."""
        if self._index is None or not self._index.is_current:
            with contextlib.suppress(OSError, sqlite3.Error):
                self._open_index()
        try:
            if self._index is not None:
                self._index.clear({self._model.hex()})
        finally:  # also if only some were deleted
            self._report_removed(self._find_gone())

    def _delete_file(self, name: str) -> None:
        """Delete a file and its row in one transaction: another process may be writing the file again."""
        with contextlib.nullcontext() if self._index is None else self._index.transaction():
            disk_files.delete_file(self._folder / name)
            if self._index is not None:
                self._index.remove([name])
        self._report_removed([name])

    def _forget_file(self, name: str) -> None:
        """Remove the row of a file that is gone, unless another process has written it again."""
        index = self._index
        with contextlib.nullcontext() if index is None else index.transaction():
            is_gone = not (self._folder / name).exists()
            if index is not None and is_gone:
                index.remove([name])
        if is_gone:
            self._report_removed([name])
        elif index is not None:
            self._report_existing(index, name)
