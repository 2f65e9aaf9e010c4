"""What people see of the tiers, and do with them: from this process, from another, and without any engine."""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.inspect import cache, disk
from afterglow.engine.inspect.archive import export_archive, import_archive
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.index import open_index
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, InvalidState
from afterglow.testing import FakeBackend
from support import engine_factories
from support.play import ask, fake, prompt, reference, request

MakeEngine = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.fixture
def make(folder: Path) -> Iterator[MakeEngine]:
    with ExitStack() as stack:

        def make(kind: str = "attention", directory: Path = folder, **options) -> Engine:
            chosen = EngineSettings(
                block_size=8, ram_cache_bytes=10**7, disk_cache_directory=directory, disk_cache_label="a fake"
            )
            engine = fake(kind, chosen, **options)
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield make


def flush(engine: Engine) -> None:
    while engine.run_idle_task():
        pass
    assert engine.prefix_cache.store.disk_tier.writer.flush()


def test_what_is_kept_is_shown_with_its_tier_size_and_beginning(make):
    engine = make("hybrid", sequences=1)
    ask(engine, prompt(60, 1), boundaries=frozenset({40}))
    ask(engine, prompt(50, 2))
    found = cache.list_cached(engine)
    assert [(one.tier, one.kind, one.first_entries) for one in found[:1]] == [
        ("memory", "conversation", tuple(prompt(32, 2)))
    ]
    (stored,) = [one for one in found if (one.tier, one.kind) == ("ram", "conversation")]
    assert stored.first_entries == tuple(prompt(32, 1))
    assert stored.entries >= 60
    assert stored.nbytes > 60 * 16
    assert stored.compute_seconds > 0
    assert {one.entries for one in found if one.kind == "checkpoint"} >= {40}
    usage = cache.get_tier_usage(engine)["ram"]
    assert usage.nbytes == sum(one.nbytes for one in found if one.tier == "ram")
    assert usage.nbytes <= usage.limit_bytes == 10**7


def test_shared_bytes_are_shown_once(make):
    engine = make(sequences=1)
    for number in range(3):
        ask(engine, prompt(80, 1) + prompt(40, 10 + number))
    ask(engine, prompt(9, 5))
    stored = [one for one in cache.list_cached(engine) if one.tier == "ram"]
    assert len(stored) == 3
    assert sum(one.nbytes for one in stored) == cache.get_tier_usage(engine)["ram"].nbytes


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_the_disk_has_the_bytes_of_its_files(make, folder, kind):
    engine = make(kind, sequences=1)
    for number in range(3):
        ask(engine, prompt(80, number))
    flush(engine)
    engine.prefix_cache.store.refresh()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.suffix in (".cells", ".state")]
    assert cache.get_tier_usage(engine)["disk"].nbytes == sum(sizes) > 0


def test_hits_and_seconds_are_counted(make):
    engine = make(sequences=1)
    for _ in range(3):
        ask(engine, prompt(60, 1))
        ask(engine, prompt(60, 2))
    counters = cache.get_tier_usage(engine)["ram"].counters
    assert counters.hits == 4
    assert counters.hit_entries == 4 * 59
    assert counters.loaded_bytes == 4 * 59 * 16
    assert counters.misses == 2
    assert counters.seconds_saved > 0
    assert max(one.hits for one in cache.list_cached(engine)) == 2


def test_clear_forgets_everything_everywhere(make, folder):
    engine = make("hybrid", sequences=1)
    for number in range(2):
        ask(engine, prompt(60, number))
    flush(engine)
    cache.clear(engine)
    flush(engine)
    assert cache.list_cached(engine) == []
    assert cache.list_stored_models(folder) == []
    assert ask(engine, prompt(60, 1)).cached == 0
    assert ask(make("hybrid"), prompt(60, 0)).cached == 0


def test_pins_are_shown_and_taken_back(make):
    engine = make(sequences=1)
    cache.pin(engine, prompt(30, 1))
    ask(engine, prompt(60, 1))
    ask(engine, prompt(60, 2))
    assert [one.pinned for one in cache.list_cached(engine) if one.tier == "ram"] == [True]
    assert cache.unpin(engine, prompt(30, 1))
    assert [one.pinned for one in cache.list_cached(engine) if one.tier == "ram"] == [False]
    assert not cache.unpin(engine, prompt(30, 1))


# --- of a directory


def written(make: MakeEngine, kind: str = "attention") -> cache.DiskLocation:
    engine = make(kind)
    ask(engine, prompt(60, 1), boundaries=frozenset({40}))
    engine.close()
    place = cache.get_disk_location(engine)
    assert place is not None
    return place


