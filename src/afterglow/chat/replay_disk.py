"""Generated messages on disk, so that conversations are replayed after a restart: one SQLite table for all models.

The table is a cache. If it is damaged it is created again; if the disk is full or fails, messages stay in RAM only.
A message holds token ids and digests, no text.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from afterglow.chat.replay import GeneratedMessage, Meaning, Place

FILE_NAME = "replays.sqlite3"
LOCK_TIMEOUT_SECONDS = 10.0  # for locks of other processes
ROW_BYTES = 256  # of a message on disk, beside its tokens
SCHEMA = """
CREATE TABLE IF NOT EXISTS replays (
    id BLOB PRIMARY KEY, model TEXT NOT NULL, parent BLOB NOT NULL, length INTEGER NOT NULL, place BLOB NOT NULL,
    position INTEGER NOT NULL, text BLOB NOT NULL, reasoning BLOB NOT NULL, calls BLOB NOT NULL, outline BLOB NOT NULL,
    call_ids TEXT NOT NULL, written_ids TEXT NOT NULL, tokens BLOB NOT NULL, nbytes INTEGER NOT NULL,
    last_used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS replays_by_parent ON replays (parent);
CREATE INDEX IF NOT EXISTS replays_by_use ON replays (last_used);
"""
COLUMNS = "parent, length, place, position, text, reasoning, calls, outline, call_ids, written_ids, tokens"
Work: TypeAlias = Callable[[sqlite3.Connection], None]
logger = logging.getLogger("afterglow.chat.replay")


class SqliteReplays:
    """Generated messages of one model in the table of a directory, which processes may share.

    A thread writes. Reads happen in the calling thread.
    """

    def __init__(self, directory: Path, model: str, max_bytes: int = 256 * 1024**2) -> None:
        self._path = directory / FILE_NAME
        self._model = model
        self._max_bytes = max_bytes
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self, parent: bytes) -> list[GeneratedMessage]:
        """Return the messages that follow `parent`. None are found if the table cannot be read."""
        if not self._path.exists():
            return []
        try:
            with connect(self._path) as connection:
                rows = connection.execute(
                    f"SELECT {COLUMNS} FROM replays WHERE parent = ? ORDER BY last_used", (parent,)
                ).fetchall()
            return [_build_message(*row) for row in rows]
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read, so earlier answers are tokenized again: %s", self._path, error)
            return []

    def write(self, message: GeneratedMessage) -> None:
        """Write a message in the background."""
        place, meaning = message.place, message.meaning
        tokens = np.asarray(message.tokens, "<i4").tobytes()
        values = (
            *(message.id, self._model, place.parent, place.length, place.text, place.index),
            *(meaning.text, meaning.reasoning, meaning.calls, message.outline),
            *(
                json.dumps(message.call_ids),
                json.dumps(message.written_ids),
                tokens,
                ROW_BYTES + len(tokens),
                time.time(),
            ),
        )

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute(f"INSERT OR IGNORE INTO replays VALUES ({', '.join('?' * len(values))})", values)
            evict(connection, self._max_bytes)

        self._submit(insert)

    def touch(self, ids: Sequence[bytes]) -> None:
        """Update the time of last use, so that a message is evicted before its parents."""
        now = time.time()
        rows = [(now - 1e-6 * index, id) for index, id in enumerate(ids)]
        self._submit(lambda connection: connection.executemany("UPDATE replays SET last_used = ? WHERE id = ?", rows))

    def clear(self) -> None:
        """Remove the messages of the model."""
        self._submit(lambda connection: connection.execute("DELETE FROM replays WHERE model = ?", (self._model,)))
        self.close()

    def close(self) -> None:
        """Wait until everything is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _submit(self, work: Callable[[sqlite3.Connection], object]) -> None:
        self._queue.put(work)  # type: ignore[arg-type]
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_queued, name="afterglow-replays", daemon=True)
            self._thread.start()

    def _write_queued(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                with connect(self._path, create=True) as connection:
                    work(connection)
            except (sqlite3.Error, OSError) as error:
                logger.warning("%s cannot be written: %s", self._path, error)
                if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode in (
                    sqlite3.SQLITE_CORRUPT,
                    sqlite3.SQLITE_NOTADB,
                ):
                    self._path.unlink(missing_ok=True)


def remove_replays(directory: Path) -> None:
    """Remove the messages of all models."""
    (directory / FILE_NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def connect(path: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the table for one transaction. A connection is closed at once, so that the file can be removed."""
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(SCHEMA)
        with connection:
            yield connection
    finally:
        connection.close()


def evict(connection: sqlite3.Connection, max_bytes: int) -> None:
    """Remove the least recently used messages until the table is within its limit."""
    (excess,) = connection.execute("SELECT coalesce(sum(nbytes), 0) - ? FROM replays", (max_bytes,)).fetchone()
    while excess > 0:
        rows = connection.execute("SELECT id, nbytes FROM replays ORDER BY last_used LIMIT 64").fetchall()
        connection.executemany("DELETE FROM replays WHERE id = ?", [(id,) for id, _ in rows])
        excess -= sum(nbytes for _, nbytes in rows)


def _build_message(
    parent: bytes,
    length: int,
    place: bytes,
    position: int,
    text: bytes,
    reasoning: bytes,
    calls: bytes,
    outline: bytes,
    call_ids: str,
    written_ids: str,
    tokens: bytes,
) -> GeneratedMessage:
    return GeneratedMessage(
        Place(parent, length, place, position),
        Meaning(text, reasoning, calls),
        outline,
        tuple(json.loads(call_ids)),
        tuple(json.loads(written_ids)),
        tuple(np.frombuffer(tokens, "<i4").tolist()),
    )
