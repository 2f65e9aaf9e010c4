"""Conversations of the web page: trees of messages per tenant, in SQLite."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from afterglow.server.conversations import ConversationDatabase, ConversationTree, TreeMessage
from afterglow.server.errors import APIError
from afterglow.server.settings import ServerSettings


def say(id: str, parent: str | None = None, text: str = "text", role: str = "user") -> TreeMessage:
    return TreeMessage(id, parent, {"role": role, "content": text}, {})


def open_database(path: Path | None = None, **settings: Any) -> ConversationDatabase:
    return ConversationDatabase(path, ServerSettings(**settings))


def test_a_conversation_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "web" / "conversations.sqlite3"
    with open_database(path) as database:
        id = database.create("", title="Tides", settings={"system": "Be brief."})["id"]
        database.put_message("", id, say("a", text="Why? <b>é</b>"))
        database.put_message("", id, say("b", "a", role="assistant"))
        before = database.get("", id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with open_database(path) as database:
        assert database.get("", id) == before
    assert [message["id"] for message in before["messages"]] == ["a", "b"]
    assert (before["leaf"], before["settings"]) == ("b", {"system": "Be brief."})


def test_siblings_are_branches_and_the_leaf_selects_one() -> None:
    with open_database() as database:
        id = database.create("", title="", settings={})["id"]
        for message in (say("a"), say("b", "a"), say("c", "a")):
            database.put_message("", id, message)
        assert database.get("", id)["leaf"] == "c"
        assert database.update("", id, leaf="b")["leaf"] == "b"
        with pytest.raises(APIError, match="no message 'x'"):
            database.update("", id, leaf="x")


def test_a_message_is_replaced_while_it_streams_and_stays_at_its_parent() -> None:
    with open_database() as database:
        id = database.create("", title="", settings={})["id"]
        database.put_message("", id, say("a"))
        database.put_message("", id, say("b", "a", "Hel"))
        database.put_message("", id, say("b", "a", "Hello"))
        messages = database.get("", id)["messages"]
        assert [message["message"]["content"] for message in messages] == ["text", "Hello"]
        with pytest.raises(APIError, match="the parent of the message 'b' is 'a'"):
            database.put_message("", id, say("b", None))
        with pytest.raises(APIError, match="no message 'x'"):
            database.put_message("", id, say("c", "x"))
        assert database.get("", id)["messages"] == messages


def test_a_branch_is_deleted_with_what_follows_and_the_leaf_moves() -> None:
    with open_database() as database:
        id = database.create("", title="", settings={})["id"]
        for message in (say("a"), say("b", "a"), say("c", "b"), say("d", "a"), say("e", "d")):
            database.put_message("", id, message)
        changed = database.delete_message("", id, "d")
        assert [message["id"] for message in changed["messages"]] == ["a", "b", "c"]
        assert changed["leaf"] == "c"
        assert database.delete_message("", id, "a")["leaf"] is None


def test_tenants_see_only_their_own_conversations() -> None:
    with open_database() as database:
        id = database.create("one", title="secret", settings={})["id"]
        database.put_message("one", id, say("a"))
        assert database.list_all("two") == [] == database.export("two")
        for work in (
            lambda: database.get("two", id),
            lambda: database.update("two", id, title="x"),
            lambda: database.put_message("two", id, say("b")),
            lambda: database.delete_message("two", id, "a"),
            lambda: database.delete("two", id),
        ):
            with pytest.raises(APIError) as caught:
                work()
            assert caught.value.status == 404
        assert len(database.get("one", id)["messages"]) == 1


def test_limits_refuse_and_change_nothing() -> None:
    with open_database(max_conversations=2, max_conversation_messages=2, max_conversation_bytes=2000) as database:
        id = database.create("", title="", settings={})["id"]
        database.create("", title="", settings={})
        with pytest.raises(APIError, match=r"`max_conversations`"):
            database.create("", title="", settings={})
        database.create("other tenant", title="", settings={})
        database.put_message("", id, say("a"))
        with pytest.raises(APIError, match=r"`max_conversation_bytes`"):
            database.put_message("", id, say("b", "a", "x" * 2000))
        database.put_message("", id, say("b", "a"))
        with pytest.raises(APIError, match=r"`max_conversation_messages`"):
            database.put_message("", id, say("c", "b"))
        assert [message["id"] for message in database.get("", id)["messages"]] == ["a", "b"]


def test_settings_count_as_a_part_of_the_conversations() -> None:
    """Characters count as their bytes."""
    large, small = {"system": "é" * 600}, {"system": "é" * 300}
    with open_database(max_conversation_bytes=1000) as database:
        with pytest.raises(APIError, match=r"`max_conversation_bytes`"):
            database.create("", title="", settings=large)
        with pytest.raises(APIError, match=r"`max_conversation_bytes`"):
            database.import_all("", [ConversationTree("", large, [])])
        assert database.list_all("") == []
        id = database.create("", title="", settings=small)["id"]
        with pytest.raises(APIError, match=r"`max_conversation_bytes`"):
            database.update("", id, title="new", settings=large)
        with pytest.raises(APIError, match=r"`max_conversation_bytes`"):
            database.put_message("", id, say("a", text="x" * 400))
        with pytest.raises(APIError, match=r"`max_conversation_bytes`"):
            database.create("", title="", settings=small)
        conversation = database.get("", id)
        assert (conversation["title"], conversation["settings"], conversation["messages"]) == ("", small, [])
        database.create("other tenant", title="", settings=small)
        assert database.update("", id, settings={})["settings"] == {}
        database.create("", title="", settings=small)


def test_an_export_is_imported_whole_or_not_at_all() -> None:
    with open_database() as database:
        id = database.create("", title="Tides", settings={"system": "x"})["id"]
        for message in (say("a"), say("b", "a"), say("c", "a")):
            database.put_message("", id, message)
        database.update("", id, leaf="b")
        [exported] = database.export("")
        messages = [TreeMessage(**message) for message in exported["messages"]]
        tree = ConversationTree("Tides", {"system": "x"}, messages, leaf="b", created=exported["created"])
        [head] = database.import_all("", [tree])
        copy = database.get("", head["id"])
        assert head["id"] != id
        assert {**copy, "id": id, "updated": exported["updated"]} == exported
        broken = ConversationTree("broken", {}, [say("x", "later"), say("later")])
        with pytest.raises(APIError, match="no message 'later'"):
            database.import_all("", [tree, broken])
        with pytest.raises(APIError, match="two messages have the id 'x'"):
            database.import_all("", [ConversationTree("twice", {}, [say("x"), say("x")])])
        assert len(database.list_all("")) == 2


def test_a_damaged_file_is_reported_and_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients learn the reason, and only the log names the file."""
    path = tmp_path / "conversations.sqlite3"
    path.write_bytes(b"not a database" * 100)
    with (
        open_database(path) as database,
        pytest.raises(APIError, match=r"not a database.*away if it is damaged") as caught,
    ):
        database.list_all("")
    assert caught.value.status == 503
    assert str(tmp_path) not in str(caught.value)
    assert f"conversations in {path} cannot be used" in caplog.text
    assert path.read_bytes() == b"not a database" * 100
