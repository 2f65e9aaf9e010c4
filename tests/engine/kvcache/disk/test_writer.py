"""The disk writer: writes when the engine is idle, hears of files that other processes remove, and writes no file
without those before it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache, disk
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk import tier as disk_tier
from afterglow.engine.kvcache.disk import writer as disk_writer
from afterglow.engine.kvcache.disk.index import INDEX_FILE_NAME, DiskIndex, open_index
from afterglow.engine.kvcache.disk.writer import DiskWriter, FileRemoved
from afterglow.engine.types.request import Finished
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState
from support import other_process
from support.play import KINDS, Answer, ask, fake, prompt, reference, request
from support.server_process import wait_until

pytestmark = pytest.mark.slow

MakeEngine = Callable[..., Engine]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.fixture
def make_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Make engines on fake backends with a disk tier in one folder; they are closed at the end of the test."""
    monkeypatch.setattr(disk_writer, "POLL_INTERVAL_SECONDS", 0.05)
    with ExitStack() as stack:

        def make(kind: str = "attention", ram_cache_bytes: int = 10**7, **options) -> Engine:
            settings = EngineSettings(
                block_size=8,
                ram_cache_bytes=ram_cache_bytes,
                disk_cache_directory=folder,
                **options,
            )
            engine = fake(kind, settings, sequences=2)
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield make


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cells", ".state", ".logits"))


def find_orphans(folder: Path) -> list[str]:
    """Return the files of blocks and checkpoints whose cells before them are not on disk."""
    stored = [disk_files.read_header(path)[0] for path in list_files(folder)]
    keys = {file.key for file in stored if file.kind == "cells"}
    needs_cells = bool(keys)
    return [file.name for file in stored if needs_cells and file.start and file.parent not in keys]


def get_writer(engine: Engine) -> DiskWriter:
    assert engine.prefix_cache.store.disk_tier is not None
    return engine.prefix_cache.store.disk_tier.writer


def flush(engine: Engine) -> None:
    while engine.run_idle_task():
        pass
    assert get_writer(engine).flush(120)


def count_known_files(engine: Engine) -> int:
    """Return the number of files that the engine takes for existing."""
    store = engine.prefix_cache.store
    store.refresh()
    assert store.disk_tier is not None
    others = [*store.disk_tier.list_checkpoints(), *store.disk_tier.list_logits()]
    return sum(block.is_on_disk for block in store.tree) + len(others)


def wait_until_heard(engine: Engine, count: int = 0) -> None:
    deadline = time.monotonic() + 120
    while count_known_files(engine) != count:
        assert time.monotonic() < deadline, f"{count_known_files(engine)} files are known instead of {count}"
        time.sleep(0.02)


def start_conversation(engine: Engine) -> list[int]:
    """Run the first turn; return all its entries."""
    entries = prompt(60, 1)
    entries += ask(engine, entries, boundaries=frozenset({40}), ignore_eos=True).tokens
    flush(engine)
    return entries


def continue_conversation(engine: Engine, entries: list[int]) -> list[int]:
    """Run the second turn; return all entries of the conversation."""
    longer = entries + prompt(20, 2)
    longer += ask(engine, longer, ignore_eos=True).tokens
    flush(engine)
    return longer


def ask_again(make_engine: MakeEngine, kind: str, entries: list[int]) -> Answer:
    """Ask a new engine, which has nothing but the files."""
    answer = ask(make_engine(kind), [*entries, 5], max_tokens=4)
    assert answer.tokens == reference(lambda: fake(kind), [*entries, 5], max_tokens=4)
    return answer


# --- writes wait for an idle engine


def run_beside_writes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, max_delay: float) -> Engine:
    """Return an engine that computes a request and has evicted sequences that are not on disk."""
    monkeypatch.setattr(disk_writer, "MAX_DELAY_SECONDS", max_delay)
    engine = make_engine()
    engine.submit(request("long", prompt(40, 1), max_tokens=1000, ignore_eos=True))
    for number in range(2, 5):  # in the other sequence
        engine.submit(request(str(number), prompt(40, number), max_tokens=1))
        while not any(isinstance(event, Finished) and event.request_id == str(number) for event in engine.step()):
            pass
    assert engine.is_busy
    return engine


def wait_until_written(engine: Engine) -> None:
    assert wait_until(120, lambda: get_writer(engine).counters.written_files > 0), "nothing was written"


def test_nothing_is_written_while_a_request_runs_and_everything_afterwards(make_engine, monkeypatch, folder):
    engine = run_beside_writes(make_engine, monkeypatch, max_delay=3600)
    time.sleep(0.5)
    assert list_files(folder) == []
    engine.cancel("long")
    engine.step()
    wait_until_written(engine)
    flush(engine)
    for number in range(2, 5):
        assert ask(make_engine(), prompt(40, number)).cached > 30


