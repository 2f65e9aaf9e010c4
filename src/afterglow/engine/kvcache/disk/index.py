"""Index of the disk tier: an SQLite table of all files. It is a cache of their headers and is rebuilt if it is lost.

Only a damaged table is deleted. If the disk is full or fails, the table stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.files import CacheFile, FileKind
from afterglow.engine.kvcache.eviction import HALF_LIFE_SECONDS, compute_log_value
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.errors import InvalidArgument, InvalidState

INDEX_FILE_NAME = "index.sqlite3"
INDEX_FILE_SUFFIXES = ("", "-journal", "-wal", "-shm")  # the last two are of older versions
DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: other columns
LOCK_TIMEOUT_SECONDS = 10.0  # for locks of other processes
SQLITE_CACHE_KIB = 512  # small: the page cache of the system holds the rest, and can be reclaimed
PINNED_FOREVER = 1
PINNED_CONDITION = f"(pinned = {PINNED_FOREVER} OR pinned > ?)"  # the parameter is the time
STALE_AFTER_SECONDS = 3600.0  # after this time, remove a temporary file even if its process is alive
SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE, model TEXT NOT NULL, kind TEXT NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL,
    start INTEGER NOT NULL, entries BLOB NOT NULL, cells INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, seconds REAL NOT NULL, value REAL NOT NULL, last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS items_by_parent ON items (parent);
CREATE INDEX IF NOT EXISTS items_by_pin ON items (pinned, nbytes);
"""
logger = logging.getLogger("afterglow.engine.kvcache.disk.index")
COLUMNS = "number, name, model, kind, key, parent, start, entries, cells, nbytes, seconds, last_used, hits, pinned"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexRow:
    """Row of the index: one file. The `entries` of a checkpoint are those after the last full block before it."""

    number: int
    name: str
    model: str
    kind: FileKind
    key: bytes
    parent: bytes
    start: int
    entries: Entries
    cells: int
    nbytes: int
    seconds: float
    last_used: float
    hits: int
    pinned: int  # 0, `PINNED_FOREVER`, or the wall-clock time until which it is pinned

    @property
    def is_pinned(self) -> bool:
        return self.is_pinned_forever or self.pinned > time.time()

    @property
    def is_pinned_forever(self) -> bool:
        return self.pinned == PINNED_FOREVER


