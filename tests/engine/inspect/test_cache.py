"""Usage, pins and files of the prefix cache: from this process, from another, and without an engine."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.inspect import cache, disk
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend
from support import engine_factories
from support.hosts import wait_until
from support.play import ask, prompt, request


def flush(engine: Engine) -> None:
    """Run all idle tasks and write everything to disk."""
    while engine.run_idle_task():
        pass
    assert engine.prefix_cache.store.disk_tier.writer.flush()


def test_the_ram_usage_is_the_size_of_blocks_checkpoints_and_tables(build_engine):
    engine = build_engine("hybrid", sequences=1)
    ask(engine, prompt(60, 1), boundaries=frozenset({40}))
    ask(engine, prompt(50, 2))
    usage = cache.get_tier_usage(engine)["ram"]
    store = engine.prefix_cache.store
    assert usage.by_kind["blocks"] == sum(block.nbytes for block in store.ram) > 60 * 16
    assert (
        usage.by_kind["checkpoints"] == sum(checkpoint.nbytes for checkpoint in store.checkpoints.all_checkpoints) > 0
    )
    assert usage.nbytes == sum(usage.by_kind.values()) <= usage.limit_bytes == 10**7


def test_shared_bytes_are_counted_once(build_engine):
    engine = build_engine(sequences=1)
    for number in range(3):
        ask(engine, prompt(80, 1) + prompt(40, 10 + number))
    ask(engine, prompt(9, 5))
    blocks = list(engine.prefix_cache.store.ram)
    assert [block.start for block in blocks].count(72) == 1, "the prefix is stored once"
    assert [block.start for block in blocks].count(80) == 3
    assert sum(block.nbytes for block in blocks) == cache.get_tier_usage(engine)["ram"].by_kind["blocks"]


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_the_disk_usage_is_the_size_of_its_files(build_engine, folder, kind):
    engine = build_engine(kind, sequences=1)
    for number in range(3):
        ask(engine, prompt(80, number))
    flush(engine)
    engine.prefix_cache.store.refresh()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.suffix in (".cells", ".state", ".logits")]
    assert cache.get_tier_usage(engine)["disk"].nbytes == sum(sizes) > 0


def test_hits_and_saved_seconds_are_counted(build_engine):
    engine = build_engine(sequences=1)
    for _ in range(3):
        ask(engine, prompt(60, 1))
        ask(engine, prompt(60, 2))
    counters = cache.get_tier_usage(engine)["ram"].counters
    assert counters.hits == 4
    assert counters.hit_entries == 4 * 60
    assert counters.loaded_bytes == 4 * 60 * 16
    assert counters.misses == 2
    assert counters.seconds_saved > 0
    assert max(block.hits for block in engine.prefix_cache.store.tree) == 2


def test_clear_removes_everything_from_all_tiers(build_engine, folder):
    engine = build_engine("hybrid", sequences=1)
    for number in range(2):
        ask(engine, prompt(60, number))
    flush(engine)
    cache.clear(engine)
    flush(engine)
    assert not any(len(slot) for slot in engine.prefix_cache.slots)
    by_kind = cache.get_tier_usage(engine)["ram"].by_kind
    assert {by_kind[kind] for kind in ("blocks", "checkpoints", "tables")} == {0}
    assert cache.list_stored_models(folder) == []
    assert ask(engine, prompt(60, 1)).cached == 0
    assert ask(build_engine("hybrid"), prompt(60, 0)).cached == 0


def test_pins_are_added_and_removed(build_engine):
    engine = build_engine(sequences=1)
    cache.pin(engine, prompt(30, 1))
    ask(engine, prompt(60, 1))
    ask(engine, prompt(60, 2))
    assert {block.start for block in engine.prefix_cache.store.ram if block.pinned} == {0, 8, 16, 24}
    assert cache.unpin(engine, prompt(30, 1))
    assert not any(block.pinned for block in engine.prefix_cache.store.ram)
    assert not cache.unpin(engine, prompt(30, 1))


# --- functions of a directory


def test_the_models_of_a_directory_are_listed(store_conversation, folder):
    model = store_conversation()
    (stored,) = cache.list_stored_models(folder)
    assert (stored.model, stored.name) == (model, "a fake")
    assert stored.entries == 71
    assert stored.files == 10  # blocks and logits
    assert stored.nbytes == sum(path.stat().st_size for path in (folder / model).glob("*.[cl]*"))


def test_verify_finds_and_removes_damaged_files(store_conversation, folder):
    model = store_conversation("hybrid")
    assert cache.verify_files(folder).broken == 0
    victim = min((folder / model).glob("*.cells"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    result = cache.verify_files(folder)
    assert result.broken == 1
    assert result.checked > 8
    assert not victim.exists()
    assert cache.verify_files(folder) == cache.VerifyResult(checked=result.checked - 1, broken=0)


# --- engine processes


@dataclass(frozen=True)
class DiskEngineFactory:
    """Builds an engine on a fake backend with a disk tier."""

    folder: Path

    def __call__(self) -> Engine:
        return Engine(FakeBackend(sequences=1), EngineSettings(block_size=8, disk_cache_directory=self.folder))


@pytest.mark.native
def test_the_functions_work_across_processes_and_a_restart_is_warm(folder):
    with EngineProcess(DiskEngineFactory(folder)) as engine:
        engine.call(functools.partial(cache.pin, entries=prompt(8, 1)))
        first = list(engine.submit(request("a", prompt(60, 1))))[-1]
        list(engine.submit(request("b", prompt(60, 2))))
        usage = engine.call(cache.get_tier_usage)
        assert usage["ram"].counters.saves >= 1
    assert first.usage.cached_tokens == 0
    assert {stored.pinned for stored in disk.list_conversations(folder)} == {True, False}
    assert cache.verify_files(folder).broken == 0
    with EngineProcess(DiskEngineFactory(folder)) as engine:
        events = list(engine.submit(request("c", prompt(60, 2))))
        assert events[-1].usage.cached_tokens == 60
        assert engine.call(cache.get_tier_usage)["disk"].counters.hits == 1
        assert engine.call(engine_factories.is_busy) is False


@pytest.mark.native
def test_an_idle_engine_stores_its_sequences_before_it_is_killed(folder):
    """Idle tasks write sequences of the device to disk."""
    with EngineProcess(DiskEngineFactory(folder)) as engine:
        list(engine.submit(request("a", prompt(60, 1))))
        assert wait_until(lambda: sum(1 for _ in folder.rglob("*.cells")) == 9)
        os.kill(engine.pid, signal.SIGKILL)
    assert disk_files.parse_file_name(next(folder.rglob("*.cells")).name) is not None
    with EngineProcess(DiskEngineFactory(folder)) as engine:
        assert list(engine.submit(request("b", [*prompt(60, 1), 5])))[-1].usage.cached_tokens == 60
