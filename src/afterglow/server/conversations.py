"""Conversations of the web page: trees of messages per tenant, in one SQLite file.

A conversation is a tree. Each message names its parent, siblings are branches, and the current leaf selects the path
that is shown. An edit or a new response adds a sibling; only a message that is being streamed is overwritten.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afterglow.closeable import Closeable
from afterglow.database import Database
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.limits import check_limit
from afterglow.server.logs import logger
from afterglow.server.settings import ServerSettings

MESSAGE_BYTES = 128  # of a message, beside its text
SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, salt TEXT NOT NULL, title TEXT NOT NULL, leaf TEXT, settings TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_by_salt ON conversations (salt, updated);
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    id TEXT NOT NULL, parent TEXT, created REAL NOT NULL, message TEXT NOT NULL, info TEXT NOT NULL,
    nbytes INTEGER NOT NULL, UNIQUE (conversation, id)
);
CREATE INDEX IF NOT EXISTS messages_by_parent ON messages (conversation, parent);
"""
SUBTREE = """
WITH RECURSIVE subtree (id) AS (
    SELECT id FROM messages WHERE conversation = :conversation AND id = :id
    UNION ALL
    SELECT messages.id FROM messages JOIN subtree ON messages.parent = subtree.id
    WHERE messages.conversation = :conversation
)
"""


@dataclass(frozen=True, slots=True)
class TreeMessage:
    """One message of a conversation: an OpenAI chat message, its parent, and what the page shows about it."""

    id: str
    parent: str | None
    message: Mapping[str, Any]
    info: Mapping[str, Any]
    created: float | None = None


@dataclass(frozen=True, slots=True)
class ConversationTree:
    """A whole conversation to import."""

    title: str
    settings: Mapping[str, Any]
    messages: Sequence[TreeMessage]
    leaf: str | None = None
    created: float | None = None
    updated: float | None = None


