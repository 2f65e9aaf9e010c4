"""The index is a cache of the files: a disk that fails does not cost the table, and a lost table costs no pins."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache, disk
from afterglow.engine.kvcache.disk import index as disk_index
from afterglow.engine.kvcache.disk import writer as disk_writer
from afterglow.engine.kvcache.disk.index import INDEX_FILE_NAME, PINNED_FOREVER, open_index
from afterglow.engine.types.settings import EngineSettings
from support import other_process
from support.play import ask, fake, prompt

pytestmark = pytest.mark.slow

ENTRIES = prompt(60, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with two conversations, the first of them pinned and used twice."""
    folder = tmp_path / "prefix"
    for number in (1, 2):
        run(folder, lambda engine, number=number: ask(engine, prompt(60, number)))
    (pinned,) = [stored for stored in disk.list_conversations(folder) if stored.first_entries[0] == ENTRIES[0]]
    disk.pin(folder, pinned.id)
    run(folder, lambda engine: ask(engine, [*ENTRIES, 5]))
    return folder


def run(folder: Path, work: Callable[[Engine], object], **options) -> None:
    """Run a function on an engine of its own."""
    engine = fake("attention", EngineSettings(block_size=8, disk_cache_directory=folder, **options))
    try:
        work(engine)
    finally:
        engine.close()


def read_rows(folder: Path) -> dict[str, tuple[int, bool]]:
    """Return hits and pin of each file, as the table has them."""
    connection = sqlite3.connect(folder / INDEX_FILE_NAME)
    rows = connection.execute("SELECT name, hits, pinned FROM items").fetchall()
    connection.close()
    return {name: (hits, bool(pinned)) for name, hits, pinned in rows}


def read_pins(folder: Path) -> dict[str, int]:
    """Return the pin of each file, as the table has it."""
    with contextlib.closing(sqlite3.connect(folder / INDEX_FILE_NAME)) as connection:
        return dict(connection.execute("SELECT name, pinned FROM items").fetchall())


def list_pinned(folder: Path) -> set[str]:
    return {name for name, (_, pinned) in read_rows(folder).items() if pinned}


ASK_ON_FULL_DISK = """
import resource
from support.play import ask, fake, prompt
from afterglow.engine.types.settings import EngineSettings
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
engine = fake("attention", EngineSettings(block_size=8, disk_cache_directory=Path(sys.argv[1])))
cached = ask(engine, [*prompt(60, 1), 5]).cached
engine.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(cached, engine.prefix_cache.store.disk_tier.writer.counters.io_errors)
"""


def test_a_full_disk_while_the_index_is_opened_costs_neither_table_nor_pins_nor_the_warm_start(folder):
    """No byte can be written in the other process: a limit on the size of files is 0."""
    before = read_rows(folder)
    assert any(hits for hits, _ in before.values())
    cached, io_errors = map(int, other_process.run_python(ASK_ON_FULL_DISK, folder).split())
    assert io_errors > 0, "nothing could be written"
    assert cached == 61, "the files can still be read"
    assert read_rows(folder) == before


