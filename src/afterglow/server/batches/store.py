"""Files and batches of all tenants: contents in a directory, everything else in one SQLite database.

A result row is the truth about a line: it is written in a transaction of its own, and a line has at most one. Output
files are written from the rows, so that a batch continues after the process was killed at any point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from afterglow.database import Database
from afterglow.errors import InvalidArgument
from afterglow.server.batches.lines import BatchLine

DATABASE_NAME = "batches.sqlite3"
STALE_AFTER_SECONDS = 3600.0  # after this time, content without a row is of a killed upload
BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
FINAL_STATUSES = ("failed", "completed", "expired", "cancelled")
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, salt TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, nbytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, salt TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, metadata TEXT, served TEXT, output_seconds INTEGER, model TEXT, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER,
    cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT, errors TEXT, counts TEXT, is_ordered INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, position INTEGER NOT NULL, custom_id TEXT NOT NULL,
    url TEXT NOT NULL, model TEXT, offset INTEGER NOT NULL, nbytes INTEGER NOT NULL, PRIMARY KEY (batch_id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, is_error INTEGER NOT NULL, document TEXT NOT NULL,
    input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL, PRIMARY KEY (batch_id, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS result_counts ON results (
    batch_id, is_error, input_tokens, cached_tokens, output_tokens, reasoning_tokens
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a tenant."""

    id: str
    salt: str
    filename: str
    purpose: str
    nbytes: int
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """One batch of a tenant."""

    id: str
    salt: str
    endpoint: str  # of all lines; empty: each line has its own
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    served: list[str] | None = None  # names of the models of the server that accepted it
    output_seconds: int | None = None  # after which the output files expire
    model: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] | None = None
    counts: dict[str, int] | None = None  # of a finished batch, whose rows are gone
    is_ordered: bool = False

    @property
    def is_final(self) -> bool:
        return self.status in FINAL_STATUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """Result of one line: the line of the output or error file, and the tokens that it took."""

    number: int
    is_error: bool
    document: str
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


JSON_COLUMNS = ("metadata", "served", "errors", "counts")
FILE_COLUMNS = tuple(field.name for field in dataclasses.fields(StoredFile))
BATCH_COLUMNS = tuple(field.name for field in dataclasses.fields(StoredBatch))
RESULT_COLUMNS = tuple(field.name for field in dataclasses.fields(LineResult))
LINE_COLUMNS = tuple(field.name for field in dataclasses.fields(BatchLine))


