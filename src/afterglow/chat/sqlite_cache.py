"""A cache in an SQLite file that processes share: reads in the calling thread, writes in a thread of its own.

If the file is damaged it is created again; if the disk is full or fails, what it would hold stays in RAM only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

LOCK_TIMEOUT_SECONDS = 10.0  # for locks of other processes
Work: TypeAlias = Callable[[sqlite3.Connection], object]


class SqliteCache:
    """One table with the columns `id`, `model`, `nbytes` and `last_used` among others, limited in bytes.

    `purpose` ends the warning about a file that cannot be read: what happens without it.
    """

    def __init__(
        self, path: Path, schema: str, table: str, *, model: str, max_bytes: int, logger: logging.Logger, purpose: str
    ) -> None:
        self._path = path
        self._schema = schema
        self._table = table
        self._model = model
        self._max_bytes = max_bytes
        self._logger = logger
        self._purpose = purpose
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def select(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a query. There are none if the file cannot be read."""
        if not self._path.exists():
            return []
        try:
            with self._connect() as connection:
                return connection.execute(query, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            self.warn_unreadable(error)
            return []

    def warn_unreadable(self, error: Exception) -> None:
        """Log that the file, or a row of it, cannot be read."""
        self._logger.warning("%s cannot be read, so %s: %s", self._path, self._purpose, error)

    def insert(self, values: Sequence[Any]) -> None:
        """Insert a row in the background, unless its id exists, and evict the least recently used ones."""

        def work(connection: sqlite3.Connection) -> None:
            places = ", ".join("?" * len(values))
            connection.execute(f"INSERT OR IGNORE INTO {self._table} VALUES ({places})", values)
            self._evict(connection)

        self._submit(work)

    def set_last_used(self, rows: Sequence[tuple[float, bytes]]) -> None:
        """Update the times of last use by id, in the background."""
        query = f"UPDATE {self._table} SET last_used = ? WHERE id = ?"
        self._submit(lambda connection: connection.executemany(query, rows))

    def clear(self) -> None:
        """Remove the rows of the model."""
        query = f"DELETE FROM {self._table} WHERE model = ?"
        self._submit(lambda connection: connection.execute(query, (self._model,)))
        self.close()

    def close(self) -> None:
        """Wait until everything is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _submit(self, work: Work) -> None:
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_queued, name=f"afterglow-{self._table}", daemon=True)
            self._thread.start()

    def _write_queued(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                with self._connect(create=True) as connection:
                    work(connection)
            except (sqlite3.Error, OSError) as error:
                self._logger.warning("%s cannot be written: %s", self._path, error)
                if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode in (
                    sqlite3.SQLITE_CORRUPT,
                    sqlite3.SQLITE_NOTADB,
                ):
                    self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _connect(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction. A connection is closed at once, so that the file can be removed."""
        if create:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_SECONDS)
        try:
            connection.execute("PRAGMA synchronous = OFF")
            connection.executescript(self._schema)
            with connection:
                yield connection
        finally:
            connection.close()

    def _evict(self, connection: sqlite3.Connection) -> None:
        """Remove the least recently used rows until the table is within its limit."""
        table = self._table
        query = f"SELECT coalesce(sum(nbytes), 0) - ? FROM {table}"
        (excess,) = connection.execute(query, (self._max_bytes,)).fetchone()
        while excess > 0:
            rows = connection.execute(f"SELECT id, nbytes FROM {table} ORDER BY last_used LIMIT 64").fetchall()
            connection.executemany(f"DELETE FROM {table} WHERE id = ?", [(id,) for id, _ in rows])
            excess -= sum(nbytes for _, nbytes in rows)
