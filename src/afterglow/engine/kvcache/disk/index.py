"""Index of the disk tier: an SQLite table of all files. It is a cache of their headers and is rebuilt if it is lost."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.files import CacheFile, FileKind
from afterglow.engine.kvcache.ram import STORED_HALF_LIFE_SECONDS
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.errors import InvalidArgument, InvalidState

INDEX_FILE_NAME = "index.sqlite3"
LOCK_TIMEOUT_SECONDS = 10.0  # for locks of other processes
SQLITE_CACHE_KIB = 512  # small: the page cache of the system holds the rest, and can be reclaimed
STALE_AFTER_SECONDS = 3600.0  # after this time, remove a temporary file even if its process is alive
SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE, model TEXT NOT NULL, kind TEXT NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL,
    start INTEGER NOT NULL, entries BLOB NOT NULL, aligned INTEGER NOT NULL, cells INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, seconds REAL NOT NULL, value REAL NOT NULL, last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS items_by_parent ON items (parent);
"""
COLUMNS = (
    "number, name, model, kind, key, parent, start, entries, aligned, cells, nbytes, seconds, last_used, hits, pinned"
)


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
    aligned: int
    cells: int
    nbytes: int
    seconds: float
    last_used: float
    hits: int
    pinned: bool


class DiskIndex:
    """Index of all files, of all models, in a directory. For use by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError:  # damaged or of another version: rebuild it from the files
            for suffix in ("", "-wal", "-shm"):
                (self._directory / f"{INDEX_FILE_NAME}{suffix}").unlink(missing_ok=True)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        path = self._directory / INDEX_FILE_NAME
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite creates its other files with the same mode
        connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA cache_size = -{SQLITE_CACHE_KIB}")
            connection.executescript(SCHEMA)
            connection.execute(f"SELECT {COLUMNS} FROM items LIMIT 1").fetchall()
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._connection.close()

    @property
    def version(self) -> int:
        """Number that changes when another process changes the index."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def count_bytes(self, *, pinned_only: bool = False) -> int:
        """Return the total size of all files, or of the pinned ones."""
        query = "SELECT COALESCE(SUM(nbytes), 0) FROM items" + (" WHERE pinned = 1" if pinned_only else "")
        return int(self._connection.execute(query).fetchone()[0])

    def find_lru_pinned(self, count: int) -> list[IndexRow]:
        """Return the least recently used pinned files; of equal age, those deepest in a prompt first."""
        query = f"SELECT {COLUMNS} FROM items WHERE pinned = 1 ORDER BY last_used ASC, start DESC LIMIT ?"
        return [_build_row(*values) for values in self._connection.execute(query, (count,))]

    def list_rows(self, model: str | None = None, after_number: int = 0) -> list[IndexRow]:
        """Return the files of one model, or of all, with a number above `after_number`, prefixes first."""
        condition = "number > ?" + ("" if model is None else " AND model = ?")
        parameters = (after_number,) if model is None else (after_number, model)
        query = f"SELECT {COLUMNS} FROM items WHERE {condition} ORDER BY start, number"
        return [_build_row(*values) for values in self._connection.execute(query, parameters)]

    def add(self, cache_file: CacheFile, nbytes: int, *, pinned: bool = False) -> None:
        """Add a file that was written."""
        entries = cache_file.entries if cache_file.kind == "cells" else cache_file.entries[cache_file.start :]
        value = round(math.log2(cache_file.value)) if 0 < cache_file.value < math.inf else -100
        row = {
            "name": cache_file.name,
            "model": cache_file.model.hex(),
            "kind": cache_file.kind,
            "key": cache_file.key,
            "parent": cache_file.parent,
            "start": cache_file.start,
            "entries": entries.astype("<i8", copy=False).tobytes(),
            "aligned": cache_file.aligned,
            "cells": cache_file.cells,
            "nbytes": nbytes,
            "seconds": cache_file.seconds,
            "value": value,
            "last_used": time.time(),
            "pinned": int(pinned),
        }
        placeholders = ", ".join("?" * len(row))
        query = f"INSERT OR REPLACE INTO items ({', '.join(row)}) VALUES ({placeholders})"
        self._connection.execute(query, tuple(row.values()))

    def remove(self, names: Iterable[str]) -> None:
        self._connection.executemany("DELETE FROM items WHERE name = ?", [(name,) for name in names])

    def touch(self, names: Iterable[str]) -> None:
        """Record the use of files."""
        now = time.time()
        self._connection.executemany(
            "UPDATE items SET last_used = ?, hits = hits + 1 WHERE name = ?", [(now, name) for name in names]
        )

    def pin(self, names: Iterable[str], *, pinned: bool) -> None:
        self._connection.executemany(
            "UPDATE items SET pinned = ? WHERE name = ?", [(int(pinned), name) for name in names]
        )

    def find_eviction_candidates(self, count: int) -> list[IndexRow]:
        """Return the unpinned files with the lowest value; of equal value, those deepest in a prompt first.

        The value is the seconds saved per byte, halved with each half-life of idle time.
        """
        rows = self._connection.execute(
            f"SELECT {COLUMNS} FROM items WHERE pinned = 0 ORDER BY value + last_used / ? ASC, start DESC LIMIT ?",
            (STORED_HALF_LIFE_SECONDS, count),
        )
        return [_build_row(*values) for values in rows]

    def find_dependents(self, row: IndexRow) -> list[IndexRow]:
        """Return the files that are useless without this one: its children, and the checkpoints inside it."""
        if row.kind == "state":
            return []
        query = f"SELECT {COLUMNS} FROM items WHERE parent = ?"
        children = [_build_row(*values) for values in self._connection.execute(query, (row.key,))]
        siblings = [
            _build_row(*values) for values in self._connection.execute(query + " AND kind = 'state'", (row.parent,))
        ]
        return children + [
            sibling
            for sibling in siblings
            if 0 < len(sibling.entries) == common_prefix_length(sibling.entries, row.entries)
        ]

    def reconcile(self) -> None:
        """Make the index match the files: add unlisted files, delete damaged ones, remove rows without a file."""
        listed = {(row.model, row.name) for row in self.list_rows()}
        present = set()
        for path in [path for folder in self._list_folders() for path in folder.iterdir()]:
            if path.suffix == ".tmp":
                _remove_stale_temporary(path)
            elif disk_files.parse_file_name(path.name) is None:
                continue
            elif (path.parent.name, path.name) in listed or self._adopt_file(path):
                present.add((path.parent.name, path.name))
        self.remove(name for _, name in listed - present)

    def _list_folders(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if path.is_dir() and len(path.name) == 64]

    def _adopt_file(self, path: Path) -> bool:
        """Add an unlisted file to the index, or delete it if it is damaged; return whether it was added."""
        try:
            file, size = disk_files.read_header(path)
            if file.model.hex() != path.parent.name:
                raise InvalidState("it is in the folder of another model")
        except FileNotFoundError:
            return False
        except (InvalidState, OSError):
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        self.add(file, size)
        return True


@contextlib.contextmanager
def open_index(directory: Path) -> Iterator[DiskIndex]:
    """Open the index of a directory without an engine.

    Raise `InvalidArgument` if the directory does not exist or other users could read or change it.
    """
    if not directory.is_dir():
        raise InvalidArgument("directory", f"{directory} does not exist")
    disk_files.prepare_directory(directory)
    try:
        index = DiskIndex(directory)
    except (OSError, sqlite3.Error) as error:
        raise InvalidState(f"the index in {directory} cannot be read: {error}") from error
    try:
        yield index
    finally:
        index.close()


def _build_row(*values: object) -> IndexRow:
    columns = dict(zip(COLUMNS.split(", "), values, strict=True))
    entries = np.frombuffer(columns.pop("entries"), dtype="<i8").astype(np.int64)  # type: ignore[call-overload]
    return IndexRow(entries=entries, **columns)  # type: ignore[arg-type]


def _remove_stale_temporary(path: Path) -> None:
    """Remove a temporary file whose writer has ended."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(path.name.split(".")[-3])
        if not _is_alive(pid) or time.time() - path.stat().st_mtime > STALE_AFTER_SECONDS:
            path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