class ConversationDatabase(Closeable):
    """Conversations of all tenants. Methods may be called by any thread; each is one transaction.

    >>> database = ConversationDatabase(None, ServerSettings())
    >>> id = database.create("", title="Tides", settings={})["id"]
    >>> question = TreeMessage("a", None, {"role": "user", "content": "Why are there tides?"}, {})
    >>> database.put_message("", id, question)["leaf"]
    'a'
    >>> [conversation["title"] for conversation in database.list_all("")], database.list_all("another tenant")
    (['Tides'], [])
    >>> database.close()
    """

    def __init__(self, path: Path | None, settings: ServerSettings) -> None:
        """Without a path, conversations are kept in memory. The file is opened on first use."""
        self._settings = settings
        # A deleted conversation is not left in the file.
        self._database = Database(path, SCHEMA, ("foreign_keys = ON", "secure_delete = ON"))

    def list_all(self, salt: str) -> list[dict[str, Any]]:
        """Return the conversations of a tenant without their messages, the last used one first."""
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT id, title, created, updated,"
                " (SELECT count(*) FROM messages WHERE conversation = conversations.id)"
                " FROM conversations WHERE salt = ? ORDER BY updated DESC, id",
                (salt,),
            )
            names = ("id", "title", "created", "updated", "messages")
            return [dict(zip(names, row, strict=True)) for row in rows]

    def create(self, salt: str, *, title: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Create an empty conversation."""
        with self._transaction() as connection:
            id = self._insert(connection, salt, title, settings)
            self._check_bytes(connection, salt)
            return self._read(connection, salt, id)

    def get(self, salt: str, id: str) -> dict[str, Any]:
        """Return a whole conversation. Raises status 404 if the tenant has none with this id."""
        with self._transaction() as connection:
            return self._read(connection, salt, id)

    def update(
        self,
        salt: str,
        id: str,
        *,
        title: str | None = None,
        leaf: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Rename a conversation, select another leaf or change its settings. None leaves a value as it is."""
        with self._transaction() as connection:
            self._check_exists(connection, salt, id)
            if leaf is not None:
                self._check_message_exists(connection, id, leaf, "leaf")
            changes = {
                "title": title,
                "leaf": leaf,
                "settings": None if settings is None else _dump(settings),
            }
            for name, value in changes.items():
                if value is not None:
                    connection.execute(f"UPDATE conversations SET {name} = ? WHERE id = ?", (value, id))
            if settings is not None:
                self._check_bytes(connection, salt)
            self._touch(connection, id)
            return self._read_head(connection, salt, id)

    def put_message(self, salt: str, id: str, message: TreeMessage) -> dict[str, Any]:
        """Add a message, or replace its text, and select it as the leaf. Its parent cannot change."""
        with self._transaction() as connection:
            self._check_exists(connection, salt, id)
            self._put(connection, id, message)
            self._check_message_count(connection, id)
            self._check_bytes(connection, salt)
            connection.execute("UPDATE conversations SET leaf = ? WHERE id = ?", (message.id, id))
            self._touch(connection, id)
            return self._read_head(connection, salt, id)

    def delete_message(self, salt: str, id: str, message_id: str) -> dict[str, Any]:
        """Delete a message and everything below it. A deleted leaf moves to the newest branch of the parent."""
        with self._transaction() as connection:
            self._check_exists(connection, salt, id)
            self._check_message_exists(connection, id, message_id, "message_id")
            names = {"conversation": id, "id": message_id}
            [(parent,)] = connection.execute(
                "SELECT parent FROM messages WHERE conversation = :conversation AND id = :id", names
            ).fetchall()
            connection.execute(
                f"{SUBTREE} DELETE FROM messages WHERE conversation = :conversation AND id IN subtree", names
            )
            [(leaf,)] = connection.execute("SELECT leaf FROM conversations WHERE id = ?", (id,)).fetchall()
            if leaf is None or not self._has_message(connection, id, leaf):
                new_leaf = _find_newest_leaf(connection, id, parent)
                connection.execute("UPDATE conversations SET leaf = ? WHERE id = ?", (new_leaf, id))
            self._touch(connection, id)
            return self._read(connection, salt, id)

    def delete(self, salt: str, id: str) -> None:
        """Delete a conversation with all messages."""
        with self._transaction() as connection:
            self._check_exists(connection, salt, id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (id,))

    def export(self, salt: str) -> list[dict[str, Any]]:
        """Return all conversations of a tenant, whole, the oldest first."""
        with self._transaction() as connection:
            ids = connection.execute("SELECT id FROM conversations WHERE salt = ? ORDER BY created, id", (salt,))
            return [self._read(connection, salt, id) for (id,) in ids.fetchall()]

    def import_all(self, salt: str, conversations: Sequence[ConversationTree]) -> list[dict[str, Any]]:
        """Add whole conversations under new ids: all of them or none. Parents come before their children."""
        with self._transaction() as connection:
            heads = [self._import(connection, salt, conversation) for conversation in conversations]
            self._check_bytes(connection, salt)
            return heads

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # --- inside a transaction

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run statements of one transaction: all of them apply, or none if an error is raised."""
        try:
            with self._database.transaction() as connection:
                yield connection
        except (sqlite3.Error, OSError) as error:
            logger.error("the conversations in %s cannot be used: %s", self._database.path or "memory", error)
            reason = error.strerror if isinstance(error, OSError) else error  # clients do not learn where files are
            message = f"the conversations cannot be used: {reason}"
            advice = "free some space, or move the file that the server's log names away if it is damaged"
            raise APIError(
                503, f"{message}; {advice}", error_type="server_error", code="conversations_unavailable"
            ) from error

    def _import(self, connection: sqlite3.Connection, salt: str, tree: ConversationTree) -> dict[str, Any]:
        id = self._insert(connection, salt, tree.title, tree.settings)
        for message in tree.messages:
            if self._has_message(connection, id, message.id):
                raise invalid_request_error("messages", f"two messages have the id {message.id!r}")
            self._put(connection, id, message)
        self._check_message_count(connection, id)
        if tree.leaf is not None:
            self._check_message_exists(connection, id, tree.leaf, "leaf")
        leaf = _find_newest_leaf(connection, id, None) if tree.leaf is None else tree.leaf
        connection.execute(
            "UPDATE conversations SET leaf = ?, created = coalesce(?, created), updated = coalesce(?, updated)"
            " WHERE id = ?",
            (leaf, tree.created, tree.updated, id),
        )
        return self._read_head(connection, salt, id)

    def _insert(self, connection: sqlite3.Connection, salt: str, title: str, settings: Mapping[str, Any]) -> str:
        [(count,)] = connection.execute("SELECT count(*) FROM conversations WHERE salt = ?", (salt,)).fetchall()
        check_limit(self._settings, "max_conversations", "conversations", count + 1)
        id, now = uuid.uuid4().hex, time.time()
        row = (id, salt, title, None, _dump(settings), now, now)
        connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return id

    def _put(self, connection: sqlite3.Connection, id: str, message: TreeMessage) -> None:
        if message.parent is not None:
            self._check_message_exists(connection, id, message.parent, "parent")
        text, info = _dump(message.message), _dump(message.info)
        nbytes = len(text.encode()) + len(info.encode()) + MESSAGE_BYTES
        found = connection.execute(
            "SELECT parent FROM messages WHERE conversation = ? AND id = ?", (id, message.id)
        ).fetchone()
        if found is None:
            created = time.time() if message.created is None else message.created
            row = (id, message.id, message.parent, created, text, info, nbytes)
            connection.execute(
                "INSERT INTO messages (conversation, id, parent, created, message, info, nbytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
        elif found[0] != message.parent:
            raise invalid_request_error("parent", f"the parent of the message {message.id!r} is {found[0]!r}")
        else:
            connection.execute(
                "UPDATE messages SET message = ?, info = ?, nbytes = ? WHERE conversation = ? AND id = ?",
                (text, info, nbytes, id, message.id),
            )

    def _check_message_count(self, connection: sqlite3.Connection, id: str) -> None:
        [(count,)] = connection.execute("SELECT count(*) FROM messages WHERE conversation = ?", (id,)).fetchall()
        check_limit(self._settings, "max_conversation_messages", "messages", count)

    def _check_bytes(self, connection: sqlite3.Connection, salt: str) -> None:
        [(message_bytes,)] = connection.execute(
            "SELECT total(nbytes) FROM messages JOIN conversations ON conversations.id = conversation WHERE salt = ?",
            (salt,),
        ).fetchall()
        [(settings_bytes,)] = connection.execute(
            "SELECT total(length(CAST(settings AS BLOB))) FROM conversations WHERE salt = ?", (salt,)
        ).fetchall()
        check_limit(self._settings, "max_conversation_bytes", "conversations", int(message_bytes) + int(settings_bytes))

    def _touch(self, connection: sqlite3.Connection, id: str) -> None:
        connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (time.time(), id))

    def _check_exists(self, connection: sqlite3.Connection, salt: str, id: str) -> None:
        self._read_head(connection, salt, id)

    def _has_message(self, connection: sqlite3.Connection, id: str, message_id: str) -> bool:
        query = "SELECT 1 FROM messages WHERE conversation = ? AND id = ?"
        return connection.execute(query, (id, message_id)).fetchone() is not None

    def _check_message_exists(self, connection: sqlite3.Connection, id: str, message_id: str, param: str) -> None:
        if not self._has_message(connection, id, message_id):
            message = f"the conversation has no message {message_id!r}"
            raise APIError(404, message, param=param, code="message_not_found")

    def _read_head(self, connection: sqlite3.Connection, salt: str, id: str) -> dict[str, Any]:
        row = connection.execute(
            "SELECT id, title, leaf, settings, created, updated FROM conversations WHERE id = ? AND salt = ?",
            (id, salt),
        ).fetchone()
        if row is None:
            raise APIError(404, f"there is no conversation {id!r}", param="id", code="conversation_not_found")
        names = ("id", "title", "leaf", "settings", "created", "updated")
        head = dict(zip(names, row, strict=True))
        return {**head, "settings": json.loads(head["settings"])}

    def _read(self, connection: sqlite3.Connection, salt: str, id: str) -> dict[str, Any]:
        head = self._read_head(connection, salt, id)
        rows = connection.execute(
            "SELECT id, parent, created, message, info FROM messages WHERE conversation = ? ORDER BY number", (id,)
        )
        messages = [
            {"id": id, "parent": parent, "created": created, "message": json.loads(message), "info": json.loads(info)}
            for id, parent, created, message, info in rows
        ]
        return {**head, "messages": messages}


def _find_newest_leaf(connection: sqlite3.Connection, id: str, start: str | None) -> str | None:
    """Follow the newest child from a message, or from the root, to a leaf."""
    leaf = start
    query = "SELECT id FROM messages WHERE conversation = ? AND parent IS ? ORDER BY number DESC LIMIT 1"
    while (row := connection.execute(query, (id, leaf)).fetchone()) is not None:
        leaf = row[0]
    return leaf


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
