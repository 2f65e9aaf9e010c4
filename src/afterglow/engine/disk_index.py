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

from afterglow.engine import disk_files
from afterglow.engine.disk_files import Item, Kind
from afterglow.engine.entries import Ids, common_prefix
from afterglow.engine.ram import HALF_LIFE
from afterglow.errors import InvalidArgument, InvalidState

NAME = "index.sqlite3"
PATIENCE = 10.0  # seconds to wait for another process
CACHE = 512  # KiB of the table that a process holds; the system has the rest, and takes it back when it has to
STALE = 3600.0  # seconds after which a half-written file of a process that lives is given up
SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE, model TEXT NOT NULL, kind TEXT NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL,
    start INTEGER NOT NULL, ids BLOB NOT NULL, aligned INTEGER NOT NULL, cells INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, seconds REAL NOT NULL, worth REAL NOT NULL, used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS items_by_parent ON items (parent);
"""
COLUMNS = "number, name, model, kind, key, parent, start, ids, aligned, cells, nbytes, seconds, used, hits, pinned"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One file, as the table knows it. Of a checkpoint `ids` are those after the last whole segment before it."""

    number: int
    name: str
    model: str
    kind: Kind
    key: bytes
    parent: bytes
    start: int
    ids: Ids
    aligned: int
    cells: int
    nbytes: int
    seconds: float
    used: float
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
                (self._directory / f"{NAME}{suffix}").unlink(missing_ok=True)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        path = self._directory / NAME
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # sqlite gives its other files the same mode
        connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA cache_size = -{CACHE}")
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

    def total(self, *, pinned: bool = False) -> int:
        """Bytes of all files, or of pinned ones."""
        query = "SELECT COALESCE(SUM(nbytes), 0) FROM items" + (" WHERE pinned = 1" if pinned else "")
        return int(self._connection.execute(query).fetchone()[0])

    def oldest_pinned(self, count: int) -> list[Row]:
        """The pinned files that were not used for longest; the ends of conversations first."""
        query = f"SELECT {COLUMNS} FROM items WHERE pinned = 1 ORDER BY used ASC, start DESC LIMIT ?"
        return [_row(*values) for values in self._connection.execute(query, (count,))]

    def rows(self, model: str | None = None, after: int = 0) -> list[Row]:
        """The files of one model, or all, whose numbers are larger than `after`, beginnings first."""
        condition = "number > ?" + ("" if model is None else " AND model = ?")
        values = (after,) if model is None else (after, model)
        query = f"SELECT {COLUMNS} FROM items WHERE {condition} ORDER BY start, number"
        return [_row(*found) for found in self._connection.execute(query, values)]

    def add(self, item: Item, nbytes: int, *, pinned: bool = False) -> None:
        """Note a file that is in place now."""
        ids = item.ids if item.kind == "cells" else item.ids[item.start :]
        value = round(math.log2(item.worth)) if 0 < item.worth < math.inf else -100
        self._connection.execute(
            "INSERT OR REPLACE INTO items (name, model, kind, key, parent, start, ids, aligned, cells, nbytes, seconds,"
            " worth, used, pinned) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                item.name, item.model.hex(), item.kind, item.key, item.parent, item.start,
                ids.astype("<i8", copy=False).tobytes(), item.aligned, item.cells, nbytes, item.seconds, value,
                time.time(), int(pinned),
            ),
        )  # fmt: skip

    def remove(self, names: Iterable[str]) -> None:
        self._connection.executemany("DELETE FROM items WHERE name = ?", [(name,) for name in names])

    def touch(self, names: Iterable[str]) -> None:
        """Note that files were used."""
        now = time.time()
        self._connection.executemany(
            "UPDATE items SET used = ?, hits = hits + 1 WHERE name = ?", [(now, name) for name in names]
        )

    def pin(self, names: Iterable[str], *, pinned: bool) -> None:
        self._connection.executemany(
            "UPDATE items SET pinned = ? WHERE name = ?", [(int(pinned), name) for name in names]
        )

    def worst(self, count: int) -> list[Row]:
        """The files that are worth least: seconds saved per byte, half of it every half-life; the ends go first."""
        found = self._connection.execute(
            f"SELECT {COLUMNS} FROM items WHERE pinned = 0 ORDER BY worth + used / ? ASC, start DESC LIMIT ?",
            (HALF_LIFE, count),
        )
        return [_row(*values) for values in found]

    def dependents(self, row: Row) -> list[Row]:
        """The files that are of no use without this one: what builds on it, and the checkpoints inside it."""
        if row.kind == "state":
            return []
        query = f"SELECT {COLUMNS} FROM items WHERE parent = ?"
        found = [_row(*values) for values in self._connection.execute(query, (row.key,))]
        beside = [_row(*values) for values in self._connection.execute(query + " AND kind = 'state'", (row.parent,))]
        found += [one for one in beside if 0 < len(one.ids) == common_prefix(one.ids, row.ids)]
        return found

    def collect(self) -> None:
        """Make table and files agree: take in what is not listed, remove what is broken, forget what is gone."""
        listed = {(row.model, row.name) for row in self.rows()}
        present = set()
        for path in [path for folder in self._folders() for path in folder.iterdir()]:
            if path.suffix == ".tmp":
                _sweep(path)
            elif disk_files.read_name(path.name) is None:
                continue
            elif (path.parent.name, path.name) in listed or self._adopt(path):
                present.add((path.parent.name, path.name))
        self.remove(name for _, name in listed - present)

    def _folders(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if path.is_dir() and len(path.name) == 64]

    def _adopt(self, path: Path) -> bool:
        try:
            item, size = disk_files.peek(path)
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
    disk_files.prepare(directory)
    try:
        index = DiskIndex(directory)
    except (OSError, sqlite3.Error) as error:
        raise InvalidState(f"the table in {directory} cannot be read: {error}") from error
    try:
        yield index
    finally:
        index.close()


def _row(*values: object) -> Row:
    named = dict(zip(COLUMNS.split(", "), values, strict=True))
    ids = np.frombuffer(named.pop("ids"), dtype="<i8").astype(np.int64)  # type: ignore[call-overload]
    return Row(ids=ids, **named)  # type: ignore[arg-type]


def _sweep(path: Path) -> None:
    """Remove a half-written file whose writer is gone."""
    with contextlib.suppress(OSError, ValueError):
        writer = int(path.name.split(".")[-3])
        if not _alive(writer) or time.time() - path.stat().st_mtime > STALE:
            path.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
