"""The disk tier never causes a wrong or failed answer, whatever happens to its files, its disk or its process."""

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
from afterglow.engine.kvcache.disk import writer as disk_writer
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from support import killed
from support.play import KINDS, ask, fake, prompt, reference

pytestmark = pytest.mark.slow

MakeEngine = Callable[..., Engine]
ENTRIES = prompt(80, 1)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.fixture
def make_engine(folder: Path) -> Iterator[MakeEngine]:
    """Make engines on fake backends with a disk tier in one folder; they are closed at the end of the test."""
    with ExitStack() as stack:

        def make(kind: str = "attention", directory: Path = folder, **options) -> Engine:
            engine = fake(
                kind, EngineSettings(block_size=8, ram_cache_bytes=10**7, disk_cache_directory=directory), **options
            )
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield make


def write_conversation(make_engine: MakeEngine, kind: str = "attention") -> None:
    """Write one conversation to the folder."""
    engine = make_engine(kind)
    ask(engine, ENTRIES, boundaries=frozenset({40}), max_tokens=4)
    engine.close()


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cells", ".state", ".logits"))


def get_writer(engine: Engine) -> disk_writer.DiskWriter:
    assert engine.prefix_cache.store.disk_tier is not None
    return engine.prefix_cache.store.disk_tier.writer


def ask_and_check(engine: Engine, kind: str = "attention") -> int:
    """Ask for the conversation, check its tokens, and return how many were cached."""
    answer = ask(engine, ENTRIES, max_tokens=4)
    assert answer.tokens == reference(lambda: fake(kind), ENTRIES, max_tokens=4)
    return answer.cached


# --- damaged files


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


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@every_kind
def test_a_damaged_file_is_a_miss_and_is_removed(make_engine, folder, kind, damage):
    write_conversation(make_engine, kind)
    engine = make_engine(kind)
    before = list_files(folder)
    for path in before:
        damage(path)
    assert ask_and_check(engine, kind) == 0
    assert get_writer(engine).flush()
    if damage is not a_folder:
        remaining = [path for path in before if path.is_symlink() or path.exists()]
        assert len(remaining) < len(before), "the file that was tried is removed"
    assert ask_and_check(engine, kind) > 0, "later requests are cached again"


@every_kind
def test_a_file_with_other_tokens_and_a_valid_checksum_is_a_miss(make_engine, folder, kind):
    write_conversation(make_engine, kind)
    for path in list_files(folder):
        loaded = disk_files.load_file(path)
        changed = loaded.file.entries.copy()
        changed[0] ^= 1
        file = replace(loaded.file, entries=changed, payload=[bytes(loaded.payload)])
        disk_files.write_file(path.parent, file)
    assert ask_and_check(make_engine(kind), kind) == 0


def test_a_file_of_another_model_in_this_folder_is_a_miss(make_engine, folder):
    write_conversation(make_engine)
    for path in list_files(folder):
        loaded = disk_files.load_file(path)
        disk_files.write_file(path.parent, replace(loaded.file, model=bytes(32), payload=[bytes(loaded.payload)]))
    assert ask_and_check(make_engine()) == 0


def test_a_file_with_the_name_of_another_is_a_miss(make_engine, folder):
    write_conversation(make_engine)
    first, second = list_files(folder)[:2]
    content = first.read_bytes()
    second.write_bytes(content)
    engine = make_engine()
    ask_and_check(engine)
    assert get_writer(engine).counters.corrupt_files <= 1


def test_a_damaged_block_loses_only_the_blocks_after_it(make_engine, folder):
    write_conversation(make_engine)
    (middle,) = [path for path in list_files(folder) if disk_files.read_header(path)[0].start == 40]
    flipped(middle)
    engine = make_engine()
    assert ask_and_check(engine) == 40
    assert not middle.exists() or get_writer(engine).flush()


# --- the index


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut_off, emptied, replaced, removed], ids=lambda damage: damage.__name__)
@every_kind
def test_a_damaged_index_is_rebuilt_from_the_files(make_engine, folder, kind, damage):
    write_conversation(make_engine, kind)
    damage(folder / disk_index.INDEX_FILE_NAME)
    assert ask_and_check(make_engine(kind), kind) > 0


def test_index_and_files_agree_after_a_start(make_engine, folder):
    write_conversation(make_engine)
    first, second, third = list_files(folder)[:3]
    first.unlink()
    cut_off(second)
    with sqlite3.connect(folder / disk_index.INDEX_FILE_NAME) as connection:
        connection.execute("DELETE FROM items WHERE name IN (?, ?)", (second.name, third.name))
    connection.close()
    (third.parent / f"{third.name}.999999999.abc.tmp").write_bytes(b"half")
    (third.parent / f"{third.name}.{os.getpid()}.abc.tmp").write_bytes(b"of a live process")
    make_engine()
    remaining = {path.name for path in third.parent.iterdir()}
    with sqlite3.connect(folder / disk_index.INDEX_FILE_NAME) as connection:
        listed = {name for (name,) in connection.execute("SELECT name FROM items")}
    connection.close()
    assert third.name in listed, "an intact file is added to the index"
    assert listed == {name for name in remaining if not name.endswith(".tmp")}
    assert {name.split(".")[2] for name in remaining if name.endswith(".tmp")} == {str(os.getpid())}