def test_a_write_waits_some_time_at_most(make_engine, monkeypatch):
    wait_until_written(run_beside_writes(make_engine, monkeypatch, max_delay=0.3))


def test_writes_do_not_wait_if_they_are_much_of_the_ram_tier(make_engine, monkeypatch):
    monkeypatch.setattr(disk_tier, "MAX_UNWRITTEN_FRACTION", 0.0)
    wait_until_written(run_beside_writes(make_engine, monkeypatch, max_delay=3600))


def test_files_that_other_processes_need_are_written_while_a_request_runs(make_engine, monkeypatch):
    make_shared = functools.partial(make_engine, write_through=True)
    wait_until_written(run_beside_writes(make_shared, monkeypatch, max_delay=3600))


def test_a_clear_while_a_request_runs_drops_the_writes_that_wait(make_engine, monkeypatch, folder):
    engine = run_beside_writes(make_engine, monkeypatch, max_delay=3600)
    get_writer(engine).clear()
    assert get_writer(engine).flush(120)
    assert list_files(folder) == []


# --- files removed by another process


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_an_engine_hears_of_files_that_another_process_removed(make_engine, folder, kind):
    engine = make_engine(kind)
    start_conversation(engine)
    assert count_known_files(engine) == len(list_files(folder)) > 0
    other_process.clear(folder)
    wait_until_heard(engine)
    assert list_files(folder) == [], "what was cleared is not written again by itself"


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard yet"])
@every_kind
def test_a_conversation_that_continues_after_a_clear_is_written_from_its_beginning(
    make_engine, folder, monkeypatch, kind, heard
):
    """The second turn would write its tail only. The process is then killed, so that close() cannot repair it."""
    if not heard:
        monkeypatch.setattr(disk_writer, "POLL_INTERVAL_SECONDS", 600.0)
    engine = make_engine(kind)
    entries = start_conversation(engine)
    disk.clear(folder)
    if heard:
        wait_until_heard(engine)
    longer = continue_conversation(engine, entries)
    assert find_orphans(folder) == []
    assert ask_again(make_engine, kind, longer).cached >= len(longer) - 1


@every_kind
def test_a_tail_whose_beginning_is_nowhere_is_not_written(make_engine, folder, monkeypatch, kind):
    """The beginning was only on disk, and the engine has not heard yet that it is gone."""
    first = make_engine(kind)
    entries = start_conversation(first)
    first.close()
    monkeypatch.setattr(disk_writer, "POLL_INTERVAL_SECONDS", 600.0)
    engine = make_engine(kind)
    monkeypatch.setattr(engine.prefix_cache.store.ram, "promote", lambda block, rows: None)  # RAM is full
    assert ask(engine, [*entries, 5], max_tokens=1).cached > 0
    disk.clear(folder)
    longer = continue_conversation(engine, [*entries, 5])
    assert find_orphans(folder) == []
    longer = continue_conversation(engine, longer)  # now it has heard: the tail was refused
    assert find_orphans(folder) == []
    assert ask_again(make_engine, kind, longer).cached >= len(longer) - 1


def test_a_conversation_in_ram_is_written_again_when_the_engine_closes(make_engine, folder):
    engine = make_engine()
    entries = start_conversation(engine)
    disk.clear(folder)
    wait_until_heard(engine)
    engine.close()
    assert ask_again(make_engine, "attention", entries).cached == len(entries) - 1


@every_kind
def test_a_close_right_after_a_clear_stores_conversations_from_their_beginning(make_engine, folder, monkeypatch, kind):
    """The beginning was only on disk and in the KV cache, and the engine has not heard yet that it is gone."""
    first = make_engine(kind)
    entries = start_conversation(first)
    first.close()
    monkeypatch.setattr(disk_writer, "POLL_INTERVAL_SECONDS", 600.0)
    engine = make_engine(kind)
    monkeypatch.setattr(engine.prefix_cache.store.ram, "promote", lambda block, rows: None)  # RAM is full
    assert ask(engine, [*entries, 5], max_tokens=1).cached > 0
    disk.clear(folder)
    longer = [*entries, 5, *prompt(40, 7)]
    ask(engine, longer, max_tokens=1)
    engine.close()
    assert find_orphans(folder) == []
    assert ask_again(make_engine, kind, longer).cached >= len(longer) - 1


def test_an_eviction_by_another_engine_is_heard(make_engine, folder):
    engine = make_engine()
    entries = start_conversation(engine)
    size = sum(path.stat().st_size for path in list_files(folder))
    other = make_engine(disk_cache_bytes=int(size * 1.2))
    ask(other, prompt(80, 9))
    flush(other)
    assert get_writer(other).counters.evictions > 0
    wait_until_heard(engine, len(list_files(folder)))
    longer = continue_conversation(engine, entries)
    assert find_orphans(folder) == []
    assert ask_again(make_engine, "attention", longer).cached >= len(longer) - 1