def test_a_directory_says_what_it_holds(make, folder):
    place = written(make)
    (stored,) = cache.list_stored_models(folder)
    assert (stored.model, stored.name) == (place.model, "a fake")
    assert stored.entries == 71
    assert stored.files == 9
    assert stored.nbytes == sum(path.stat().st_size for path in (folder / place.model).glob("*.cells"))


def test_verify_finds_and_removes_what_is_broken(make, folder):
    place = written(make, "hybrid")
    assert cache.verify_files(folder).broken == 0
    victim = min((folder / place.model).glob("*.cells"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    result = cache.verify_files(folder)
    assert result.broken == 1
    assert result.checked > 8
    assert not victim.exists()
    assert cache.verify_files(folder) == cache.VerifyResult(checked=result.checked - 1, broken=0)


@pytest.mark.parametrize("kind", ["attention", "hybrid", "recurrent"])
def test_what_is_exported_can_be_imported_elsewhere(make, folder, tmp_path, kind):
    place = written(make, kind)
    count = export_archive(folder, tmp_path / "copy.tar")
    assert count > 0
    assert (tmp_path / "copy.tar").stat().st_mode & 0o077 == 0
    elsewhere = tmp_path / "elsewhere"
    assert import_archive(elsewhere, tmp_path / "copy.tar") == count
    assert cache.list_stored_models(elsewhere)[0].name == "a fake"
    assert cache.list_stored_models(elsewhere)[0].model == place.model
    engine = make(kind, elsewhere)
    entries = prompt(45, 1) + prompt(9, 9)
    answer = ask(engine, entries)
    assert answer.cached == (45 if kind == "attention" else 40)
    assert answer.tokens == reference(lambda: fake(kind), entries)


def test_what_is_broken_is_neither_exported_nor_imported(make, folder, tmp_path):
    place = written(make)
    copy = tmp_path / "copy.tar"
    whole = export_archive(folder, copy)
    with pytest.raises(InvalidArgument, match="there already"):
        export_archive(folder, copy)
    copy.write_bytes(copy.read_bytes().replace(b"afterglow segment", b"afterglow nothing", 1))
    with pytest.raises(InvalidState):
        import_archive(tmp_path / "elsewhere", copy)
    victim = min((folder / place.model).glob("*.cells"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert export_archive(folder, tmp_path / "rest.tar") == whole - 1
    assert export_archive(folder, tmp_path / "none.tar", ["0" * 64]) == 0


@pytest.mark.parametrize("name", ["../out", "a/b", "/etc/passwd", f"{'0' * 64}/../../out", f"{'0' * 64}/index.sqlite3"])
def test_an_archive_puts_nothing_anywhere_else(tmp_path, name):
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo(name), None)
    with pytest.raises(InvalidState, match="nothing that afterglow keeps"):
        import_archive(tmp_path / "prefix", tmp_path / "bad.tar")
    assert not (tmp_path / "out").exists()
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        import_archive(tmp_path / "prefix", tmp_path / "text")


def test_a_running_engine_sees_what_was_imported(make, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.writer.POLL_INTERVAL_SECONDS", 0.05)
    written(make)
    export_archive(folder, tmp_path / "copy.tar")
    engine = make(directory=tmp_path / "elsewhere")
    import_archive(tmp_path / "elsewhere", tmp_path / "copy.tar")
    for _ in range(200):
        if any(one.tier == "disk" and one.entries == 71 for one in cache.list_cached(engine)):
            break
        engine.prefix_cache.store.disk_tier.writer._closing.wait(0.05)
    assert ask(engine, prompt(60, 1)).cached == 59


# --- its conversations


@pytest.mark.parametrize("kind", ["attention", "hybrid", "recurrent"])
def test_a_directory_s_conversations_are_shown(make, folder, kind):
    engine = make(kind)
    for last in (10, 11):
        ask(engine, prompt(80, 1) + prompt(40, last))
    engine.close()
    found = disk.list_conversations(folder)
    assert len(found) == 2
    assert {one.first_entries[:80] for one in found} == {tuple(prompt(80, 1))}
    assert all(one.entries >= 120 and one.idle_seconds < 60 and not one.pinned for one in found)
    assert sum(one.nbytes for one in found) == cache.list_stored_models(folder)[0].nbytes
    again = make(kind)
    ask(again, prompt(80, 1) + prompt(40, 10) + [5])
    again.memory.tiers.disk_tier.disk.flush()
    best = max(disk.list_conversations(folder), key=lambda one: one.hits)
    assert best.hits == 1
    assert best.seconds_saved > 0


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_pinned_conversation_outlives_the_others_on_disk(make, folder, kind):
    engine = make(kind)
    ask(engine, prompt(60, 1), boundaries=frozenset({40}))
    engine.close()
    (first,) = disk.list_conversations(folder)
    disk.pin(folder, first.id[:6])
    assert disk.list_conversations(folder)[0].pinned
    small = EngineSettings(
        block_size=8, ram_cache_bytes=10**7, disk_cache_directory=folder, disk_cache_bytes=int(first.nbytes * 2.5)
    )
    engine = fake(kind, small)
    for number in range(2, 8):
        ask(engine, prompt(60, number))
        flush(engine)
    engine.close()
    assert first.id in {one.id for one in disk.list_conversations(folder)}
    assert ask(make(kind), [*prompt(40, 1), 5]).cached == 40
    disk.pin(folder, first.id, pinned=False)
    assert not any(one.pinned for one in disk.list_conversations(folder))
    with pytest.raises(InvalidArgument, match="no conversation"):
        disk.pin(folder, "fff0fff")


def test_taking_a_pin_back_leaves_what_another_holds(make, folder):
    engine = make()
    for last in (10, 11):
        ask(engine, prompt(80, 1) + prompt(40, last))
    engine.close()
    one, other = (found.id for found in disk.list_conversations(folder))
    disk.pin(folder, one)
    disk.pin(folder, other)
    disk.pin(folder, one, pinned=False)
    with open_index(folder) as index:
        assert sum(row.pinned for row in index.list_rows()) == 17  # 80 shared entries, 51 of its own


def test_a_directory_is_cleared_by_model(make, folder):
    place = written(make)
    written(make, "hybrid")
    assert disk.clear(folder, [place.model]) > 0
    (left,) = cache.list_stored_models(folder)
    assert left.model != place.model
    assert disk.clear(folder) == left.nbytes
    assert cache.list_stored_models(folder) == []


@pytest.mark.parametrize(("kind", "reused"), [("attention", 50), ("hybrid", 40), ("recurrent", 40)])
def test_what_is_nearest_to_a_prompt_is_found_without_an_engine(make, folder, kind, reused):
    place = written(make, kind)
    ids = np.array(prompt(50, 1) + prompt(9, 9))
    found = disk.find_nearest(folder, [place.model], ids)
    assert (found.explanation.reused_entries, found.explanation.shared_entries) == (reused, 50)
    assert found.cached_entries[:10] == tuple(prompt(60, 1)[50:])
    assert disk.find_nearest(folder, ["0" * 64], ids).explanation.cause == "nothing in common"


# --- across a process border


@dataclass(frozen=True)
class OnDisk:
    """Makes an engine on a fake that keeps what it computes in a folder."""

    folder: Path

    def __call__(self) -> Engine:
        return Engine(FakeBackend(sequences=1), EngineSettings(block_size=8, disk_cache_directory=self.folder))


def test_it_works_across_processes_and_a_restart_is_warm(folder):
    with EngineProcess(OnDisk(folder)) as engine:
        engine.call(functools.partial(cache.pin, entries=prompt(8, 1)))
        first = list(engine.submit(request("a", prompt(60, 1))))[-1]
        list(engine.submit(request("b", prompt(60, 2))))
        kept = engine.call(cache.list_cached)
        assert {one.tier for one in kept} == {"memory", "ram"}
        assert any(one.pinned for one in kept)
        place = engine.call(cache.get_disk_location)
        usage = engine.call(cache.get_tier_usage)
        assert usage["ram"].counters.saves >= 1
    assert first.usage.cached_tokens == 0
    assert place == cache.DiskLocation(directory=folder, model=place.model)
    assert cache.verify_files(folder).broken == 0
    with EngineProcess(OnDisk(folder)) as engine:
        events = list(engine.submit(request("c", prompt(60, 2))))
        assert events[-1].usage.cached_tokens == 59
        assert engine.call(cache.get_tier_usage)["disk"].counters.hits == 1
        assert engine.call(engine_factories.busy) is False


def test_an_engine_that_was_idle_for_a_moment_loses_nothing_when_it_is_killed(folder):
    """The thread stores what is in memory while nobody waits."""
    with EngineProcess(OnDisk(folder)) as engine:
        list(engine.submit(request("a", prompt(60, 1))))
        place = engine.call(cache.get_disk_location)
        files = folder / place.model
        for _ in range(200):
            if sum(1 for _ in files.glob("*.cells")) == 9:
                break
            engine._closing.wait(0.05)
        engine_factories.os.kill(engine.pid, engine_factories.signal.SIGKILL)
    assert disk_files.parse_file_name(next(files.glob("*.cells")).name) is not None
    with EngineProcess(OnDisk(folder)) as engine:
        assert list(engine.submit(request("b", [*prompt(60, 1), 5])))[-1].usage.cached_tokens == 60
