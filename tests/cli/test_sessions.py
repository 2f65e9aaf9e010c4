"""Saved conversations: what is written is read again, and damaged files are errors that name the file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from afterglow.chat.messages import Message
from afterglow.cli.sessions import ConversationStore, create_id
from afterglow.errors import InvalidArgument

MESSAGES = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Hëllo\nthere"),
    Message(role="assistant", content="Hi", reasoning="Hm"),
]


def test_a_conversation_is_read_as_it_was_saved(tmp_path: Path) -> None:
    store, id = ConversationStore(tmp_path / "conversations"), create_id()
    store.save(id, "smollm2", MESSAGES)
    saved = store.load(id)
    assert (saved.id, saved.model, saved.messages, saved.title) == (id, "smollm2", MESSAGES, "Hëllo")
    assert store.load_last() == saved


def test_the_conversation_that_was_saved_last_comes_first(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path)
    ids = [create_id() for _ in range(3)]
    for time, id in enumerate(ids):
        store.save(id, "smollm2", MESSAGES)
        os.utime(tmp_path / f"{id}.json", (time, time))
    (tmp_path / "notes.json").touch()
    assert store.list_ids() == ids[::-1]
    assert [saved.id for saved in store.load_recent(2)] == [ids[2], ids[1]]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": "x", "messages": 3}', '{"model": "x", "messages": [1]}']
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    store, id = ConversationStore(tmp_path), create_id()
    (tmp_path / f"{id}.json").write_text(content)
    with pytest.raises(InvalidArgument, match=re.escape(f"{id}.json")):
        store.load(id)
    assert list(store.load_recent(1)) == []


@pytest.mark.parametrize("id", ["20260101-000000-abcd", "../secret", "x"])
def test_an_unknown_id_is_an_error(tmp_path: Path, id: str) -> None:
    (tmp_path.parent / "secret.json").touch()
    with pytest.raises(InvalidArgument, match="found no saved conversation"):
        ConversationStore(tmp_path).load(id)