def test_files_removed_by_hand_are_heard_and_written_again(make_engine, folder):
    engine = make_engine()
    entries = start_conversation(engine)
    (middle,) = [path for path in list_files(folder) if disk_files.read_header(path)[0].start == 32]
    middle.unlink()
    wait_until_heard(engine, len(list_files(folder)))
    with open_index(folder) as index:
        assert middle.name not in {row.name for row in index.list_rows()}
    longer = continue_conversation(engine, entries)
    assert middle.exists()
    assert ask_again(make_engine, "attention", longer).cached >= len(longer) - 1


@every_kind
def test_a_directory_deleted_under_an_engine_is_written_again(make_engine, folder, kind):
    engine = make_engine(kind)
    entries = start_conversation(engine)
    while folder.exists():  # the engine may write to it meanwhile
        shutil.rmtree(folder, ignore_errors=True)
    wait_until_heard(engine)
    longer = continue_conversation(engine, entries)
    assert get_writer(engine).counters.io_errors == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    assert ask_again(make_engine, kind, longer).cached >= len(longer) - 1


def test_a_directory_deleted_while_its_index_is_opened_is_created_again(make_engine, folder, monkeypatch):
    deleted: list[Path] = []

    def open_index_of_deleted(directory: Path, **options: bool) -> DiskIndex:
        if not deleted:
            deleted.append(directory)
            shutil.rmtree(directory)
        return DiskIndex(directory, **options)

    monkeypatch.setattr(disk_writer, "DiskIndex", open_index_of_deleted)
    engine = make_engine()
    start_conversation(engine)
    assert deleted
    assert get_writer(engine).counters.io_errors == 0
    assert list_files(folder)


def test_an_index_deleted_under_two_engines_is_one_index_again(make_engine, folder):
    engines = [make_engine(), make_engine()]
    start_conversation(engines[0])
    for path in folder.glob(f"{INDEX_FILE_NAME}*"):
        path.unlink()
    for number, engine in enumerate(engines):
        ask(engine, prompt(60, 10 + number))
        flush(engine)
    with open_index(folder) as index:
        assert {row.name for row in index.list_rows()} == {path.name for path in list_files(folder)}


@pytest.mark.parametrize("content", [b"", b"garbage" * 10_000], ids=["emptied", "overwritten"])
def test_an_index_damaged_under_an_engine_is_rebuilt(make_engine, folder, content):
    engine = make_engine()
    entries = start_conversation(engine)
    (folder / INDEX_FILE_NAME).write_bytes(content)
    get_writer(engine).touch([list_files(folder)[0].name])  # notices it
    longer = continue_conversation(engine, entries)
    longer = continue_conversation(engine, longer)
    with open_index(folder) as index:
        assert {row.name for row in index.list_rows()} == {path.name for path in list_files(folder)}
    assert ask_again(make_engine, "attention", longer).cached >= len(longer) - 1


def test_a_deleted_file_is_reported(make_engine, folder):
    engine = make_engine()
    start_conversation(engine)
    writer = get_writer(engine)
    writer.drain_events()
    kind, key = disk_files.parse_file_name(list_files(folder)[0].name)
    writer.remove(kind, key)
    assert writer.flush()
    assert writer.drain_events() == [FileRemoved(kind, key)]


def test_clear_deletes_the_files_although_the_disk_has_just_failed(make_engine, folder):
    engine = make_engine()
    start_conversation(engine)
    writer = get_writer(engine)
    writer._failed_at = time.monotonic()
    cache.clear(engine)
    assert writer.flush()
    assert list_files(folder) == []


def test_a_file_that_is_written_again_before_its_removal_is_noticed_stays(make_engine, folder, monkeypatch):
    """The reader finds it gone. Another process writes it again before the writer's thread removes its row."""
    engine = make_engine()
    start_conversation(engine)
    writer, path = get_writer(engine), list_files(folder)[0]
    content = path.read_bytes()
    tasks: list[Callable[[], None]] = []
    with monkeypatch.context() as delayed:
        delayed.setattr(writer, "_submit", lambda task: tasks.append(task) or True)
        path.unlink()
        with pytest.raises(InvalidState):
            writer.load("cells", bytes.fromhex(path.stem))
    path.write_bytes(content)
    for task in tasks:
        writer._submit(task)
    writer.flush()
    assert path.exists()
    with open_index(folder) as index:
        assert index.find_row(path.name) is not None, "a file without a row would be in no budget"