CLEAR_ON_FULL_DISK = """
import resource
from afterglow.engine.inspect import cache, disk
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
disk.clear(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_full_disk_can_be_cleared(folder):
    other_process.run_python(CLEAR_ON_FULL_DISK, folder)
    assert not list(folder.rglob("*.cells"))
    run(folder, lambda engine: None)
    assert disk.list_conversations(folder) == []


def test_a_locked_index_is_kept_and_opened_later(folder, monkeypatch):
    monkeypatch.setattr(disk_index, "LOCK_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(disk_writer, "RETRY_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(disk_writer, "POLL_INTERVAL_SECONDS", 0.05)
    before = read_rows(folder)
    locker = sqlite3.connect(folder / INDEX_FILE_NAME, isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")

    def work(engine: Engine) -> None:
        writer = engine.prefix_cache.store.disk_tier.writer
        assert ask(engine, [*ENTRIES, 5]).cached == 61, "the files are listed without the index"
        assert writer._index.in_memory
        locker.execute("COMMIT")
        locker.close()
        deadline = time.monotonic() + 120
        while writer._index is None or writer._index.in_memory:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    run(folder, work)
    assert before.items() <= read_rows(folder).items()


def damage_first_page(path: Path) -> None:
    path.write_bytes(b"not a database" + path.read_bytes()[14:])


def damage_last_page(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096] + b"\xff" * 4096)


def damage_rows(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE items SET entries = x'010203', start = 'text'")
    connection.close()


def damage_schema(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE items RENAME COLUMN cells TO rows")
    connection.close()


def add_column(path: Path) -> None:
    """Replace the table by one of version 0.1, which has a further column."""
    older = disk_index.SCHEMA.replace("cells INTEGER NOT NULL", "aligned INTEGER NOT NULL, cells INTEGER NOT NULL")
    with sqlite3.connect(path) as connection:
        columns = ", ".join(row[1] for row in connection.execute("PRAGMA table_info(items)"))
        connection.executescript("DROP INDEX items_by_parent; ALTER TABLE items RENAME TO newer;" + older)
        connection.execute(f"INSERT INTO items ({columns}, aligned) SELECT {columns}, 0 FROM newer")
        connection.execute("DROP TABLE newer")
    connection.close()


def delete(path: Path) -> None:
    path.unlink()


DAMAGES = [damage_first_page, damage_last_page, damage_rows, damage_schema, add_column, delete]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("opened_by", ["an engine", "a command"])
def test_pins_are_rebuilt_from_the_files_if_the_table_is_lost(folder, damage, opened_by):
    pinned = list_pinned(folder)
    assert 0 < len(pinned) < len(read_rows(folder))
    damage(folder / INDEX_FILE_NAME)
    if opened_by == "an engine" or damage is delete:
        run(folder, lambda engine: ask(engine, [*ENTRIES, 5]))
    else:
        assert any(stored.pinned for stored in disk.list_conversations(folder))
    assert list_pinned(folder) >= pinned
    small = int(sum(path.stat().st_size for path in folder.rglob("*.cells")) * 1.3)
    for number in range(10, 16):
        run(folder, lambda engine, number=number: ask(engine, prompt(60, number)), disk_cache_bytes=small)
    run(folder, lambda engine: None)
    assert list_pinned(folder) >= pinned, "pinned files were not evicted"


def test_a_pin_with_an_expiry_is_rebuilt_from_the_files_if_the_table_is_lost(tmp_path):
    folder, forever, until = tmp_path / "prefix", prompt(60, 1), prompt(60, 2)

    def pin_both(engine: Engine) -> None:
        for entries, retention_seconds in ((forever, math.inf), (until, 3600)):
            cache.pin(engine, entries, retention_seconds=retention_seconds)
            ask(engine, entries)

    run(folder, pin_both)
    pins = read_pins(folder)
    assert {pin == PINNED_FOREVER for pin in pins.values() if pin} == {True, False}
    delete(folder / INDEX_FILE_NAME)
    run(folder, lambda engine: None)
    assert read_pins(folder) == pins
    for path in folder.rglob("*.*"):
        if path.stat().st_mtime > time.time():
            os.utime(path, (0, time.time() - 1))  # the pin has expired
    delete(folder / INDEX_FILE_NAME)
    run(folder, lambda engine: None)
    assert read_pins(folder) == {name: pin if pin == PINNED_FOREVER else 0 for name, pin in pins.items()}


def test_pins_of_an_older_version_are_moved_to_the_files(folder):
    pinned = list_pinned(folder)
    for path in folder.rglob("*.cells"):
        path.chmod(0o600)
    run(folder, lambda engine: None)
    (folder / INDEX_FILE_NAME).unlink()
    run(folder, lambda engine: None)
    assert list_pinned(folder) == pinned


def test_unpinned_files_stay_unpinned_if_the_table_is_lost(folder):
    for stored in disk.list_conversations(folder):
        disk.pin(folder, stored.id, pinned=False)
    (folder / INDEX_FILE_NAME).unlink()
    run(folder, lambda engine: None)
    assert list_pinned(folder) == set()


@pytest.mark.parametrize("error_number", [5, 24], ids=["EIO", "EMFILE"])
def test_a_file_that_cannot_be_read_now_is_not_deleted(folder, monkeypatch, error_number):
    (folder / INDEX_FILE_NAME).unlink()
    before = sorted(folder.rglob("*.cells"))

    def fail(path: Path) -> None:
        raise OSError(error_number, "the disk fails")

    monkeypatch.setattr(disk_index.disk_files, "read_header", fail)
    run(folder, lambda engine: None)
    monkeypatch.undo()
    assert sorted(folder.rglob("*.cells")) == before


def test_a_file_used_in_the_future_is_evicted_like_others(folder):
    """The clock was ahead for a while: without a limit, those files would never be evicted."""
    with sqlite3.connect(folder / INDEX_FILE_NAME) as connection:
        connection.execute("UPDATE items SET pinned = 0, last_used = ?", (time.time() + 10**9,))
    connection.close()
    files = [*folder.rglob("*.cells"), *folder.rglob("*.logits")]
    for path in files:
        path.chmod(0o600)
    old = set(read_rows(folder))
    small = int(sum(path.stat().st_size for path in files))
    for number in range(10, 14):
        run(folder, lambda engine, number=number: ask(engine, prompt(60, number)), disk_cache_bytes=small)
    run(folder, lambda engine: ask(engine, prompt(60, 10)), disk_cache_bytes=small)
    assert not old & set(read_rows(folder))


def test_an_eviction_that_is_interrupted_leaves_no_file_without_those_before_it(folder, monkeypatch):
    """Dependents are deleted first."""
    deleted: list[Path] = []
    monkeypatch.setattr(disk_index.disk_files, "delete_file", deleted.append)
    with open_index(folder) as index:
        (root,) = [row for row in index.list_rows() if not row.start and not row.is_pinned]
        index.evict(root)
    files = [disk_index.disk_files.read_header(path)[0] for path in deleted]
    assert len(files) > 5
    order = {file.key: position for position, file in enumerate(files)}
    assert all(order[file.key] < order[file.parent] for file in files if file.start)


def test_the_bytes_of_files_are_counted_without_reading_their_rows(folder):
    """A row contains the entries of its file, and the bytes are counted before every write."""
    connection = sqlite3.connect(folder / INDEX_FILE_NAME)
    for condition in ("", f"WHERE {disk_index.PINNED_CONDITION}"):
        query = f"EXPLAIN QUERY PLAN SELECT SUM(nbytes) FROM items {condition}"
        plan = [row[-1] for row in connection.execute(query, [0.0] if condition else [])]
        assert all("items USING" not in step or "COVERING INDEX" in step for step in plan), plan
        assert any("COVERING INDEX" in step for step in plan), plan
    connection.close()
