"""The store of batches: a process that is killed at any point loses no result and repeats none."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.errors import InvalidArgument
from afterglow.server.batches.lines import BatchLine
from afterglow.server.batches.store import BatchStore, LineResult, StoredBatch

LINES = 6


def add_batch(store: BatchStore) -> StoredBatch:
    file = store.add_file(io.BytesIO(b"x"), salt="", filename="in.jsonl", purpose="batch")
    return store.add_batch(
        salt="", endpoint="/v1/completions", input_file_id=file.id, completion_window="24h", window_seconds=86400
    )


def build_result(number: int) -> LineResult:
    return LineResult(number=number, is_error=number % 3 == 0, document=json.dumps({"number": number}))


def run_batch(store: BatchStore, batch: StoredBatch) -> None:
    """Do what the runner does, without a model."""
    if batch.in_progress_at is None:
        lines = [BatchLine(number, f"id {number}", "/v1/completions", None, 0, 1) for number in range(1, LINES)]
        store.add_lines(batch.id, lines, [build_result(LINES)], [], None)
    if not batch.is_ordered:
        store.set_order(batch.id, range(LINES, 0, -1))
    for line in store.list_lines(batch.id, pending=True):
        store.add_result(batch.id, build_result(line.number))
    store.set_status(batch.id, "finalizing")
    store.finish(batch.id, "completed", 3600)


def kill_at_call(number: int, work: Callable[[], None]) -> bool:
    """Run `work` in a fork that is killed before or after a system-level operation; return whether it was."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(function: Callable[..., object]) -> Callable[..., object]:
            def run(*positional: object, **named: object) -> object:
                nonlocal calls
                for moment in range(2):
                    if calls == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1
                    if moment == 0:
                        result = function(*positional, **named)
                return result

            return run

        class CountingConnection(sqlite3.Connection):
            execute = count(sqlite3.Connection.execute)  # type: ignore[assignment]

        connect = sqlite3.connect
        sqlite3.connect = lambda *positional, **named: connect(*positional, **named, factory=CountingConnection)
        os.fsync, Path.replace = count(os.fsync), count(Path.replace)  # type: ignore[assignment,method-assign]
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_exactly_one_result_for_each_line(tmp_path: Path):
    number, kills = 0, 0
    while True:
        store = BatchStore(tmp_path / str(number))
        batch = add_batch(store)
        store.close()

        def work(store: BatchStore = store, id: str = batch.id) -> None:
            run_batch(store, store.get_batch(id))

        was_killed = kill_at_call(number, work)
        current = store.get_batch(batch.id)
        if not current.is_final:
            run_batch(store, current)
        finished = store.get_batch(batch.id)
        documents = [
            json.loads(line)["number"]
            for id in (finished.output_file_id, finished.error_file_id)
            for line in store.get_path(id).read_text().splitlines()
        ]
        assert documents == [1, 2, 4, 5, 3, 6], f"killed at {number}"
        assert finished.counts["total"] == LINES
        assert sorted(path.name for path in (store.directory / "files").iterdir()) == sorted(
            file.id for file in store.list_files(salt="")
        )
        store.close()
        if not was_killed:
            break
        number, kills = number + 5, kills + 1  # every fifth point: before and after operations alternate
    assert kills > 8


def test_a_second_result_of_a_line_is_not_stored(tmp_path: Path):
    store = BatchStore(tmp_path)
    batch = add_batch(store)
    for text in ("first", "second"):
        store.add_result(batch.id, LineResult(number=1, is_error=False, document=text))
    assert list(store.list_results(batch.id)) == ["first"]


def test_a_batch_is_claimed_by_one_process(tmp_path: Path):
    store, other = BatchStore(tmp_path), BatchStore(tmp_path)
    batch = add_batch(store)
    with store.claim(batch.id) as is_first, other.claim(batch.id) as is_second:
        assert (is_first, is_second) == (True, False)
    with other.claim(batch.id) as is_claimed:
        assert is_claimed


def test_a_tenant_cannot_store_more_than_its_limit(tmp_path: Path):
    store = BatchStore(tmp_path)
    store.add_file(io.BytesIO(b"12345"), salt="a", filename="f", purpose="batch", max_total_bytes=8)
    with pytest.raises(InvalidArgument, match="has 5 bytes; 5 of 8 are in use"):
        store.add_file(io.BytesIO(b"12345"), salt="a", filename="f", purpose="batch", max_total_bytes=8)
    store.add_file(io.BytesIO(b"12345"), salt="b", filename="f", purpose="batch", max_total_bytes=8)
    assert len(list((tmp_path / "files").iterdir())) == 2


def test_expired_files_and_old_batches_are_deleted_unless_a_batch_needs_them(tmp_path: Path):
    store = BatchStore(tmp_path)
    old = store.add_file(io.BytesIO(b"x"), salt="", filename="f", purpose="batch", seconds=-1)
    needed = store.add_file(io.BytesIO(b"x"), salt="", filename="f", purpose="batch", seconds=-1)
    new = store.add_file(io.BytesIO(b"x"), salt="", filename="f", purpose="batch", seconds=100)
    store.add_batch(salt="", endpoint="", input_file_id=needed.id, completion_window="", window_seconds=1)
    store.delete_expired(batch_seconds=100)
    assert {file.id for file in store.list_files(salt="")} == {needed.id, new.id}
    assert not store.get_path(old.id).exists()
    ended = store.list_unfinished()[0]
    store.finish(ended.id, "failed", 3600)
    store.delete_expired(batch_seconds=100)
    assert store.get_batch(ended.id) is not None
    store.delete_expired(batch_seconds=-1)
    assert store.get_batch(ended.id) is None


def test_content_that_a_killed_upload_left_is_deleted_after_an_hour(tmp_path: Path):
    store = BatchStore(tmp_path)
    file = store.add_file(io.BytesIO(b"x"), salt="", filename="f", purpose="batch")
    new, old = store.get_path("file-new.partial"), store.get_path("file-old")
    for path in (new, old):
        path.write_bytes(b"x")
    for path in (old, store.get_path(file.id)):
        os.utime(path, (0, 0))
    store.delete_expired(batch_seconds=100)
    assert {path.name for path in (tmp_path / "files").iterdir()} == {file.id, new.name}


def test_pages_of_files_are_filtered_by_purpose(tmp_path: Path):
    store = BatchStore(tmp_path)
    for purpose in ("batch", "batch_output"):
        store.add_file(io.BytesIO(b"x"), salt="", filename="f", purpose=purpose)
    assert [file.purpose for file in store.list_files(salt="", purpose="batch_output")] == ["batch_output"]
    assert [file.purpose for file in store.list_files(salt="", is_ascending=True)] == ["batch", "batch_output"]
