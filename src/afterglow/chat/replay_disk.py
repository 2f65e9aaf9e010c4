"""Generated messages on disk, so that conversations are replayed after a restart: one SQLite table for all models.

A message holds token ids and digests, no text.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from afterglow.chat.replay import GeneratedMessage, Meaning, Place
from afterglow.chat.sqlite_cache import SqliteCache

FILE_NAME = "replays.sqlite3"
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
logger = logging.getLogger("afterglow.chat.replay")


class SqliteReplays:
    """Generated messages of one model in the table of a directory, which processes may share.

    A thread writes. Reads happen in the calling thread.
    """

    def __init__(self, directory: Path, model: str, max_bytes: int = 256 * 1024**2) -> None:
        self._model = model
        self._cache = SqliteCache(
            directory / FILE_NAME,
            SCHEMA,
            "replays",
            model=model,
            max_bytes=max_bytes,
            logger=logger,
            purpose="earlier answers are tokenized again",
        )

    def read(self, parent: bytes) -> list[GeneratedMessage]:
        """Return the messages that follow `parent`. None are found if the table cannot be read."""
        rows = self._cache.select(f"SELECT {COLUMNS} FROM replays WHERE parent = ? ORDER BY last_used", (parent,))
        try:
            return [_build_message(*row) for row in rows]
        except (ValueError, TypeError) as error:
            self._cache.warn_unreadable(error)
            return []

    def write(self, message: GeneratedMessage) -> None:
        """Write a message in the background."""
        place, meaning = message.place, message.meaning
        tokens = np.asarray(message.tokens, "<i4").tobytes()
        self._cache.insert(
            (
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
        )

    def touch(self, ids: Sequence[bytes]) -> None:
        """Update the time of last use, so that a message is evicted before its parents."""
        now = time.time()
        self._cache.set_last_used([(now - 1e-6 * index, id) for index, id in enumerate(ids)])

    def clear(self) -> None:
        """Remove the messages of the model."""
        self._cache.clear()

    def close(self) -> None:
        """Wait until everything is written."""
        self._cache.close()


def remove_replays(directory: Path) -> None:
    """Remove the messages of all models."""
    (directory / FILE_NAME).unlink(missing_ok=True)


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
