"""The disk tier is never wrong and never in the way, whatever happens to its files, its disk or its process."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk import index as disk_index
from afterglow.engine.kvcache.disk import writer as disk
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from support import killed
from support.play import ask, fake, prompt, reference

MakeEngine = Callable[..., Engine]
ENTRIES = prompt(80, 1)
every_kind = pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.fixture
def make(folder: Path) -> Iterator[MakeEngine]:
    """Engines that keep what they compute in one folder; closed at the end of the test."""
    with ExitStack() as stack:

        def make(kind: str = "attention", directory: Path = folder, **options) -> Engine:
            engine = fake(
                kind, EngineSettings(block_size=8, ram_cache_bytes=10**7, disk_cache_directory=directory), **options
            )
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield make


def written(make: MakeEngine, kind: str = "attention") -> None:
    """A folder with one conversation in it."""
    engine = make(kind)
    ask(engine, ENTRIES, boundaries=frozenset({40}), max_tokens=4)
    engine.close()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cells", ".state"))


def the(engine: Engine) -> disk.DiskWriter:
    assert engine.prefix_cache.store.disk_tier is not None
    return engine.prefix_cache.store.disk_tier.writer


def answers_rightly(engine: Engine, kind: str = "attention") -> int:
    """Ask for the conversation; how much of it was cached."""
    answer = ask(engine, ENTRIES, max_tokens=4)
    assert answer.tokens == reference(lambda: fake(kind), ENTRIES, max_tokens=4)
    return answer.cached


# --- files that are not what they were


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def flipped_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[disk_files.HEADER_OFFSET_BYTES + 40] ^= 4
    path.write_bytes(data)


def replaced(path: Path) -> None:
    path.write_bytes(b"something else" * 100)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def removed(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES = [cut_off, emptied, flipped, flipped_header, replaced, longer, removed, a_folder, a_link]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@every_kind
def test_a_damaged_file_is_a_miss_and_is_removed(make, folder, kind, damage):
    written(make, kind)
    engine = make(kind)
    before = files(folder)
    for path in before:
        damage(path)
    assert answers_rightly(engine, kind) == 0
    assert the(engine).flush()
    if damage is not a_folder:
        touched = [path for path in before if path.is_symlink() or path.exists()]
        assert len(touched) < len(before), "what was tried is gone"
    assert answers_rightly(engine, kind) > 0, "and the service goes on"


@every_kind
def test_a_file_with_other_tokens_is_a_miss_though_its_checksum_is_right(make, folder, kind):
    written(make, kind)
    for path in files(folder):
        loaded = disk_files.load_file(path)
        changed = loaded.file.entries.copy()
        changed[0] ^= 1
        item = replace(loaded.file, entries=changed, payload=[bytes(loaded.payload)])
        disk_files.write_file(path.parent, item)
    assert answers_rightly(make(kind), kind) == 0


def test_cells_of_another_model_in_the_right_place_are_a_miss(make, folder):
    written(make)
    for path in files(folder):
        loaded = disk_files.load_file(path)
        disk_files.write_file(path.parent, replace(loaded.file, model=bytes(32), payload=[bytes(loaded.payload)]))
    assert answers_rightly(make()) == 0


def test_a_file_under_the_name_of_another_is_a_miss(make, folder):
    written(make)
    first, second = files(folder)[:2]
    content = first.read_bytes()
    second.write_bytes(content)
    engine = make()
    answers_rightly(engine)
    assert the(engine).counters.corrupt_files <= 1


def test_one_broken_segment_costs_only_what_comes_after_it(make, folder):
    written(make)
    (middle,) = [path for path in files(folder) if disk_files.read_header(path)[0].start == 40]
    flipped(middle)
    engine = make()
    assert answers_rightly(engine) == 40
    assert not middle.exists() or the(engine).flush()


# --- the table


@pytest.mark.parametrize("damage", [cut_off, emptied, replaced, removed], ids=lambda damage: damage.__name__)
@every_kind
def test_a_lost_table_is_made_again_from_the_files(make, folder, kind, damage):
    written(make, kind)
    for suffix in ("-wal", "-shm"):
        (folder / f"{disk_index.INDEX_FILE_NAME}{suffix}").unlink(missing_ok=True)
    damage(folder / disk_index.INDEX_FILE_NAME)
    assert answers_rightly(make(kind), kind) > 0


def test_table_and_files_agree_after_a_start(make, folder):
    written(make)
    first, second, third = files(folder)[:3]
    first.unlink()
    cut_off(second)
    with sqlite3.connect(folder / disk_index.INDEX_FILE_NAME) as connection:
        connection.execute("DELETE FROM items WHERE name IN (?, ?)", (second.name, third.name))
    connection.close()
    (third.parent / f"{third.name}.999999999.abc.tmp").write_bytes(b"half")
    (third.parent / f"{third.name}.{os.getpid()}.abc.tmp").write_bytes(b"of one that lives")
    make()
    left = {path.name for path in third.parent.iterdir()}
    with sqlite3.connect(folder / disk_index.INDEX_FILE_NAME) as connection:
        listed = {name for (name,) in connection.execute("SELECT name FROM items")}
    connection.close()
    assert third.name in listed, "what is whole is taken in"
    assert listed == {name for name in left if not name.endswith(".tmp")}
    assert {name.split(".")[2] for name in left if name.endswith(".tmp")} == {str(os.getpid())}


# --- disks that refuse


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def no_space(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*arguments: object) -> int:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("refusal", [no_space, read_only])
@every_kind
def test_a_disk_that_refuses_costs_one_warning(make, folder, monkeypatch, caplog, kind, refusal):
    engine = make(kind)
    monkeypatch.setattr(disk_files, "write_file", refusal)
    for number in range(4):
        ask(engine, prompt(50, 10 + number))
        while engine.run_idle_task():
            pass
        assert the(engine).flush()
    assert answers_rightly(engine, kind) == 0
    assert answers_rightly(engine, kind) > 0
    assert len(warnings(caplog)) == 1
    assert files(folder) == []


def test_a_write_that_fails_in_the_middle_leaves_nothing(make, folder, monkeypatch):
    engine = make()
    monkeypatch.setattr(disk_files.os, "fsync", no_space)
    answers_rightly(engine)
    engine.close()
    assert [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("index")] == []


def test_a_directory_that_cannot_be_made_costs_one_warning(make, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    engine = make(directory=tmp_path / "file" / "prefix")
    assert answers_rightly(engine) == 0
    assert len(warnings(caplog)) == 1


def test_a_directory_that_vanishes_costs_no_answer(make, folder, caplog):
    written(make)
    engine = make()
    shutil.rmtree(folder)
    assert answers_rightly(engine) == 0
    engine.close()
    assert len(warnings(caplog)) <= 1


def test_a_table_that_is_locked_for_ever_costs_no_answer(make, folder, monkeypatch):
    monkeypatch.setattr(disk_index, "LOCK_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(disk, "LISTING_TIMEOUT_SECONDS", 0.5)
    written(make)
    locker = sqlite3.connect(folder / disk_index.INDEX_FILE_NAME, isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    engine = make()
    started = time.monotonic()
    answers_rightly(engine)
    assert time.monotonic() - started < 5
    locker.close()


# --- directories of others


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_is_open_to_others_is_refused(make, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidArgument, match="chmod 700"):
        make()


def test_a_directory_of_another_user_is_refused(make, folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InvalidArgument, match="belongs to"):
        make()


# --- processes that die


def kill_at_random(folder: Path, kind: str, seed: int) -> None:
    """Start a process that writes, and kill it some moment later."""
    moment = random.Random(seed).uniform(0.0, 0.4)
    command = [sys.executable, killed.__file__, str(folder), kind, str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moment)
        writer.kill()


def check_after_death(folder: Path, kind: str) -> int:
    """No wrong token, no corrupt load, nothing left over, table and files agree. Entries that were reused."""
    engine = fake(kind, killed.settings(folder), sequences=2)
    shelf = engine.prefix_cache.store.disk_tier
    assert shelf is not None
    names = {path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("index")}
    rows = shelf.writer.query_index(lambda index: [row.name for row in index.list_rows()])
    assert rows is not None
    assert sorted(rows) == sorted(names)
    assert sum(path.stat().st_size for path in files(folder)) <= 150_000
    reused = 0
    for number in range(killed.PROMPTS):
        entries = prompt(40 + 3 * number, number)
        answer = ask(engine, entries, max_tokens=4)
        assert answer.tokens == reference(lambda: fake(kind), entries, max_tokens=4)
        reused += answer.cached
    assert shelf.writer.counters.corrupt_files == 0
    engine.close()
    return reused


def survive(folder: Path, kills: int) -> None:
    reused = 0
    for number in range(kills):
        kind = ["attention", "hybrid", "window", "recurrent"][number % 4]
        kill_at_random(folder / kind, kind, number)
        reused += check_after_death(folder / kind, kind)
    assert reused > 50 * kills, "and it was of use"


def test_20_deaths_in_the_middle_of_writing(tmp_path):
    survive(tmp_path, 20)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_200_deaths_in_the_middle_of_writing(tmp_path):
    survive(tmp_path, 200)


def test_two_processes_write_and_one_dies(tmp_path):
    command = [sys.executable, killed.__file__, str(tmp_path / "both"), "hybrid"]
    writers = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE, text=True) for seed in "13"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    time.sleep(0.5)
    writers[0].kill()
    time.sleep(0.5)
    assert writers[1].poll() is None, "the other goes on"
    writers[1].kill()
    for writer in writers:
        writer.communicate()
    assert check_after_death(tmp_path / "both", "hybrid") > 0