class DiskIndex:
    """Index of all files, of all models, in a directory. For use by one thread."""

    def __init__(self, directory: Path, *, in_memory: bool = False) -> None:
        """With `in_memory`, the index is a temporary one that is built from the files."""
        self._directory = directory
        self._path = directory / INDEX_FILE_NAME
        self.in_memory = in_memory
        if in_memory:
            self._connection = self._connect(":memory:")
            self.reconcile()
            return
        try:
            self._connection = self._connect(self._path)
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            if not is_damage(error):
                raise
            for suffix in INDEX_FILE_SUFFIXES:
                self._path.with_name(f"{INDEX_FILE_NAME}{suffix}").unlink(missing_ok=True)
            self._connection = self._connect(self._path)
            self.reconcile()

    def _connect(self, path: Path | Literal[":memory:"]) -> sqlite3.Connection:
        if isinstance(path, Path):
            # SQLite creates its other files with the same mode. A file that exists must not be opened here: closing it
            # would release the locks of other connections of this process.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            self._file_identity = _identify(path.stat())
        connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            # No WAL: its shared memory is a mapped file, and it is not for network file systems. Without syncs, a power
            # failure may damage the index, which is then rebuilt.
            with contextlib.suppress(sqlite3.OperationalError):  # an older version is using it with a WAL
                connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA cache_size = -{SQLITE_CACHE_KIB}")
            connection.executescript(SCHEMA)
            columns = [column[0] for column in connection.execute("SELECT * FROM items LIMIT 0").description]
            if "aligned" in columns:  # of version 0.1
                connection.execute("ALTER TABLE items DROP COLUMN aligned")
            for values in connection.execute(f"SELECT {COLUMNS} FROM items"):  # damage in any page shows here
                _build_row(*values)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_current(self) -> bool:
        """Whether the file of the index is the one that was opened. False if it was deleted or replaced."""
        if self.in_memory:
            return True
        try:
            return _identify(self._path.stat()) == self._file_identity
        except OSError:
            return False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Exclude changes by other processes. They add and remove files of the directory in transactions only."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._connection.close()

    @property
    def version(self) -> int:
        """Number that changes when another process changes the index."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def count_bytes(self, *, pinned_only: bool = False) -> int:
        """Return the total size of all files, or of the pinned ones."""
        query, parameters = "SELECT COALESCE(SUM(nbytes), 0) FROM items", list[float]()
        if pinned_only:
            query, parameters = f"{query} WHERE {PINNED_CONDITION}", [time.time()]
        return int(self._connection.execute(query, parameters).fetchone()[0])

    def find_lru_pinned(self, count: int) -> list[IndexRow]:
        """Return the pinned files to unpin first: those with an expiry, then the least recently used ones.

        Of equal age, those deepest in a prompt are first.
        """
        order = f"ORDER BY pinned = {PINNED_FOREVER}, last_used ASC, start DESC LIMIT ?"
        return self._select(f"WHERE {PINNED_CONDITION} {order}", time.time(), count)

    def list_rows(self, model: str | None = None, after_number: int = 0) -> list[IndexRow]:
        """Return the files of one model, or of all, with a number above `after_number`, prefixes first."""
        condition = "number > ?" + ("" if model is None else " AND model = ?")
        parameters = (after_number,) if model is None else (after_number, model)
        return self._select(f"WHERE {condition} ORDER BY start, number", *parameters)

    def _select(self, clauses: str, *parameters: object) -> list[IndexRow]:
        rows = self._connection.execute(f"SELECT {COLUMNS} FROM items {clauses}", parameters)
        return [_build_row(*values) for values in rows]

    def find_row(self, name: str) -> IndexRow | None:
        """Return the row of a file; None if it is not in the index."""
        return next(iter(self._select("WHERE name = ?", name)), None)

    def add(self, cache_file: CacheFile, nbytes: int) -> None:
        """Add a file that was written."""
        entries = cache_file.entries if cache_file.kind == "cells" else cache_file.entries[cache_file.start :]
        row = {
            "name": cache_file.name,
            "model": cache_file.model.hex(),
            "kind": cache_file.kind,
            "key": cache_file.key,
            "parent": cache_file.parent,
            "start": cache_file.start,
            "entries": entries.astype("<i8", copy=False).tobytes(),
            "cells": cache_file.cells,
            "nbytes": nbytes,
            "seconds": cache_file.seconds,
            # Rounded: small differences of measured times do not change the order of eviction.
            "value": round(compute_log_value(cache_file.value, 1)),
            "last_used": time.time(),
            "pinned": encode_pin(cache_file.pinned_until),
        }
        placeholders = ", ".join("?" * len(row))
        query = f"INSERT OR REPLACE INTO items ({', '.join(row)}) VALUES ({placeholders})"
        self._connection.execute(query, tuple(row.values()))

    def remove(self, names: Iterable[str]) -> None:
        """Remove rows. The caller has deleted the files."""
        self._execute_many("DELETE FROM items WHERE name = ?", [(name,) for name in names])

    def _execute_many(self, statement: str, parameters: list[tuple[object, ...]]) -> None:
        """Execute a statement for each of the parameters, in one transaction."""
        if parameters and not self._connection.in_transaction:
            with self.transaction():
                self._connection.executemany(statement, parameters)
        elif parameters:
            self._connection.executemany(statement, parameters)

    def touch(self, names: Iterable[str]) -> None:
        """Record the use of files."""
        now = time.time()
        statement = "UPDATE items SET last_used = ?, hits = hits + 1 WHERE name = ?"
        self._execute_many(statement, [(now, name) for name in names])

    def pin(self, names: Iterable[str], *, until: float) -> None:
        """Pin files until a wall-clock time, or unpin them (0). The files have their pins, too."""
        rows = [row for name in names if (row := self.find_row(name)) is not None]
        if 0.0 < until < math.inf:  # a weaker pin
            rows = [row for row in rows if not row.is_pinned_forever]
        for row in rows:
            with contextlib.suppress(FileNotFoundError):
                disk_files.write_pin(self.get_path(row), until)
        values: list[tuple[object, ...]] = [(encode_pin(until), row.name) for row in rows]
        self._execute_many("UPDATE items SET pinned = ? WHERE name = ?", values)

    def get_path(self, row: IndexRow) -> Path:
        return self._directory / row.model / row.name

    def find_eviction_candidates(self, count: int) -> list[IndexRow]:
        """Return the unpinned files with the lowest value; of equal value, those deepest in a prompt first.

        The value is the seconds saved per byte, halved with each half-life of idle time. A last use in the future,
        from before the clock was set back, becomes now; otherwise the file would outlive all others.
        """
        now = time.time()
        self._connection.execute("UPDATE items SET last_used = ? WHERE last_used > ?", (now, now))
        order = "ORDER BY value + last_used / ? ASC, start DESC LIMIT ?"
        return self._select(f"WHERE NOT {PINNED_CONDITION} {order}", now, HALF_LIFE_SECONDS, count)

    def find_dependents(self, row: IndexRow) -> list[IndexRow]:
        """Return the files that are useless without this one: its children, and checkpoints and logits inside it."""
        if row.kind != "cells":
            return []
        return self._select("WHERE parent = ?", row.key) + [
            sibling
            for sibling in self._select("WHERE parent = ?", row.parent)
            if sibling.kind != "cells"
            and 0 < len(sibling.entries) == common_prefix_length(sibling.entries, row.entries)
        ]

    def has_cells_for(self, cache_file: CacheFile) -> bool:
        """Return whether the cells before a file are on disk, as far as it needs them."""
        parent_name = cache_file.parent_name
        if parent_name is not None and not (self._directory / cache_file.model.hex() / parent_name).exists():
            return False
        if cache_file.kind == "cells" or not cache_file.needs_cells:
            return True
        rest = cache_file.entries[cache_file.start :]
        return not len(rest) or any(
            row.kind == "cells" and common_prefix_length(row.entries, rest) == len(rest)
            for row in self._select("WHERE parent = ?", cache_file.parent)
        )

    def evict(self, row: IndexRow) -> list[IndexRow]:
        """Delete a file, but first its unpinned dependents, in case this process is killed; return what was deleted."""
        with self.transaction():
            victims, pending = [row], self.find_dependents(row)
            while pending:
                dependent = pending.pop()
                if not dependent.is_pinned:
                    victims.append(dependent)
                    pending += self.find_dependents(dependent)
            for victim in reversed(victims):
                disk_files.delete_file(self.get_path(victim))
            self.remove(victim.name for victim in victims)
        return victims

    def clear(self, models: Collection[str] | None = None) -> int:
        """Delete the files of all or some models, including pinned and unlisted ones; return the freed bytes.

        This works on a full disk and beside a process that holds the lock: the files are deleted first, and rows that
        remain are removed at the next start.
        """
        try:
            with self.transaction():
                rows = [row for row in self.list_rows() if models is None or row.model in models]
                freed_bytes = self._delete_files(models, rows)
                with contextlib.suppress(sqlite3.OperationalError):
                    self.remove(row.name for row in rows)
                return freed_bytes
        except sqlite3.OperationalError:  # locked
            return self._delete_files(models, [])

    def _delete_files(self, models: Collection[str] | None, rows: list[IndexRow]) -> int:
        """Delete the files of these rows and all others of the models; return their bytes."""
        freed_bytes = 0
        listed = {self.get_path(row): None for row in reversed(rows)}  # dependents before what they need
        folders = [folder for folder in self._list_folders() if models is None or folder.name in models]
        for path in [*listed, *(path for folder in folders for path in folder.iterdir() if path not in listed)]:
            if disk_files.parse_file_name(path.name) is not None:
                with contextlib.suppress(FileNotFoundError):
                    freed_bytes += path.lstat().st_size
                disk_files.delete_file(path)
        return freed_bytes

    def reconcile(self) -> None:
        """Make the index match the files: add unlisted files, delete damaged ones, remove rows without a file.

        A file is pinned if its attributes or its row say so: the row of an older version, or the file if the row was
        lost.
        """
        listed = {(row.model, row.name): row for row in self.list_rows()}
        present = set()
        for path in [path for folder in self._list_folders() for path in folder.iterdir()]:
            if path.suffix == ".tmp":
                _remove_stale_temporary(path)
            elif disk_files.parse_file_name(path.name) is None:
                continue
            elif (row := listed.get((path.parent.name, path.name))) is None:
                self.adopt(path)
            else:
                present.add((path.parent.name, path.name))
                with contextlib.suppress(OSError):
                    if row.is_pinned_forever != (disk_files.read_pin(path) == math.inf):
                        self.pin([path.name], until=math.inf)
        self.remove(name for _, name in listed.keys() - present)

    def _list_folders(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if path.is_dir() and len(path.name) == 64]

    def adopt(self, path: Path) -> None:
        """Add an unlisted file to the index, or delete it if it is damaged."""
        try:
            file, size = disk_files.read_header(path)
            if file.model.hex() != path.parent.name:
                raise InvalidState("it is in the folder of another model")
        except InvalidState:
            with contextlib.suppress(OSError):
                path.unlink()
        except OSError:
            pass  # evicted by another process, or the disk fails, which does not mean that the file is damaged
        else:
            self.add(file, size)


@contextlib.contextmanager
def open_index(directory: Path) -> Iterator[DiskIndex]:
    """Open the index of a directory without an engine; `InvalidArgument` if it does not exist or is not private."""
    if not directory.is_dir():
        raise InvalidArgument("directory", f"{directory} does not exist")
    disk_files.prepare_directory(directory)
    try:
        index = DiskIndex(directory)
    except (OSError, sqlite3.Error) as error:  # e.g. the disk is full, which is when a cache is cleared
        logger.warning("the index in %s cannot be opened (%s): the files are listed instead", directory, error)
        index = DiskIndex(directory, in_memory=True)
    try:
        yield index
    finally:
        index.close()


def is_damage(error: Exception) -> bool:
    """Return whether an error shows that the table is damaged or of another version, not that the disk fails."""
    if not isinstance(error, sqlite3.Error):
        return True  # a value of a wrong type
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE_CODES  # extended codes have the kind in the low byte


def encode_pin(until: float) -> int:
    """Return the value of the column `pinned` for a pin that ends at a wall-clock time.

    >>> encode_pin(0.0), encode_pin(math.inf), encode_pin(1_000_000_000.5)
    (0, 1, 1000000001)
    """
    return PINNED_FOREVER if until == math.inf else math.ceil(until)


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _build_row(*values: object) -> IndexRow:
    columns = dict(zip(COLUMNS.split(", "), values, strict=True))
    entries = np.frombuffer(columns.pop("entries"), dtype="<i8").astype(np.int64)  # type: ignore[call-overload]
    return IndexRow(entries=entries, **columns)  # type: ignore[arg-type]


def _remove_stale_temporary(path: Path) -> None:
    """Remove a temporary file whose writer has ended."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(path.name.split(".")[-3])
        if not psutil.pid_exists(pid) or time.time() - path.stat().st_mtime > STALE_AFTER_SECONDS:
            path.unlink()