class BatchStore:
    """Files and batches in a directory, which processes may share. All methods may be called from any thread.

    >>> import io
    >>> store = BatchStore(Path("batches"))
    >>> file = store.add_file(io.BytesIO(b"{}"), salt="", filename="in.jsonl", purpose="batch")
    >>> store.get_file(file.id, salt="").nbytes, store.get_file(file.id, salt="other")
    (2, None)
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._database = Database(directory / DATABASE_NAME, SCHEMA)

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored."""
        return (self.directory / DATABASE_NAME).exists()

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._create_directories()
        with self._database.transaction() as connection:
            yield connection

    def _create_directories(self) -> None:
        for directory in (self.directory, self.directory / "files", self.directory / "locks"):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.chmod(0o700)

    # --- files

    def add_file(
        self,
        source: BinaryIO,
        *,
        salt: str,
        filename: str,
        purpose: str,
        seconds: int | None = None,
        max_total_bytes: int | None = None,
    ) -> StoredFile:
        """Store a file, which expires after `seconds`. Raises `InvalidArgument` if the tenant has too many bytes."""
        id, now = f"file-{uuid.uuid4().hex}", int(time.time())
        expires_at = None if seconds is None else now + seconds
        self._create_directories()
        partial = self.get_path(id).with_suffix(".partial")
        with contextlib.ExitStack() as stack:
            stack.callback(partial.unlink, missing_ok=True)
            _write_private(partial, source)
            nbytes = partial.stat().st_size
            file = StoredFile(
                id=id,
                salt=salt,
                filename=filename,
                purpose=purpose,
                nbytes=nbytes,
                created_at=now,
                expires_at=expires_at,
            )
            with self._transaction() as connection:
                (used,) = connection.execute("SELECT TOTAL(nbytes) FROM files WHERE salt = ?", (salt,)).fetchone()
                if max_total_bytes is not None and used + nbytes > max_total_bytes:
                    reason = f"has {nbytes:,} bytes; {int(used):,} of {max_total_bytes:,} are in use"
                    raise InvalidArgument("file", reason)
                partial.replace(self.get_path(id))
                _insert(connection, "files", FILE_COLUMNS, file)
        return file

    def get_path(self, id: str) -> Path:
        """Return the path of the content of a file."""
        return self.directory / "files" / id

    def get_file(self, id: str, *, salt: str) -> StoredFile | None:
        """Return a file of a tenant."""
        with self._transaction() as connection:
            return _find_file(connection, id, salt)

    def list_files(self, *, salt: str, purpose: str | None = None, is_ascending: bool = False) -> list[StoredFile]:
        """Return the files of a tenant, by default the newest first."""
        order = "ASC" if is_ascending else "DESC"
        query = f"SELECT {', '.join(FILE_COLUMNS)} FROM files WHERE salt = ? AND (?2 IS NULL OR purpose = ?2)"
        with self._transaction() as connection:
            rows = connection.execute(f"{query.replace('?', '?1', 1)} ORDER BY number {order}", (salt, purpose))
            return [_build_file(row) for row in rows]

    def delete_file(self, id: str, *, salt: str) -> bool:
        """Delete a file and return whether it existed. Raises `InvalidArgument` if an unfinished batch reads it."""
        with self._transaction() as connection:
            if _find_file(connection, id, salt) is None:
                return False
            rows = connection.execute("SELECT id, status FROM batches WHERE input_file_id = ?", (id,)).fetchall()
            if users := [batch_id for batch_id, status in rows if status not in FINAL_STATUSES]:
                raise InvalidArgument("id", f"is the input of {users[0]}, which has not ended: cancel it first")
            connection.execute("DELETE FROM files WHERE id = ?", (id,))
        self.get_path(id).unlink(missing_ok=True)
        return True

    def delete_expired(self, batch_seconds: float) -> None:
        """Delete files that have expired, and batches that ended `batch_seconds` ago."""
        now = int(time.time())
        with self._transaction() as connection:
            is_unused = f"id NOT IN (SELECT input_file_id FROM batches WHERE status NOT IN {FINAL_STATUSES})"
            condition = f"expires_at IS NOT NULL AND expires_at <= ? AND {is_unused}"
            files = [id for (id,) in connection.execute(f"SELECT id FROM files WHERE {condition}", (now,))]
            connection.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in files])
            ended = f"created_at <= ? AND status IN {FINAL_STATUSES}"
            old = [id for (id,) in connection.execute(f"SELECT id FROM batches WHERE {ended}", (now - batch_seconds,))]
            connection.executemany("DELETE FROM batches WHERE id = ?", [(id,) for id in old])
            known = {id for (id,) in connection.execute("SELECT id FROM files")}
        for path in self.get_path("").iterdir():  # also what a killed process left
            if path.name in files or (path.name not in known and path.stat().st_mtime < now - STALE_AFTER_SECONDS):
                path.unlink(missing_ok=True)
        for id in old:
            (self.directory / "locks" / id).unlink(missing_ok=True)

    # --- batches

    def add_batch(
        self,
        *,
        salt: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_seconds: float,
        metadata: dict[str, str] | None = None,
        served: list[str] | None = None,
        output_seconds: int | None = None,
    ) -> StoredBatch:
        """Store a new batch. The input file must exist."""
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            salt=salt,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            status="validating",
            created_at=now,
            expires_at=now + int(window_seconds),
            metadata=metadata,
            served=served,
            output_seconds=output_seconds,
        )
        with self._transaction() as connection:
            _insert(connection, "batches", BATCH_COLUMNS, batch)
        return batch

    def get_batch(self, id: str, *, salt: str | None = None) -> StoredBatch | None:
        """Return a batch of a tenant, or of any."""
        query = f"SELECT {', '.join(BATCH_COLUMNS)} FROM batches WHERE id = ?"
        with self._transaction() as connection:
            batches = [_build_batch(row) for row in connection.execute(query, (id,))]
        return next((batch for batch in batches if salt is None or batch.salt == salt), None)

    def list_batches(self, *, salt: str) -> list[StoredBatch]:
        """Return the batches of a tenant, the newest first."""
        query = f"SELECT {', '.join(BATCH_COLUMNS)} FROM batches WHERE salt = ? ORDER BY number DESC"
        with self._transaction() as connection:
            return [_build_batch(row) for row in connection.execute(query, (salt,))]

    def list_unfinished(self) -> list[StoredBatch]:
        """Return the unfinished batches of all tenants, the oldest first."""
        columns = ", ".join(BATCH_COLUMNS)
        query = f"SELECT {columns} FROM batches WHERE status NOT IN {FINAL_STATUSES} ORDER BY number"
        with self._transaction() as connection:
            return [_build_batch(row) for row in connection.execute(query)]

    def set_status(self, id: str, status: BatchStatus, *, unless: Sequence[BatchStatus] = ()) -> StoredBatch:
        """Set the status of a batch and its time, unless it has ended or has one of other statuses; return it."""
        excluded = (*FINAL_STATUSES, *unless)
        marks = ", ".join("?" * len(excluded))
        with self._transaction() as connection:
            connection.execute(
                f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ? AND status NOT IN ({marks})",
                (status, int(time.time()), id, *excluded),
            )
        batch = self.get_batch(id)
        assert batch is not None
        return batch

    def set_errors(self, id: str, errors: list[dict[str, Any]]) -> None:
        """Set the errors that a batch describes."""
        with self._transaction() as connection:
            connection.execute("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(errors), id))

    @contextlib.contextmanager
    def claim(self, id: str) -> Iterator[bool]:
        """Claim a batch for this process; yield True on success. The lock is released if the process dies."""
        with open(self.directory / "locks" / id, "w", opener=_open_private) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    # --- lines and results of a running batch

    def add_lines(
        self,
        id: str,
        lines: Iterable[BatchLine],
        errors: Iterable[LineResult],
        descriptions: list[dict[str, Any]],
        model: str | None,
    ) -> None:
        """Store the lines of a batch and the results of invalid ones, once, and start it."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM lines WHERE batch_id = ?", (id,))
            connection.execute("DELETE FROM results WHERE batch_id = ?", (id,))
            for line in lines:
                _insert(connection, "lines", LINE_COLUMNS, line, batch_id=id, position=line.number)
            for error in errors:
                _insert(connection, "results", RESULT_COLUMNS, error, batch_id=id)
            connection.execute(
                "UPDATE batches SET errors = ?, model = ?, in_progress_at = ?, "
                "status = CASE status WHEN 'validating' THEN 'in_progress' ELSE status END WHERE id = ?",
                (json.dumps(descriptions) if descriptions else None, model, int(time.time()), id),
            )

    def list_lines(self, id: str, *, pending: bool = False) -> list[BatchLine]:
        """Return the lines of a batch in the order in which they run; only those without a result if `pending`."""
        columns = ", ".join(LINE_COLUMNS)
        missing = "AND NOT EXISTS (SELECT 1 FROM results r WHERE r.batch_id = l.batch_id AND r.number = l.number)"
        query = f"SELECT {columns} FROM lines l WHERE batch_id = ? {missing if pending else ''} ORDER BY position"
        with self._transaction() as connection:
            return [BatchLine(*row) for row in connection.execute(query, (id,))]

    def set_order(self, id: str, numbers: Sequence[int]) -> None:
        """Set the order in which lines run, by their numbers."""
        with self._transaction() as connection:
            rows = [(position, id, number) for position, number in enumerate(numbers)]
            connection.executemany("UPDATE lines SET position = ? WHERE batch_id = ? AND number = ?", rows)
            connection.execute("UPDATE batches SET is_ordered = 1 WHERE id = ?", (id,))

    def add_result(self, id: str, result: LineResult) -> None:
        """Store the result of a line, unless it has one."""
        with self._transaction() as connection:
            _insert(connection, "results", RESULT_COLUMNS, result, verb="INSERT OR IGNORE", batch_id=id)

    def list_results(self, id: str, *, is_error: bool | None = None) -> Iterator[str]:
        """Yield the documents of results in the order of the input. The batch must be claimed."""
        number = -1
        query = (
            "SELECT number, document FROM results WHERE batch_id = ? AND number > ? "
            "AND (? IS NULL OR is_error = ?) ORDER BY number LIMIT 256"
        )
        while True:
            with self._transaction() as connection:
                rows = connection.execute(query, (id, number, is_error, is_error)).fetchall()
            yield from (document for _, document in rows)
            if not rows:
                return
            number = rows[-1][0]

    def count_results(self, batch: StoredBatch) -> dict[str, int]:
        """Return the number of lines, of completed and failed ones, and the sums of their tokens."""
        if batch.counts is not None:
            return batch.counts
        query = (
            "SELECT (SELECT COUNT(*) FROM lines WHERE batch_id = ?1), COUNT(*), TOTAL(is_error), TOTAL(input_tokens), "
            "TOTAL(cached_tokens), TOTAL(output_tokens), TOTAL(reasoning_tokens) FROM results WHERE batch_id = ?1"
        )
        with self._transaction() as connection:
            lines, done, failed, *tokens = map(int, connection.execute(query, (batch.id,)).fetchone())
            (invalid,) = connection.execute(
                "SELECT COUNT(*) FROM results r WHERE batch_id = ?1 AND NOT EXISTS "
                "(SELECT 1 FROM lines l WHERE l.batch_id = ?1 AND l.number = r.number)",
                (batch.id,),
            ).fetchone()
        names = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
        counts = {"total": lines + invalid, "completed": done - failed, "failed": failed}
        return counts | dict(zip(names, tokens, strict=True))

    def finish(self, id: str, status: BatchStatus, default_seconds: int) -> StoredBatch:
        """Write the output files of a batch from its results, and end it. Repeats what a killed process began."""
        batch = self.get_batch(id)
        assert batch is not None
        if batch.is_final:
            return batch
        counts, now = self.count_results(batch), int(time.time())
        seconds = batch.output_seconds or default_seconds
        files = []
        for kind, is_error in (("output", False), ("error", True)):
            file_id = f"file-{id.removeprefix('batch_')}-{kind}"  # the same if it is written again
            path = self.get_path(file_id)
            partial = path.with_suffix(".partial")
            with open(partial, "wb", opener=_open_private) as target:
                for document in self.list_results(id, is_error=is_error):
                    target.write(document.encode() + b"\n")
                target.flush()
                os.fsync(target.fileno())
            if nbytes := partial.stat().st_size:
                partial.replace(path)
                files.append(
                    StoredFile(
                        id=file_id,
                        salt=batch.salt,
                        filename=f"{id}_{kind}.jsonl",
                        purpose="batch_output",
                        nbytes=nbytes,
                        created_at=now,
                        expires_at=now + seconds,
                    )
                )
            else:
                partial.unlink()
        with self._transaction() as connection:
            for file in files:
                _insert(connection, "files", FILE_COLUMNS, file, verb="INSERT OR REPLACE")
                column = "output_file_id" if file.id.endswith("-output") else "error_file_id"
                connection.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file.id, id))
            connection.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, counts = ? WHERE id = ?",
                (status, now, json.dumps(counts), id),
            )
            connection.execute("DELETE FROM lines WHERE batch_id = ?", (id,))
            connection.execute("DELETE FROM results WHERE batch_id = ?", (id,))
        finished = self.get_batch(id)
        assert finished is not None
        return finished


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_private(path: Path, source: BinaryIO) -> None:
    with open(path, "wb", opener=_open_private) as target:
        shutil.copyfileobj(source, target, 1024 * 1024)
        target.flush()
        os.fsync(target.fileno())


def _insert(
    connection: sqlite3.Connection,
    table: str,
    columns: Sequence[str],
    row: StoredFile | StoredBatch | BatchLine | LineResult,
    *,
    verb: str = "INSERT",
    **others: str | int,
) -> None:
    values = {name: getattr(row, name) for name in columns} | others
    for name in JSON_COLUMNS:
        if values.get(name) is not None:
            values[name] = json.dumps(values[name])
    marks = ", ".join("?" * len(values))
    connection.execute(f"{verb} INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))


def _find_file(connection: sqlite3.Connection, id: str, salt: str) -> StoredFile | None:
    query = f"SELECT {', '.join(FILE_COLUMNS)} FROM files WHERE id = ? AND salt = ?"
    row = connection.execute(query, (id, salt)).fetchone()
    return None if row is None else _build_file(row)


def _build_file(row: Sequence[Any]) -> StoredFile:
    return StoredFile(**dict(zip(FILE_COLUMNS, row, strict=True)))


def _build_batch(row: Sequence[Any]) -> StoredBatch:
    values = dict(zip(BATCH_COLUMNS, row, strict=True))
    for name in JSON_COLUMNS:
        values[name] = None if values[name] is None else json.loads(values[name])
    return StoredBatch(**{**values, "is_ordered": bool(values["is_ordered"])})
