"""Generated messages in RAM and on disk: found by place, bounded in bytes, kept over restarts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from afterglow.chat.messages import ToolCall
from afterglow.chat.multimodal import MediaPlaceholders
from afterglow.chat.output.parts import ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.replay import (
    GeneratedMessage,
    Place,
    PlainText,
    ReplayStore,
    compute_meaning,
    compute_outline,
    digest_text,
)
from afterglow.chat.replay_disk import FILE_NAME, SqliteReplays, remove_replays


def build_message(parent: bytes, text: str = "text", tokens: int = 10) -> GeneratedMessage:
    place = Place(parent, len(text), digest_text(text), 1)
    outline = compute_outline([TextDelta(text)])
    return GeneratedMessage(place, compute_meaning(text, "", ()), outline, ("a",), (), tuple(range(tokens)))


def build_chain(store: ReplayStore, length: int, salt: str = "") -> list[GeneratedMessage]:
    parent, messages = store.get_root(salt), []
    for index in range(length):
        messages.append(build_message(parent, f"{salt} {index}"))
        store.add(messages[-1])
        parent = messages[-1].id
    return messages


def follow(store: ReplayStore, salt: str = "") -> int:
    """Count the messages from the root to the last one."""
    parent, count = store.get_root(salt), 0
    while children := store.find_children(parent):
        parent, count = children[0].id, count + 1
    return count


# --- meaning


@pytest.mark.parametrize(
    "arguments", ['{"a":1,"b":[1,2]}', '{ "b": [1, 2.0], "a": 1.0 }', '{"b":[1,2],"a":1}', '{"\\u0061":1,"b":[1,2]}']
)
def test_the_form_of_arguments_does_not_change_their_meaning(arguments: str) -> None:
    expected = compute_meaning("", "", [ToolCall(id="1", name="f", arguments='{"a": 1, "b": [1, 2]}')])
    assert compute_meaning("", "", [ToolCall(id="2", name="f", arguments=arguments)]) == expected


@pytest.mark.parametrize(
    "arguments", ['{"a": 1, "b": [2, 1]}', '{"a": "1", "b": [1, 2]}', '{"a": 1}', "{", '{"a": 1.5}']
)
def test_other_arguments_have_another_meaning(arguments: str) -> None:
    expected = compute_meaning("", "", [ToolCall(id="1", name="f", arguments='{"a": 1, "b": [1, 2]}')])
    assert compute_meaning("", "", [ToolCall(id="1", name="f", arguments=arguments)]) != expected


def test_an_outline_has_the_order_of_parts_but_not_the_white_space_around_them() -> None:
    call = ToolCallDelta(0, '{"a": 1}', "1", "f")
    outline = compute_outline([ReasoningDelta("Hm"), TextDelta("One"), call])
    assert compute_outline([ReasoningDelta("\nHm\n"), TextDelta("On"), TextDelta("e\n\n"), call]) == outline
    assert compute_outline([ReasoningDelta("Hm"), call, TextDelta("One")]) != outline
    assert compute_outline([TextDelta("One"), call]) != outline


# --- store


def test_messages_are_found_from_the_root_of_their_tenant() -> None:
    store = ReplayStore("model")
    build_chain(store, 3, "one")
    assert (follow(store, "one"), follow(store, "two")) == (3, 0)


def test_messages_take_no_more_than_their_budget() -> None:
    store = ReplayStore("model", max_bytes=10 * build_message(b"").nbytes)
    for number in range(50):
        build_chain(store, 1, str(number))
        assert store.nbytes <= 10 * build_message(b"").nbytes
    assert len(store) == 10
    assert follow(store, "49") == 1
    assert follow(store, "0") == 0


def test_a_message_is_evicted_before_its_parent() -> None:
    store = ReplayStore("model", max_bytes=10 * build_message(b"").nbytes)
    build_chain(store, 10, "long")
    build_chain(store, 1, "other")
    assert follow(store, "long") == 9


def test_replayed_messages_are_evicted_last() -> None:
    store = ReplayStore("model", max_bytes=10 * build_message(b"").nbytes)
    used = build_chain(store, 2, "used")
    for number in range(50):
        store.touch(used)
        build_chain(store, 1, str(number))
    assert follow(store, "used") == 2


# --- disk


def open_store(directory: Path, model: str = "model", **options: int) -> ReplayStore:
    return ReplayStore(model, disk=SqliteReplays(directory, model, **options))


def test_messages_are_found_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    chain = build_chain(store, 3)
    store.close()
    restarted = open_store(tmp_path)
    assert follow(restarted) == 3
    (first,) = restarted.find_children(restarted.get_root(""))
    assert (first.id, first.tokens, first.call_ids) == (chain[0].id, chain[0].tokens, chain[0].call_ids)
    assert follow(open_store(tmp_path, "other model")) == 0


def test_the_file_is_private_and_contains_no_text(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(build_message(store.get_root(""), "a very secret sentence"))
    store.close()
    file = tmp_path / FILE_NAME
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"secret" not in file.read_bytes()


def test_the_file_is_bounded_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=100_000)
    used = build_chain(store, 1, "used")
    for number in range(1000):
        store.add(build_message(store.get_root(str(number)), tokens=20))
        if not number % 10:
            store.touch(used)
    store.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        ((size,),) = connection.execute("SELECT sum(nbytes) FROM replays")
    assert size <= 100_000
    restarted = open_store(tmp_path)
    assert (follow(restarted, "used"), follow(restarted, "999"), follow(restarted, "1")) == (1, 1, 0)


def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no table" * 1000)
    store = open_store(tmp_path)
    assert follow(store) == 0
    build_chain(store, 1, "lost with the damaged file")
    build_chain(store, 1)
    store.close()
    assert follow(open_store(tmp_path)) == 1


def test_a_directory_that_cannot_be_written_leaves_the_messages_in_ram(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = open_store(tmp_path / "file")
    build_chain(store, 2)
    store.close()
    assert follow(store) == 2


def test_clearing_removes_the_messages_of_one_model(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, model) for model in ("one", "two")]
    for store in stores:
        build_chain(store, 2)
        store.close()
    stores[0].clear()
    assert follow(stores[0]) == 0
    assert (follow(open_store(tmp_path, "one")), follow(open_store(tmp_path, "two"))) == (0, 2)
    remove_replays(tmp_path)
    assert follow(open_store(tmp_path, "two")) == 0


# --- text


@hypothesis.given(st.lists(st.sampled_from(["a", "bc", "\ue000"]), max_size=30).map("".join))
def test_offsets_without_separators_lead_back_to_the_rendered_text(raw: str) -> None:
    plain = PlainText(raw, "\ue000", MediaPlaceholders())
    assert plain.text == raw.replace("\ue000", "")
    for offset in range(len(plain.text)):
        assert raw[plain.to_raw(offset)] == plain.text[offset]
        assert plain.from_raw(plain.to_raw(offset)) == offset