def test_deleting_a_file_excludes_other_processes(make_engine, folder, monkeypatch):
    engine = make_engine()
    start_conversation(engine)
    writer, path = get_writer(engine), list_files(folder)[0]
    states: list[bool] = []
    delete_file = disk_files.delete_file

    def delete(path: Path) -> None:
        states.append(writer._index._connection.in_transaction)
        delete_file(path)

    monkeypatch.setattr(disk_files, "delete_file", delete)
    writer.remove("cells", bytes.fromhex(path.stem))
    writer.flush()
    assert states == [True]


@pytest.mark.parametrize("is_readable", [True, False], ids=["one file", "no index"])
def test_clear_reports_only_files_that_are_gone(make_engine, folder, monkeypatch, is_readable):
    engine = make_engine()
    start_conversation(engine)
    writer, (remaining, *others) = get_writer(engine), list_files(folder)
    writer.drain_events()
    delete_file = disk_files.delete_file
    if is_readable:
        monkeypatch.setattr(disk_files, "delete_file", lambda path: path == remaining or delete_file(path))
    else:
        monkeypatch.setattr(writer, "_open_index", lambda: None)
        monkeypatch.setattr(writer, "_index", None)
    writer.clear()
    writer.flush()
    assert list_files(folder) == ([remaining] if is_readable else [remaining, *others])
    removed = {event.key.hex() for event in writer.drain_events() if isinstance(event, FileRemoved)}
    assert removed == ({path.stem for path in others} if is_readable else set())


def test_a_block_removed_between_plan_and_load_is_a_miss(make_engine, folder):
    first = make_engine()
    entries = start_conversation(first)
    first.close()
    engine = make_engine()
    prefix_cache = engine.prefix_cache
    plan = prefix_cache.plan(engine.interner.intern([*entries, 5]))
    disk.clear(folder)
    wait_until_heard(engine)
    sequence, reused = prefix_cache.acquire(plan)
    assert reused == 0
    prefix_cache.release(sequence)
    assert ask(engine, [*entries, 5]).tokens == reference(lambda: fake("attention"), [*entries, 5])


# --- several engines at once


HAMMER = """
from support.play import ask, fake, prompt, reference
from afterglow.engine.kvcache.disk import writer
from afterglow.engine.types.settings import EngineSettings
import random, time
folder, kind, seed, turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
writer.POLL_INTERVAL_SECONDS = 0.02
settings = EngineSettings(block_size=8, ram_cache_bytes=50_000, disk_cache_directory=folder, disk_cache_bytes=20_000)
engine = fake(kind, settings, sequences=1)
store, rng, deadline = engine.prefix_cache.store, random.Random(seed), time.monotonic() + 60
counters = store.disk_tier.writer.counters
print("ready", flush=True)
while turns > 0 or not (store.disk_tier.counters.hits and counters.evictions):
    turns -= 1
    if time.monotonic() > deadline:
        assert store.disk_tier.counters.hits and counters.evictions, (store.disk_tier.counters, counters)
        break
    number = rng.randrange(12)
    entries = prompt(40 + 4 * number, number)
    answer = ask(engine, entries, boundaries=frozenset({30}), max_tokens=3)
    assert answer.tokens == reference(lambda: fake(kind), entries, max_tokens=3), "wrong tokens"
    engine.run_idle_task()
assert (counters.corrupt_files, counters.io_errors) == (0, 0), counters
engine.close()
"""


def start_hammer(folder: Path, kind: str, seed: int, turns: int) -> subprocess.Popen[str]:
    code = f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(other_process.SUPPORT)!r})\n" + HAMMER
    command = [sys.executable, "-c", code, str(folder), kind, str(seed), str(turns)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hammer(folder: Path, kind: str, turns: int) -> None:
    """Two engines share a directory that is too small for both; a third process is killed while it writes."""
    processes = [start_hammer(folder, kind, seed, turns) for seed in range(2)]
    victim = start_hammer(folder, kind, 7, 10**9)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "ready\n"
    time.sleep(0.3)
    victim.kill()
    victim.communicate()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert find_orphans(folder) == []


@pytest.mark.slow
def test_two_engines_restore_and_evict_in_one_directory(folder):
    hammer(folder, "hybrid", 100)


@pytest.mark.full
@every_kind
def test_two_engines_restore_and_evict_in_one_directory_for_long(folder, kind):
    hammer(folder, kind, 5000)


# --- errors that pass


def test_running_out_of_file_descriptors_deletes_no_file(make_engine, folder, monkeypatch):
    first = make_engine()
    entries = start_conversation(first)
    first.close()
    engine, before, original = make_engine(), list_files(folder), os.open

    def open_none(path, flags, *mode):
        if str(path).endswith(".cells"):
            raise OSError(24, "Too many open files")
        return original(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_none)
    assert ask(engine, [*entries, 5], max_tokens=1).cached == 0
    monkeypatch.undo()
    assert get_writer(engine).flush()
    assert list_files(folder) == before
    assert ask_again(make_engine, "attention", entries).cached == len(entries) - 1
