"""Rows of runs: append-only, and every change is noticed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from afterglow.agents.store import RunStore
from afterglow.errors import InvalidArgument, InvalidState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "runs.db"
    with RunStore(path) as store:
        for number in range(4):
            store.append(f"run-{number % 2}", [("message", {"number": number}), ("spent", {})])
    return path


def tamper(path: Path, statement: str) -> str:
    """Change the file without our triggers and return what `verify` says."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DROP TRIGGER IF EXISTS rows_are_not_changed")
    connection.execute("DROP TRIGGER IF EXISTS rows_are_not_removed")
    connection.execute(statement)
    connection.close()
    with RunStore(path) as store:
        return store.verify().problem


def test_the_chain_of_all_rows_is_verified(path: Path) -> None:
    with RunStore(path) as store:
        report = store.verify()
        assert (report.rows, report.problem) == (8, "")
        assert store.verify(report.head).problem == ""
        assert [row.body for row in store.read("run-1") if row.kind == "message"] == [{"number": 1}, {"number": 3}]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE rows SET body = '{\"number\": 9}' WHERE id = 3", "row 3 of the run run-1 was changed"),
        ("UPDATE rows SET kind = 'result' WHERE id = 3", "row 3 of the run run-1 was changed"),
        ("UPDATE rows SET run = 'run-0' WHERE id = 3", "row 3 of the run run-0 was changed"),
        ("UPDATE rows SET time = 0 WHERE id = 8", "row 8 of the run run-1 was changed"),
        ("UPDATE rows SET body = CAST(body AS BLOB) WHERE id = 3", "row 3 of the run run-1 was changed"),
        ("UPDATE rows SET digest = 'x' WHERE id = 1", "row 1 of the run run-0 was changed"),
        ("DELETE FROM rows WHERE id = 1", "row 1 is missing"),
        ("DELETE FROM rows WHERE id = 5", "row 5 is missing"),
        ("DELETE FROM rows WHERE id > 6", "the rows from 7 to 8 are missing"),
    ],
)
def test_a_tampered_audit_is_found(path: Path, statement: str, problem: str) -> None:
    assert tamper(path, statement) == problem


@pytest.mark.parametrize("value", ["CAST(x'7b22ff227d' AS TEXT)", "'no JSON'"], ids=["no UTF-8", "no JSON"])
def test_a_row_that_cannot_be_read_is_an_error_that_names_the_file(path: Path, value: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DROP TRIGGER rows_are_not_changed")
    connection.execute(f"UPDATE rows SET body = {value}, kind = 'started' WHERE id = 3")
    connection.close()
    with RunStore(path) as store:
        for read in (lambda: store.read("run-1"), store.list_runs):
            with pytest.raises(InvalidState, match=r"runs\.db cannot be read"):
                read()


def test_a_damaged_file_is_an_error_that_names_it(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))  # the first page has the schema
    with RunStore(path) as store, pytest.raises(InvalidState, match=r"runs\.db cannot be read"):
        store.verify()


def test_a_file_in_no_directory_is_an_error_that_names_it(path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"`store` .*runs\.db/more\.db cannot be opened"):
        RunStore(path / "more.db")


def test_a_removed_end_with_its_counter_is_found_by_a_digest_that_was_noted(path: Path) -> None:
    with RunStore(path) as store:
        head = store.verify().head
    tamper(path, "DELETE FROM rows WHERE id > 6")
    assert tamper(path, "UPDATE sqlite_sequence SET seq = 6") == ""
    with RunStore(path) as store:
        assert "given digest is missing" in store.verify(head).problem


def test_rows_cannot_be_changed_by_accident(path: Path) -> None:
    connection = sqlite3.connect(path)
    for statement in ("UPDATE rows SET body = ''", "DELETE FROM rows"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


def test_a_step_is_written_as_a_whole(path: Path) -> None:
    with RunStore(path) as store:
        with pytest.raises(TypeError):
            store.append("run-0", [("message", {}), ("message", {"value": object()})])
        assert store.verify().rows == 8


def test_only_the_user_can_read_the_file(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_of_something_else_and_an_unknown_run_are_errors(tmp_path: Path, path: Path) -> None:
    (tmp_path / "text").write_text("This is not a database." * 100)
    with pytest.raises(InvalidArgument, match="not a file of runs"):
        RunStore(tmp_path / "text")
    with RunStore(path) as store, pytest.raises(InvalidArgument, match="no run 'x'"):
        store.read("x")
