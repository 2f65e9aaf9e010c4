"""SQLite files that only the user can read and that processes share: one connection, transactions under a lock."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

LOCK_TIMEOUT_SECONDS = 10.0  # for locks of other processes


class Database:
    """A file that is opened, and created, with the first transaction. Without a path it is in memory.

    Threads may share it. `pragmas` are settings of the connection; `schema` has statements that may run again.

    >>> database = Database(None, "CREATE TABLE IF NOT EXISTS words (word TEXT)")
    >>> with database.transaction() as connection:
    ...     connection.execute("INSERT INTO words VALUES ('glow')").rowcount
    1
    """

    def __init__(self, path: Path | None, schema: str, pragmas: Sequence[str] = ()) -> None:
        self.path = path
        self._schema = schema
        self._pragmas = pragmas
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the statements of one transaction: all of them apply, or none if an error is raised."""
        with self.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Give the connection, for statements that need no transaction."""
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            yield self._connection

    def close(self) -> None:
        """Close the file. A later transaction opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileExistsError):  # SQLite creates its journal with the same mode
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = sqlite3.connect(
            self.path or ":memory:", timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            for pragma in self._pragmas:
                connection.execute(f"PRAGMA {pragma}")
            connection.executescript(self._schema)
        except BaseException:
            connection.close()
            raise
        return connection
