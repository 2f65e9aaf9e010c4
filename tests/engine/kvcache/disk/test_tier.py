"""C13, C17: computed prefixes are written to disk in the background, and the next process reuses them."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.kvcache import cost_model
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.types.entries import Media
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.hosts import wait_until
from support.play import KINDS, LAYOUTS, Answer, ask, collect, fake, prompt, reference, request

pytestmark = pytest.mark.slow

every_layout = pytest.mark.parametrize("kv_unified", LAYOUTS, ids=["streams", "unified"])
every_kind = pytest.mark.parametrize("kind", KINDS)
MakeEngine = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "prefix"


@pytest.fixture
def make_engine(folder: Path) -> Iterator[MakeEngine]:
    """Make engines on fake backends with a disk tier in one folder; they are closed at the end of the test."""
    with ExitStack() as stack:

        def make(kind: str = "attention", settings: dict | None = None, **options) -> Engine:
            defaults = {"block_size": 8, "ram_cache_bytes": 10**7, "disk_cache_directory": folder}
            engine = fake(kind, EngineSettings(**{**defaults, **(settings or {})}), **options)
            engine.backend.interner = engine.interner
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield make


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cells", ".state", ".logits"))


def flush(engine: Engine) -> None:
    """Wait until everything is written."""
    assert engine.prefix_cache.store.disk_tier is not None
    while engine.run_idle_task():
        pass
    assert engine.prefix_cache.store.disk_tier.writer.flush(120)


def count_disk_hits(engine: Engine) -> int:
    return engine.prefix_cache.store.disk_tier.counters.hits


# --- restarts


@every_layout
@every_kind
def test_a_restarted_engine_reuses_prefixes_from_disk(make_engine, kind, kv_unified):
    conversations = [prompt(60 + 9 * n, n) for n in range(3)]
    first = make_engine(kind, kv_unified=kv_unified)
    answers = [ask(first, conversation, boundaries=frozenset({30})) for conversation in conversations]
    first.close()
    second = make_engine(kind, kv_unified=kv_unified)
    for conversation, answer in zip(conversations, answers, strict=True):
        longer = conversation + answer.tokens + prompt(5, 7)
        warm = ask(second, longer)
        assert warm.cached == len(conversation) + len(answer.tokens) - 1
        assert warm.tokens == reference(lambda: fake(kind), longer)
    assert count_disk_hits(second) == 3


def test_a_disk_that_is_faster_than_its_estimate_is_used_and_measured(make_engine, monkeypatch):
    monkeypatch.setattr(cost_model, "MIN_MEASURED_READ_BYTES", 1)
    first = make_engine()
    ask(first, prompt(200))
    first.close()
    second = make_engine()
    costs = second.prefix_cache.cost_model
    costs.add_stored({**costs.to_dict(), "prefill": {"10": 0.01}, "disk": 1.0})  # one second per byte
    assert ask(second, prompt(200) + prompt(5, 7)).cached == 200
    assert costs.seconds_per_disk_byte < 0.01


@pytest.mark.parametrize(("share", "is_stored"), [(0.6, True), (1.2, False)])
def test_an_idle_engine_stores_what_loads_faster_than_it_computes(make_engine, monkeypatch, share, is_stored):
    """The share is that of the transfer. While requests wait, storing has to pay, too."""
    engine = make_engine()
    costs = engine.prefix_cache.cost_model
    monkeypatch.setattr(type(costs), "seconds_per_entry", 0.001)
    ask(engine, prompt(200), max_tokens=0)
    (slot,) = [slot for slot in engine.prefix_cache.slots if len(slot)]
    seconds_per_byte = share * 0.2 / engine.backend.get_state_size(slot.seq_id, "full")
    monkeypatch.setattr(type(costs), "seconds_per_byte", seconds_per_byte)
    assert not engine.prefix_cache._is_worth_storing(slot, 0, is_idle=False)
    flush(engine)
    engine.prefix_cache.store.refresh()
    assert (engine.prefix_cache.store.find_stored_prefix(np.array(prompt(200)), "").length == 200) == is_stored


def test_a_disk_that_is_slower_than_computing_is_measured_once_and_not_used(make_engine, monkeypatch):
    monkeypatch.setattr(cost_model, "MIN_MEASURED_READ_BYTES", 1)
    first = make_engine()
    ask(first, prompt(200))
    first.close()
    second = make_engine(settings={"ram_cache_bytes": 20_000})
    costs = second.prefix_cache.cost_model
    costs.add_stored({**costs.to_dict(), "prefill": {"10": 1e-9}, "disk": 1.0})
    monkeypatch.setattr(costs.prefill_costs, "record", lambda entries, seconds: None)  # computing stays fast
    reads = []
    monkeypatch.setattr(costs._disk, "add", reads.append)
    assert [ask(second, prompt(200) + prompt(5, seed)).cached for seed in (7, 8)] == [0, 200]
    assert len(reads) == 1


@pytest.mark.native
@every_layout
@every_kind
def test_a_restarted_llama_engine_reuses_prefixes_from_disk(folder, kind, kv_unified):
    context = ContextSettings(
        cells=4096, sequences=4, batch=256, ubatch=64, outputs=8, threads=1, kv_unified=kv_unified
    )
    spec = EngineSpec(
        path=models.get_path(f"successor-{kind}"),
        context_settings=context,
        engine_settings=EngineSettings(disk_cache_directory=folder),
    )
    engine = spec()
    tokens = list(engine.backend.context.model.vocabulary.tokenize("abcdefghijklmnopqrstuvwxyz" * 8))
    cold = ask(engine, tokens)
    engine.close()
    engine = spec()
    warm = ask(engine, tokens + cold.tokens)
    uncached = ask(engine, tokens + cold.tokens, use_prefix_cache=False)
    assert warm.cached == len(tokens) + len(cold.tokens) - 1
    assert warm.tokens == uncached.tokens
    assert count_disk_hits(engine) == 1
    engine.close()


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_a_checkpoint_inside_a_prompt_is_restored_after_a_restart(make_engine, kind):
    first = make_engine(kind)
    entries = prompt(90, 1)
    ask(first, entries, boundaries=frozenset({37}))
    first.close()
    second = make_engine(kind)
    edited = entries[:40] + prompt(30, 2)
    warm = ask(second, edited)
    assert warm.cached == 37
    assert warm.tokens == reference(lambda: fake(kind), edited)
    assert count_disk_hits(second) == 1


def test_media_are_identified_by_content_after_a_restart(make_engine):
    cat, dog = Media(b"cat", 5, 2), Media(b"dog", 5, 2)
    first = make_engine()
    ask(first, [*prompt(20, 1), cat, *prompt(20, 2)])
    first.close()
    second = make_engine()
    second.interner.intern([dog])  # so that its media ids differ
    assert ask(second, [*prompt(20, 1), dog, *prompt(20, 2)]).cached == 20
    assert ask(second, [*prompt(20, 1), cat, *prompt(20, 2), 5]).cached == 40 + cat.cells


def test_idle_sequences_are_on_disk_before_the_engine_is_closed(make_engine, folder):
    """The first engine is not closed, as if the process had been killed."""
    first = make_engine(sequences=1)
    ask(first, prompt(60, 1))
    flush(first)
    second = make_engine()
    assert ask(second, [*prompt(60, 1), 5]).cached == 60


def test_blocks_evicted_from_ram_are_loaded_from_disk(make_engine):
    engine = make_engine(settings={"ram_cache_bytes": 125_000}, sequences=1)
    for number in range(12):
        ask(engine, prompt(60, number))
        flush(engine)
    assert engine.prefix_cache.store.ram.counters.evictions > 0
    assert engine.prefix_cache.store.ram.budget.used_bytes <= 125_000
    assert ask(engine, [*prompt(60, 0), 5]).cached == 60
    assert count_disk_hits(engine) == 1


def test_tables_of_blocks_on_disk_are_part_of_the_ram_budget(make_engine):
    """RAM has space for the tables of a few conversations: the least recently used blocks are not found any more."""
    engine = make_engine(settings={"ram_cache_bytes": 30_000}, sequences=1)
    for number in range(12):
        ask(engine, prompt(60, number))
        flush(engine)
        assert engine.prefix_cache.store.ram.budget.used_bytes <= 30_000
    assert ask(engine, [*prompt(60, 10), 5]).cached == 60
    assert ask(engine, [*prompt(60, 0), 5]).tokens == reference(lambda: fake("attention"), [*prompt(60, 0), 5])
    engine.close()
    again = make_engine(settings={"ram_cache_bytes": 30_000}, sequences=1)
    again.prefix_cache.store.refresh()
    assert 0 < again.prefix_cache.store.ram.budget.get("tables") <= 30_000
    assert len(again.prefix_cache.store.tree) < len(
        list(again.prefix_cache.store.disk_tier.writer.directory.rglob("*.cells"))
    )


# --- deduplication


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_common_prefix_is_on_disk_once(make_engine, folder, kind):
    engine = make_engine(kind, sequences=2, cells_per_sequence=4096)
    system = prompt(800, 1)
    for number in range(2):
        ask(engine, system + prompt(40, 2 + number), max_tokens=1, boundaries=frozenset({800}))
    flush(engine)
    engine.close()
    stored = [disk_files.read_header(path)[0] for path in list_files(folder) if path.suffix == ".cells"]
    assert sum(file.start < 800 for file in stored) == 100
    assert sum(len(file.entries) for file in stored) == 800 + 2 * 40


def test_two_engines_share_the_files_of_both(make_engine):
    writer, reader = make_engine(), make_engine()
    ask(writer, prompt(60, 1))
    flush(writer)
    store, entries = reader.prefix_cache.store, np.array(prompt(60, 1))
    assert wait_until(lambda: store.find_stored_prefix(entries, "").length == 60)
    assert ask(reader, [*prompt(60, 1), 5]).cached == 60
    assert reader.prefix_cache.store.disk_tier.writer.counters.written_files == 0


# --- isolation


def test_another_model_salt_or_grid_has_no_prefix_hit(make_engine):
    first = make_engine()
    ask(first, prompt(60, 1), salt="mine")
    first.close()
    assert ask(make_engine(), prompt(60, 1)).cached == 0
    assert ask(make_engine(), prompt(60, 1), salt="yours").cached == 0
    assert ask(make_engine(model_identity="another model"), prompt(60, 1), salt="mine").cached == 0
    assert ask(make_engine(settings={"deterministic": True, "grid": 8}), prompt(60, 1), salt="mine").cached == 0
    assert ask(make_engine(), prompt(60, 1), salt="mine").cached == 60


def test_the_salt_is_not_written_to_disk(make_engine, folder):
    engine = make_engine()
    ask(engine, prompt(60, 1), salt="a secret key")
    engine.close()
    assert not any(b"a secret key" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@every_kind
def test_a_restart_gives_the_same_tokens_in_deterministic_mode(make_engine, kind):
    options = {"settings": {"deterministic": True, "grid": 8}, "simulate_rounding": True}
    first = make_engine(kind, **options)
    cold = ask(first, prompt(50, 1), boundaries=frozenset({24, 40}))
    first.close()
    warm = ask(make_engine(kind, **options), prompt(50, 1), boundaries=frozenset({24, 40}))
    assert warm.tokens == cold.tokens
    assert warm.cached == (48 if kind == "attention" else 40)


def test_directory_and_files_are_accessible_to_their_owner_only(make_engine, folder):
    engine = make_engine("hybrid")
    ask(engine, prompt(60, 1))
    flush(engine)
    assert list_files(folder)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# --- the disk budget


def test_the_disk_budget_is_never_exceeded(make_engine, folder):
    engine = make_engine(settings={"disk_cache_bytes": 20_000}, sequences=1)
    for number in range(10):
        ask(engine, prompt(60, number))
        flush(engine)
        assert sum(path.stat().st_size for path in list_files(folder)) <= 20_000
    writer = engine.prefix_cache.store.disk_tier.writer
    assert writer.counters.evictions > 0
    assert ask(engine, [*prompt(60, 9), 5]).cached == 60


def test_a_pinned_prefix_is_not_evicted_from_disk(make_engine, folder):
    engine = make_engine(settings={"disk_cache_bytes": 20_000}, sequences=1)
    engine.prefix_cache.store.pin_manager.pin(np.array(prompt(40, 100)), "")
    ask(engine, prompt(40, 100))
    for number in range(10):
        ask(engine, prompt(60, number))
        flush(engine)
    engine.prefix_cache.store.close()
    restarted = make_engine(settings={"disk_cache_bytes": 20_000})
    assert ask(restarted, [*prompt(40, 100), 5]).cached == 40


def test_without_a_directory_nothing_is_written(tmp_path):
    engine = fake("attention", EngineSettings(block_size=8))
    ask(engine, prompt(60, 1))
    engine.close()
    assert list(tmp_path.iterdir()) == []


# --- slow disks


def test_requests_do_not_wait_for_a_slow_write(make_engine, monkeypatch):
    engine = make_engine(sequences=1)
    unblock, original = threading.Event(), disk_files.write_temporary
    monkeypatch.setattr(
        disk_files, "write_temporary", lambda folder, file: (unblock.wait(120), original(folder, file))[1]
    )
    started = time.monotonic()
    for number in range(8):
        ask(engine, prompt(60, number))
    assert time.monotonic() - started < 60
    assert engine.prefix_cache.store.disk_tier.writer.counters.written_files == 0
    unblock.set()
    flush(engine)
    assert engine.prefix_cache.store.disk_tier.writer.counters.written_files > 0


def test_writes_are_dropped_if_the_queue_is_full(make_engine, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.writer.MAX_QUEUED_TASKS", 4)
    engine = make_engine(sequences=1)
    unblock, original = threading.Event(), disk_files.write_temporary
    monkeypatch.setattr(
        disk_files, "write_temporary", lambda folder, file: (unblock.wait(120), original(folder, file))[1]
    )
    for number in range(8):
        ask(engine, prompt(60, number))
    assert engine.prefix_cache.store.disk_tier.writer.counters.dropped_writes > 0
    unblock.set()


@every_kind
def test_running_requests_continue_while_a_prompt_waits_for_the_disk(make_engine, kind, monkeypatch):
    """Reading is slow. Running requests are not delayed, and the prompt reuses what was read."""
    monkeypatch.setattr("afterglow.engine.kvcache.disk.tier.MIN_PREFETCH_SECONDS", 0.0)
    first = make_engine(kind)
    ask(first, prompt(60, 1), boundaries=frozenset({50}))
    first.close()
    engine, original = make_engine(kind), disk_files.load_file
    unblock = threading.Event()
    monkeypatch.setattr(disk_files, "load_file", lambda path: (unblock.wait(120), original(path))[1])
    engine.submit(request("running", prompt(30, 2), max_tokens=200, ignore_eos=True))
    engine.step()
    engine.submit(request("waiting", [*prompt(50, 1), 5], max_tokens=4, ignore_eos=True))
    answers: dict[str, Answer] = {}
    for _ in range(40):
        collect(answers, engine)
    assert len(answers["running"].tokens) == 40
    assert "waiting" not in answers
    unblock.set()
    while engine.is_busy:
        collect(answers, engine)
    assert answers["waiting"].cached == 50
    assert answers["waiting"].tokens == reference(
        lambda: fake(kind), [*prompt(50, 1), 5], max_tokens=4, ignore_eos=True
    )
    assert engine.prefix_cache.store.disk_tier.counters.hits == 1


def test_a_prompt_that_waits_for_a_damaged_file_is_computed(make_engine, folder, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.tier.MIN_PREFETCH_SECONDS", 0.0)
    first = make_engine()
    ask(first, prompt(60, 1))
    first.close()
    for path in list_files(folder):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    engine = make_engine()
    engine.submit(request("running", prompt(30, 2), max_tokens=60, ignore_eos=True))
    engine.step()
    engine.submit(request("waiting", [*prompt(50, 1), 5], max_tokens=4))
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert answers["waiting"].cached == 0
    assert answers["waiting"].tokens == reference(lambda: fake("attention"), [*prompt(50, 1), 5], max_tokens=4)


def test_a_request_that_waits_for_the_disk_can_be_cancelled(make_engine, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.tier.MIN_PREFETCH_SECONDS", 0.0)
    first = make_engine()
    ask(first, prompt(60, 1))
    first.close()
    engine, original = make_engine(), disk_files.load_file
    unblock = threading.Event()
    monkeypatch.setattr(disk_files, "load_file", lambda path: (unblock.wait(120), original(path))[1])
    engine.submit(request("running", prompt(30, 2), max_tokens=30, ignore_eos=True))
    engine.step()
    engine.submit(request("waiting", [*prompt(50, 1), 5]))
    for _ in range(4):
        engine.step()
    engine.cancel("waiting")
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert len(answers["waiting"].tokens) == 0
    unblock.set()
    assert ask(engine, [*prompt(50, 1), 6]).cached == 50


def test_closing_a_closed_engine_does_not_wait_for_the_disk(make_engine):
    engine = make_engine()
    ask(engine, prompt(60, 1))
    engine.close()
    started = time.monotonic()
    assert engine.prefix_cache.store.disk_tier.writer.flush(60) is False
    engine.prefix_cache.close(timeout=60)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("suffix", [".cells", ".state", ".logits"])
def test_a_file_that_is_being_written_when_its_prefix_is_forgotten_is_deleted(make_engine, folder, monkeypatch, suffix):
    engine = make_engine("hybrid")
    is_writing, may_write = threading.Event(), threading.Event()
    write_temporary = disk_files.write_temporary

    def write_slowly(folder: Path, cache_file: disk_files.CacheFile) -> tuple[Path, int]:
        if cache_file.name.endswith(suffix):
            is_writing.set()
            assert may_write.wait(30)
        return write_temporary(folder, cache_file)

    monkeypatch.setattr(disk_files, "write_temporary", write_slowly)
    entries = prompt(60, 1)
    ask(engine, entries, boundaries=frozenset({30}))
    while engine.run_idle_task():
        pass
    assert is_writing.wait(30)
    engine.prefix_cache.forget(engine.interner.intern(entries), 0, "")
    may_write.set()
    flush(engine)
    assert not list_files(folder)
    engine.prefix_cache.store.refresh()
    assert not len(engine.prefix_cache.store.tree)
