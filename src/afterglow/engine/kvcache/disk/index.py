"""What is on disk, as a table that can be lost: every file says what it is, and the table is made again from them."""

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
LOCK_TIMEOUT_SECONDS = 10.0  # seconds to wait for another process
SQLITE_CACHE_KIB = (
    512  # KiB of the table that a process holds; the system has the rest, and takes it back when it has to
)
STALE_AFTER_SECONDS = 3600.0  # seconds after which a half-written file of a process that lives is given up
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
    """One file, as the table knows it. Of a checkpoint `ids` are those after the last whole segment before it."""

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
    """The table over all models in a directory. For one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError:  # damaged, or something else: the files know everything
            for suffix in ("", "-wal", "-shm"):
                (self._directory / f"{INDEX_FILE_NAME}{suffix}").unlink(missing_ok=True)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        path = self._directory / INDEX_FILE_NAME
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # sqlite gives its other files the same mode
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
        """Another number after another process changed the table."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def count_bytes(self, *, pinned_only: bool = False) -> int:
        """Bytes of all files, or of pinned ones."""
        query = "SELECT COALESCE(SUM(nbytes), 0) FROM items" + (" WHERE pinned = 1" if pinned_only else "")
        return int(self._connection.execute(query).fetchone()[0])

    def find_lru_pinned(self, count: int) -> list[IndexRow]:
        """The pinned files that were not used for longest; the ends of conversations first."""
        query = f"SELECT {COLUMNS} FROM items WHERE pinned = 1 ORDER BY last_used ASC, start DESC LIMIT ?"
        return [_build_row(*values) for values in self._connection.execute(query, (count,))]

    def list_rows(self, model: str | None = None, after_number: int = 0) -> list[IndexRow]:
        """The files of one model, or all, whose numbers are larger than `after`, beginnings first."""
        condition = "number > ?" + ("" if model is None else " AND model = ?")
        values = (after_number,) if model is None else (after_number, model)
        query = f"SELECT {COLUMNS} FROM items WHERE {condition} ORDER BY start, number"
        return [_build_row(*found) for found in self._connection.execute(query, values)]

    def add(self, cache_file: CacheFile, nbytes: int, *, pinned: bool = False) -> None:
        """Note a file that is in place now."""
        entries = cache_file.entries if cache_file.kind == "cells" else cache_file.entries[cache_file.start :]
        value = round(math.log2(cache_file.value)) if 0 < cache_file.value < math.inf else -100
        self._connection.execute(
            "INSERT OR REPLACE INTO items (name, model, kind, key, parent, start, entries, aligned, cells, nbytes, seconds,"
            " value, last_used, pinned) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                cache_file.name, cache_file.model.hex(), cache_file.kind, cache_file.key, cache_file.parent, cache_file.start,
                entries.astype("<i8", copy=False).tobytes(), cache_file.aligned, cache_file.cells, nbytes, cache_file.seconds, value,
                time.time(), int(pinned),
            ),
        )  # fmt: skip

    def remove(self, names: Iterable[str]) -> None:
        self._connection.executemany("DELETE FROM items WHERE name = ?", [(name,) for name in names])

    def touch(self, names: Iterable[str]) -> None:
        """Note that files were used."""
        now = time.time()
        self._connection.executemany(
            "UPDATE items SET last_used = ?, hits = hits + 1 WHERE name = ?", [(now, name) for name in names]
        )

    def pin(self, names: Iterable[str], *, pinned: bool) -> None:
        self._connection.executemany(
            "UPDATE items SET pinned = ? WHERE name = ?", [(int(pinned), name) for name in names]
        )

    def find_eviction_candidates(self, count: int) -> list[IndexRow]:
        """The files that are worth least: seconds saved per byte, half of it every half-life; the ends go first."""
        found = self._connection.execute(
            f"SELECT {COLUMNS} FROM items WHERE pinned = 0 ORDER BY value + last_used / ? ASC, start DESC LIMIT ?",
            (STORED_HALF_LIFE_SECONDS, count),
        )
        return [_build_row(*values) for values in found]

    def find_dependents(self, row: IndexRow) -> list[IndexRow]:
        """The files that are of no use without this one: what builds on it, and the checkpoints inside it."""
        if row.kind == "state":
            return []
        query = f"SELECT {COLUMNS} FROM items WHERE parent = ?"
        found = [_build_row(*values) for values in self._connection.execute(query, (row.key,))]
        beside = [
            _build_row(*values) for values in self._connection.execute(query + " AND kind = 'state'", (row.parent,))
        ]
        found += [one for one in beside if 0 < len(one.entries) == common_prefix_length(one.entries, row.entries)]
        return found

    def reconcile(self) -> None:
        """Make table and files agree: take in what is not listed, remove what is broken, forget what is gone."""
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
        try:
            item, size = disk_files.read_header(path)
            if item.model.hex() != path.parent.name:
                raise InvalidState("it lies in the folder of another model")
        except FileNotFoundError:
            return False
        except (InvalidState, OSError):
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        self.add(item, size)
        return True


@contextlib.contextmanager
def open_index(directory: Path) -> Iterator[DiskIndex]:
    """The table of a directory, for somebody without an engine. One that others could read or change is refused."""
    if not directory.is_dir():
        raise InvalidArgument("directory", f"{directory} is not there")
    disk_files.prepare_directory(directory)
    try:
        index = DiskIndex(directory)
    except (OSError, sqlite3.Error) as error:
        raise InvalidState(f"the table in {directory} cannot be read: {error}") from error
    try:
        yield index
    finally:
        index.close()


def _build_row(*values: object) -> IndexRow:
    named = dict(zip(COLUMNS.split(", "), values, strict=True))
    entries = np.frombuffer(named.pop("entries"), dtype="<i8").astype(np.int64)  # type: ignore[call-overload]
    return IndexRow(entries=entries, **named)  # type: ignore[arg-type]


def _remove_stale_temporary(path: Path) -> None:
    """Remove a half-written file whose writer is gone."""
    with contextlib.suppress(OSError, ValueError):
        writer = int(path.name.split(".")[-3])
        if not _is_alive(writer) or time.time() - path.stat().st_mtime > STALE_AFTER_SECONDS:
            path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
