"""SQLite files of the server and of agents: private, transactional, shared by threads."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from afterglow.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS words (word TEXT)"


def read_words(database: Database) -> list[str]:
    with database.connection() as connection:
        return [word for (word,) in connection.execute("SELECT word FROM words ORDER BY rowid")]


def test_a_failed_transaction_changes_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "words.db", SCHEMA)
    with database.transaction() as connection:
        connection.execute("INSERT INTO words VALUES ('kept')")
    with pytest.raises(sqlite3.OperationalError), database.transaction() as connection:
        connection.executemany("INSERT INTO words VALUES (?)", [("lost",)]).execute("INSERT INTO nothing VALUES (1)")
    assert read_words(database) == ["kept"]
    database.close()
    assert read_words(database) == ["kept"], "a closed file is opened again"
    database.close()


def test_the_file_and_its_directory_are_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "words.db"
    database = Database(path, SCHEMA)
    assert not path.exists(), "nothing is created before it is used"
    with database.transaction():
        pass
    database.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_threads_share_a_connection(tmp_path: Path) -> None:
    database = Database(tmp_path / "words.db", SCHEMA)

    def insert() -> None:
        for number in range(20):
            with database.transaction() as connection:
                connection.execute("INSERT INTO words VALUES (?)", (str(number),))

    threads = [threading.Thread(target=insert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_words(database)) == 80
    database.close()


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "words.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError), Database(path, SCHEMA).transaction():
        pass
    assert path.read_bytes().startswith(b"no database")