# --- I/O errors


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def no_space(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*arguments: object) -> int:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("fail", [no_space, read_only])
@every_kind
def test_write_errors_cause_one_warning(make_engine, folder, monkeypatch, caplog, kind, fail):
    engine = make_engine(kind)
    monkeypatch.setattr(disk_files, "write_temporary", fail)
    for number in range(4):
        ask(engine, prompt(50, 10 + number))
        while engine.run_idle_task():
            pass
        assert get_writer(engine).flush()
    assert ask_and_check(engine, kind) == 0
    assert ask_and_check(engine, kind) > 0
    assert len(list_warnings(caplog)) == 1
    assert list_files(folder) == []


def test_a_failed_write_leaves_no_file(make_engine, folder, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(disk_files.os, "fsync", no_space)
    ask_and_check(engine)
    engine.close()
    assert [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("index")] == []


def test_a_directory_that_cannot_be_created_causes_one_warning(make_engine, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    engine = make_engine(directory=tmp_path / "file" / "prefix")
    assert ask_and_check(engine) == 0
    assert len(list_warnings(caplog)) == 1


def test_a_directory_deleted_at_run_time_fails_no_request(make_engine, folder, caplog):
    write_conversation(make_engine)
    engine = make_engine()
    shutil.rmtree(folder)
    assert ask_and_check(engine) == 0
    engine.close()
    assert len(list_warnings(caplog)) <= 1


def test_an_index_that_stays_locked_fails_no_request(make_engine, folder, monkeypatch):
    monkeypatch.setattr(disk_index, "LOCK_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(disk_writer, "LISTING_TIMEOUT_SECONDS", 0.5)
    write_conversation(make_engine)
    locker = sqlite3.connect(folder / disk_index.INDEX_FILE_NAME, isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    engine = make_engine()
    started = time.monotonic()
    ask_and_check(engine)
    assert time.monotonic() - started < 60
    locker.close()


# --- directory permissions


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_accessible_to_other_users_is_rejected(make_engine, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidArgument, match="chmod 700"):
        make_engine()


def test_a_directory_of_another_user_is_rejected(make_engine, folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InvalidArgument, match="belongs to"):
        make_engine()


# --- killed processes


def kill_while_writing(folder: Path, kind: str, seed: int) -> None:
    """Start a process that writes, and kill it at a random time."""
    delay = random.Random(seed).uniform(0.0, 0.4)
    command = [sys.executable, killed.__file__, str(folder), kind, str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        writer.kill()


def check_after_kill(folder: Path, kind: str) -> int:
    """Check that tokens are right, no file is damaged or left over, and index and files agree.

    Return the number of reused entries.
    """
    engine = fake(kind, killed.settings(folder), sequences=2)
    writer = get_writer(engine)
    assert writer.flush(120)  # a start waits a few seconds for the list of files, which a busy machine can exceed
    names = {path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("index")}
    with disk_index.open_index(folder) as index:
        assert sorted(row.name for row in index.list_rows()) == sorted(names)
    assert sum(path.stat().st_size for path in list_files(folder)) <= 150_000
    reused = 0
    for number in range(killed.PROMPTS):
        entries = prompt(40 + 3 * number, number)
        answer = ask(engine, entries, max_tokens=4)
        assert answer.tokens == reference(lambda: fake(kind), entries, max_tokens=4)
        reused += answer.cached
    assert writer.counters.corrupt_files == 0
    engine.close()
    return reused


def kill_and_check(folder: Path, kills: int) -> None:
    reused = 0
    for number in range(kills):
        kind = ["attention", "hybrid", "window", "recurrent"][number % 4]
        kill_while_writing(folder / kind, kind, number)
        reused += check_after_kill(folder / kind, kind)
    assert reused > 50 * kills, "the files of killed processes are reused"


@pytest.mark.slow
def test_20_kills_while_writing(tmp_path):
    kill_and_check(tmp_path, 20)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_200_kills_while_writing(tmp_path):
    kill_and_check(tmp_path, 200)


@pytest.mark.slow
def test_one_of_two_writing_processes_is_killed(tmp_path):
    command = [sys.executable, killed.__file__, str(tmp_path / "both"), "hybrid"]
    writers = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE, text=True) for seed in "13"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    time.sleep(0.5)
    writers[0].kill()
    time.sleep(0.5)
    assert writers[1].poll() is None, "the other process continues"
    writers[1].kill()
    for writer in writers:
        writer.communicate()
    assert check_after_kill(tmp_path / "both", "hybrid") > 0
