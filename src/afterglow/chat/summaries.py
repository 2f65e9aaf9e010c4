"""Summaries of conversations by what they summarise, so that the same history gets the same summary: RAM and disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from afterglow.chat.content import Attachment
from afterglow.chat.messages import Message
from afterglow.chat.replay import compute_meaning, digest, encode
from afterglow.chat.sqlite_cache import SqliteCache

FILE_NAME = "summaries.sqlite3"
RECORD_BYTES = 256  # of a summary, beside its text
MAX_QUERIED_KEYS = 500  # SQLite limits the parameters of a query
SCHEMA = """
CREATE TABLE IF NOT EXISTS summaries (
    id BLOB PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL, nbytes INTEGER NOT NULL, last_used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS summaries_by_use ON summaries (last_used);
"""
logger = logging.getLogger("afterglow.chat.summaries")


class SqliteSummaries:
    """Summaries of one model in the table of a directory, which processes may share."""

    def __init__(self, directory: Path, model: str, max_bytes: int = 64 * 1024**2) -> None:
        self._model = model
        self._cache = SqliteCache(
            directory / FILE_NAME,
            SCHEMA,
            "summaries",
            model=model,
            max_bytes=max_bytes,
            logger=logger,
            purpose="summaries are written again",
        )

    def read(self, keys: Sequence[bytes]) -> dict[bytes, str]:
        """Return the summaries that are known, by key."""
        found: dict[bytes, str] = {}
        for start in range(0, len(keys), MAX_QUERIED_KEYS):
            part = keys[start : start + MAX_QUERIED_KEYS]
            places = ", ".join("?" * len(part))
            found |= dict(self._cache.select(f"SELECT id, text FROM summaries WHERE id IN ({places})", part))
        return found

    def write(self, key: bytes, text: str) -> None:
        """Write a summary in the background."""
        self._cache.insert((key, self._model, text, RECORD_BYTES + len(encode(text)), time.time()))

    def touch(self, key: bytes) -> None:
        """Update the time of last use."""
        self._cache.set_last_used([(time.time(), key)])

    def clear(self) -> None:
        """Remove the summaries of the model."""
        self._cache.clear()

    def close(self) -> None:
        """Wait until everything is written."""
        self._cache.close()


def remove_summaries(directory: Path) -> None:
    """Remove the summaries of all models."""
    (directory / FILE_NAME).unlink(missing_ok=True)


class SummaryStore:
    """Summaries of one model in RAM, and on disk if there is one. Evicts the least recently used ones.

    >>> store = SummaryStore("tiny")
    >>> keys = store.compute_keys([Message(role="user", content="Hi")], salt="tenant")
    >>> store.add(keys[1], "The user says hi.")
    'The user says hi.'
    >>> store.find(keys)
    {1: 'The user says hi.'}
    """

    def __init__(self, model: str, max_bytes: int = 8 * 1024**2, disk: SqliteSummaries | None = None) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._disk = disk
        self._nbytes = 0
        self._summaries: OrderedDict[bytes, str] = OrderedDict()  # by key, least recently used first
        self._lock = threading.Lock()

    def compute_keys(self, history: Sequence[Message], salt: str) -> list[bytes]:
        """Return the keys of the summaries of the first 0, 1, 2, … messages of a history without system messages."""
        keys = [digest(encode(self._model), encode(salt))]
        for message in history:
            keys.append(digest(keys[-1], *describe_message(message)))
        return keys

    def find(self, keys: Sequence[bytes]) -> dict[int, str]:
        """Return the known summaries by the index of their key."""
        with self._lock:
            missing = [key for key in keys if key not in self._summaries]
            if self._disk is not None and missing:
                for key, text in self._disk.read(missing).items():
                    self._insert(key, text)
            return {index: self._summaries[key] for index, key in enumerate(keys) if key in self._summaries}

    def add(self, key: bytes, text: str) -> str:
        """Keep a summary and return the one that is used from now on: the first of several."""
        with self._lock:
            known = self._summaries.get(key)
            if known is not None:
                return known
            self._insert(key, text)
            if self._disk is not None:
                self._disk.write(key, text)
            return text

    def touch(self, key: bytes) -> None:
        """Mark a summary as used."""
        with self._lock:
            if key in self._summaries:
                self._summaries.move_to_end(key)
            if self._disk is not None:
                self._disk.touch(key)

    def clear(self) -> None:
        """Remove all summaries, on disk too."""
        with self._lock:
            self._summaries.clear()
            self._nbytes = 0
            if self._disk is not None:
                self._disk.clear()

    def close(self) -> None:
        """Write what is left to disk."""
        if self._disk is not None:
            self._disk.close()

    def _insert(self, key: bytes, text: str) -> None:
        self._summaries[key] = text
        self._nbytes += RECORD_BYTES + len(text)
        while self._nbytes > self._max_bytes and len(self._summaries) > 1:
            _, evicted = self._summaries.popitem(last=False)
            self._nbytes -= RECORD_BYTES + len(evicted)


def describe_message(message: Message) -> list[bytes]:
    """Return what a message says, for a digest. Reasoning and the ids of calls do not count: clients change them."""
    meaning = compute_meaning(message.content, "", message.tool_calls)
    return [encode(message.role), meaning.text, meaning.calls, *map(describe_attachment, message.attachments)]


def describe_attachment(attachment: Attachment) -> bytes:
    """Return the identity of an image or audio file: of its content if it is loaded, else its source."""
    source = attachment.source
    identity = encode(source) if isinstance(source, str) else source.digest
    return encode(f"{attachment.kind} {attachment.offset} ") + identity
