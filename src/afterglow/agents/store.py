"""Rows of runs in SQLite: append-only, chained by blake3, one transaction per step. They are history and audit at once.

The digest of a row covers the digest of the row before it, of any run in the file. A changed, removed, inserted or
moved row breaks the chain; a removed end is noticed by the counter of SQLite, or by a digest that was noted elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from afterglow.closeable import Closeable
from afterglow.database import Database
from afterglow.errors import InvalidArgument, InvalidState

FIRST_DIGEST = blake3(b"afterglow runs 1").hexdigest()
SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
    body TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS rows_by_run ON rows (run, id);
CREATE TRIGGER IF NOT EXISTS rows_are_not_changed BEFORE UPDATE ON rows
    BEGIN SELECT RAISE(ABORT, 'rows are append-only'); END;
CREATE TRIGGER IF NOT EXISTS rows_are_not_removed BEFORE DELETE ON rows
    BEGIN SELECT RAISE(ABORT, 'rows are append-only'); END;
"""


class Row(NamedTuple):
    """One row of a run."""

    id: int
    run: str
    time: float
    kind: str
    body: dict[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as `afterglow runs list` shows it."""

    id: str
    parent: str
    task: str
    status: str
    created: float
    rows: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Result of `RunStore.verify`. `head` is the digest of the last row: note it to notice a removed end."""

    rows: int
    head: str
    problem: str = ""


class RunStore(Closeable):
    """Runs of agents in one file, which processes may share. Without a path they are in memory.

    >>> with RunStore() as store:
    ...     _ = store.append("a-run", [("started", {"task": "Look around."})])
    ...     store.verify().rows
    1
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        # An intent is on disk before its call.
        self._database = Database(self.path, SCHEMA, ("journal_mode = WAL", "synchronous = FULL"))
        self._finalizer = weakref.finalize(self, self._database.close)
        try:
            with self._database.connection():  # open it now, to reject another kind of file
                pass
        except sqlite3.Error as error:
            raise InvalidArgument("store", f"{self.path} is not a file of runs: {error}") from None
        except OSError as error:
            raise InvalidArgument("store", f"{self.path} cannot be opened: {error}") from None

    def append(self, run: str, rows: Sequence[tuple[str, Mapping[str, Any]]], *, after: int | None = None) -> int:
        """Write the rows of one step, all or none of them. Return the id of the last one.

        `after` is the id of the newest row of the run that the caller knows, 0 for none. Raises `InvalidState` if there
        is a newer one: then another process continues the run.
        """
        with self._transaction() as connection:
            newest = connection.execute("SELECT COALESCE(MAX(id), 0) FROM rows WHERE run = ?", (run,)).fetchone()[0]
            if after is not None and newest != after:
                raise InvalidState(f"the run {run} is continued elsewhere; resume it when that has ended")
            last = connection.execute("SELECT digest FROM rows ORDER BY id DESC LIMIT 1").fetchone()
            digest = last[0] if last else FIRST_DIGEST
            for kind, body in rows:
                now, text = time.time(), json.dumps(body, ensure_ascii=True, sort_keys=True)
                digest = compute_digest(digest, run, now, kind, text)
                inserted = connection.execute(
                    "INSERT INTO rows (run, time, kind, body, digest) VALUES (?, ?, ?, ?, ?)",
                    (run, now, kind, text, digest),
                )
                newest = inserted.lastrowid
        return int(newest)

    def read(self, run: str, *, missing_ok: bool = False) -> list[Row]:
        """Return the rows of a run. Raises `InvalidArgument` if there is no such run, unless it may be missing."""
        with self._connection() as connection:
            found = connection.execute(
                "SELECT id, run, time, kind, body, digest FROM rows WHERE run = ? ORDER BY id", (run,)
            ).fetchall()
            rows = [
                Row(id, run, created, kind, json.loads(body), digest) for id, run, created, kind, body, digest in found
            ]
        if not found and not missing_ok:
            raise InvalidArgument(
                "run", f"there is no run {run!r} in {self.path or 'memory'}; `afterglow runs list` shows the ids"
            )
        return rows

    def list_runs(self) -> list[RunSummary]:
        """Return the runs, the newest first."""
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT run, kind, body, time FROM rows WHERE kind IN ('started', 'finished', 'resumed') ORDER BY id"
            ).fetchall()
            bodies = [json.loads(row[2]) for row in rows]
            counts = dict(connection.execute("SELECT run, COUNT(*) FROM rows GROUP BY run").fetchall())
        summaries: dict[str, RunSummary] = {}
        for (run, kind, _, created), body in zip(rows, bodies, strict=True):
            if kind == "started":
                task, parent = str(body.get("task", "")), str(body.get("parent") or "")
                summaries[run] = RunSummary(run, parent, task, "open", created, counts[run])
            elif run in summaries:
                old = summaries[run]
                status = body.get("status", "open") if kind == "finished" else "open"
                summaries[run] = RunSummary(run, old.parent, old.task, status, old.created, old.rows)
        return list(reversed(summaries.values()))

    def verify(self, head: str | None = None) -> AuditReport:
        """Check the chain of all rows. With `head`, one of them must have this digest."""
        digest, expected, count, heads = FIRST_DIGEST, 1, 0, {FIRST_DIGEST}
        with self._connection() as connection:
            rows = connection.execute("SELECT id, run, time, kind, body, digest FROM rows ORDER BY id").fetchall()
            counter = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'rows'").fetchone()
        for id, run, created, kind, text, found in rows:
            if id != expected:
                return AuditReport(count, digest, f"row {expected} is missing")
            if any(isinstance(value, bytes) for value in (run, created, kind, text)):
                return AuditReport(count, digest, f"row {id} of the run {run} was changed")
            digest = compute_digest(digest, run, created, kind, text)
            if digest != found:
                return AuditReport(count, digest, f"row {id} of the run {run} was changed")
            heads.add(digest)
            expected, count = expected + 1, count + 1
        if counter is not None and counter[0] != expected - 1:
            return AuditReport(count, digest, f"the rows from {expected} to {counter[0]} are missing")
        if head is not None and head not in heads:
            return AuditReport(count, digest, "the row with the given digest is missing")
        return AuditReport(count, digest)

    def close(self) -> None:
        self._finalizer()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._database.connection() as connection:
                yield connection
        except (sqlite3.Error, ValueError) as error:  # a damaged page, or text that is no UTF-8 or no JSON
            raise InvalidState(f"{self.path or 'the runs in memory'} cannot be read: {error}") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._database.transaction() as connection:
                yield connection
        except sqlite3.Error as error:
            raise InvalidState(f"{self.path or 'the runs in memory'} cannot be written: {error}") from None


def compute_digest(previous: str, run: str, created: float, kind: str, body: str) -> str:
    """Return the digest of a row after the row with the digest `previous`."""
    return blake3(json.dumps([previous, run, created, kind, body]).encode()).hexdigest()
