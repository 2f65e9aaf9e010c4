"""C13, C17: what was computed is on disk, in the background, and the next process begins from it."""

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
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.types.entries import Media
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, LAYOUTS, Answer, ask, collect, fake, prompt, reference, request

everywhere = pytest.mark.parametrize("shared", LAYOUTS, ids=["streams", "unified"])
every_kind = pytest.mark.parametrize("kind", KINDS)
MakeEngine = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "prefix"


@pytest.fixture
def make(folder: Path) -> Iterator[MakeEngine]:
    """Engines on fakes that keep what they compute in one folder; closed at the end of the test."""
    with ExitStack() as stack:

        def make(kind: str = "attention", settings: dict | None = None, **options) -> Engine:
            chosen = EngineSettings(**{"segment": 8, "ram_bytes": 10**7, "disk_directory": folder, **(settings or {})})
            engine = fake(kind, chosen, **options)
            engine.backend.ledger = engine.interner
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield make


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cells", ".state"))


def flushed(engine: Engine) -> None:
    """Everything that is to be written is."""
    assert engine.prefix_cache.store.disk_tier is not None
    while engine.run_idle_task():
        pass
    assert engine.prefix_cache.store.disk_tier.writer.flush(20)


def disk_hits(engine: Engine) -> int:
    return engine.prefix_cache.store.disk_counters.hits


# --- the next process is warm


@everywhere
@every_kind
def test_a_restart_is_warm(make, kind, shared):
    conversations = [prompt(60 + 9 * n, n) for n in range(3)]
    first = make(kind, shared=shared)
    answers = [ask(first, one, boundaries=frozenset({30})) for one in conversations]
    first.close()
    second = make(kind, shared=shared)
    for one, answer in zip(conversations, answers, strict=True):
        longer = one + answer.tokens + prompt(5, 7)
        warm = ask(second, longer)
        assert warm.cached == len(one) + len(answer.tokens) - 1
        assert warm.tokens == reference(lambda: fake(kind), longer)
    assert disk_hits(second) == 3


@pytest.mark.parametrize("unified", LAYOUTS, ids=["streams", "unified"])
@every_kind
def test_a_restart_is_warm_on_llama(folder, kind, unified):
    context = ContextSettings(cells=4096, sequences=4, batch=256, ubatch=64, outputs=8, threads=1, kv_unified=unified)
    recipe = EngineSpec(
        path=models.get_path(f"successor-{kind}"),
        context_settings=context,
        engine_settings=EngineSettings(disk_cache_directory=folder),
    )
    cold, warm = Answer(), Answer()
    engine = recipe()
    tokens = list(engine.backend.context.model.vocabulary.tokenize("abcdefghijklmnopqrstuvwxyz" * 8))
    cold = ask(engine, tokens)
    engine.close()
    engine = recipe()
    warm = ask(engine, tokens + cold.tokens)
    again = ask(engine, tokens + cold.tokens, reuse=False)
    assert warm.cached == len(tokens) + len(cold.tokens) - 1
    assert warm.tokens == again.tokens
    assert disk_hits(engine) == 1
    engine.close()


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_a_checkpoint_in_the_middle_of_a_prompt_is_used_after_a_restart(make, kind):
    first = make(kind)
    entries = prompt(90, 1)
    ask(first, entries, boundaries=frozenset({37}))
    first.close()
    second = make(kind)
    edited = entries[:40] + prompt(30, 2)
    warm = ask(second, edited)
    assert warm.cached == 37
    assert warm.tokens == reference(lambda: fake(kind), edited)
    assert disk_hits(second) == 1


def test_pictures_are_known_again_by_what_they_show(make):
    cat, dog = Media(b"cat", 5, 2), Media(b"dog", 5, 2)
    first = make()
    ask(first, [*prompt(20, 1), cat, *prompt(20, 2)])
    first.close()
    second = make()
    second.interner.ids([dog])  # so that its numbers are other ones
    assert ask(second, [*prompt(20, 1), dog, *prompt(20, 2)]).cached == 20
    assert ask(second, [*prompt(20, 1), cat, *prompt(20, 2), 5]).cached == 40 + cat.cells


def test_what_left_memory_is_on_disk_before_the_end(make, folder):
    """Nothing is closed here: as if the process had been killed."""
    first = make(sequences=1)
    ask(first, prompt(60, 1))
    flushed(first)
    second = make()
    assert ask(second, [*prompt(60, 1), 5]).cached == 60


def test_what_leaves_ram_can_still_be_had_from_disk(make):
    engine = make(settings={"ram_bytes": 9000}, sequences=1)
    for number in range(12):
        ask(engine, prompt(60, number))
        flushed(engine)
    assert engine.prefix_cache.store.ram_counters.evictions > 0
    assert engine.prefix_cache.store.ram.used_bytes <= 9000
    assert ask(engine, [*prompt(60, 0), 5]).cached == 60
    assert disk_hits(engine) == 1


# --- each beginning once


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_common_beginning_is_on_disk_once(make, folder, kind):
    engine = make(kind, sequences=2, cells=4096)
    system = prompt(800, 1)
    for number in range(2):
        ask(engine, system + prompt(40, 2 + number), max_tokens=1, boundaries=frozenset({800}))
    flushed(engine)
    engine.close()
    stored = [disk_files.read_header(path)[0] for path in files(folder) if path.suffix == ".cells"]
    assert sum(item.start < 800 for item in stored) == 100
    assert sum(len(item.entries) for item in stored) == 800 + 2 * 40


def test_two_engines_share_what_either_wrote(make):
    one, other = make(), make()
    ask(one, prompt(60, 1))
    flushed(one)
    for _ in range(100):
        if other.memory.tiers.cover(np.array(prompt(60, 1)), "").length == 60:
            break
        time.sleep(0.1)
    assert ask(other, [*prompt(60, 1), 5]).cached == 60
    assert other.memory.tiers.disk_tier.disk.counters.written_files == 0


# --- whose it is


def test_another_model_or_salt_or_grid_finds_nothing(make):
    first = make()
    ask(first, prompt(60, 1), salt="mine")
    first.close()
    assert ask(make(), prompt(60, 1)).cached == 0
    assert ask(make(), prompt(60, 1), salt="yours").cached == 0
    assert ask(make(identity="another model"), prompt(60, 1), salt="mine").cached == 0
    assert ask(make(settings={"deterministic": True}), prompt(60, 1), salt="mine").cached == 0
    assert ask(make(), prompt(60, 1), salt="mine").cached == 59


def test_the_salt_is_not_written_down(make, folder):
    engine = make()
    ask(engine, prompt(60, 1), salt="a secret key")
    engine.close()
    assert not any(b"a secret key" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@every_kind
def test_on_the_grid_a_restart_gives_the_same_tokens(make, kind):
    options = {"settings": {"deterministic": True, "grid": 8}, "rounding": True}
    first = make(kind, **options)
    cold = ask(first, prompt(50, 1), boundaries=frozenset({24, 40}))
    first.close()
    warm = ask(make(kind, **options), prompt(50, 1), boundaries=frozenset({24, 40}))
    assert warm.tokens == cold.tokens
    assert warm.cached == (48 if kind == "attention" else 40)


# --- for us alone, and not too much


def test_directory_and_files_are_for_their_owner_only(make, folder):
    engine = make("hybrid")
    ask(engine, prompt(60, 1))
    flushed(engine)
    assert files(folder)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_disk_has_a_limit(make, folder):
    engine = make(settings={"disk_bytes": 20_000}, sequences=1)
    for number in range(10):
        ask(engine, prompt(60, number))
        flushed(engine)
        assert sum(path.stat().st_size for path in files(folder)) <= 20_000
    disk = engine.prefix_cache.store.disk_tier.writer
    assert disk.counters.evictions > 0
    assert ask(engine, [*prompt(60, 9), 5]).cached == 60


def test_what_is_pinned_stays_on_disk(make, folder):
    engine = make(settings={"disk_bytes": 20_000}, sequences=1)
    engine.prefix_cache.store.pin_manager.pin(np.array(prompt(40, 100)), "")
    ask(engine, prompt(40, 100))
    for number in range(10):
        ask(engine, prompt(60, number))
        flushed(engine)
    engine.prefix_cache.store.close()
    after = make(settings={"disk_bytes": 20_000})
    assert ask(after, [*prompt(40, 100), 5]).cached == 40


def test_without_a_directory_nothing_is_written(tmp_path):
    engine = fake("attention", EngineSettings(block_size=8))
    ask(engine, prompt(60, 1))
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_waits_for_a_disk_that_is_slow(make, monkeypatch):
    """The writer hangs; prompts do not."""
    engine = make(sequences=1)
    hang, original = threading.Event(), disk_files.write_file
    monkeypatch.setattr(disk_files, "write_file", lambda folder, item: (hang.wait(20), original(folder, item))[1])
    started = time.monotonic()
    for number in range(8):
        ask(engine, prompt(60, number))
    assert time.monotonic() - started < 10
    assert engine.prefix_cache.store.disk_tier.writer.counters.written_files == 0
    hang.set()
    flushed(engine)
    assert engine.prefix_cache.store.disk_tier.writer.counters.written_files > 0


def test_too_much_to_write_is_dropped(make, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.writer.MAX_QUEUED_TASKS", 4)
    engine = make(sequences=1)
    hang, original = threading.Event(), disk_files.write_file
    monkeypatch.setattr(disk_files, "write_file", lambda folder, item: (hang.wait(20), original(folder, item))[1])
    for number in range(8):
        ask(engine, prompt(60, number))
    assert engine.prefix_cache.store.disk_tier.writer.counters.dropped_writes > 0
    hang.set()


@every_kind
def test_running_answers_go_on_while_a_prompt_waits_for_the_disk(make, kind, monkeypatch):
    """Reading takes long; whoever is being answered does not notice, and the prompt begins from what was read."""
    monkeypatch.setattr("afterglow.engine.kvcache.disk.tier.MIN_PREFETCH_SECONDS", 0.0)
    first = make(kind)
    ask(first, prompt(60, 1), boundaries=frozenset({50}))
    first.close()
    engine, original = make(kind), disk_files.load_file
    read = threading.Event()
    monkeypatch.setattr(disk_files, "load_file", lambda path: (read.wait(20), original(path))[1])
    engine.submit(request("running", prompt(30, 2), max_tokens=200, ignore_ends=True))
    engine.step()
    engine.submit(request("waiting", [*prompt(50, 1), 5], max_tokens=4, ignore_ends=True))
    answers: dict[str, Answer] = {}
    for _ in range(40):
        collect(answers, engine)
    assert len(answers["running"].tokens) == 40
    assert "waiting" not in answers
    read.set()
    while engine.is_busy:
        collect(answers, engine)
    assert answers["waiting"].cached == 50
    assert answers["waiting"].tokens == reference(
        lambda: fake(kind), [*prompt(50, 1), 5], max_tokens=4, ignore_ends=True
    )
    assert engine.prefix_cache.store.disk_counters.hits == 1


def test_a_prompt_that_waits_for_a_broken_file_is_computed(make, folder, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.tier.MIN_PREFETCH_SECONDS", 0.0)
    first = make()
    ask(first, prompt(60, 1))
    first.close()
    for path in files(folder):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    engine = make()
    engine.submit(request("running", prompt(30, 2), max_tokens=60, ignore_ends=True))
    engine.step()
    engine.submit(request("waiting", [*prompt(50, 1), 5], max_tokens=4))
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert answers["waiting"].cached == 0
    assert answers["waiting"].tokens == reference(lambda: fake("attention"), [*prompt(50, 1), 5], max_tokens=4)


def test_a_prompt_that_is_cancelled_while_it_waits_for_the_disk_leaves_nothing_behind(make, monkeypatch):
    monkeypatch.setattr("afterglow.engine.kvcache.disk.tier.MIN_PREFETCH_SECONDS", 0.0)
    first = make()
    ask(first, prompt(60, 1))
    first.close()
    engine, original = make(), disk_files.load_file
    read = threading.Event()
    monkeypatch.setattr(disk_files, "load_file", lambda path: (read.wait(20), original(path))[1])
    engine.submit(request("running", prompt(30, 2), max_tokens=30, ignore_ends=True))
    engine.step()
    engine.submit(request("waiting", [*prompt(50, 1), 5]))
    for _ in range(4):
        engine.step()
    engine.cancel("waiting")
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert len(answers["waiting"].tokens) == 0
    read.set()
    assert ask(engine, [*prompt(50, 1), 6]).cached == 50


def test_an_engine_that_is_closed_twice_does_not_wait_for_its_disk_again(make):
    engine = make()
    ask(engine, prompt(60, 1))
    engine.close()
    started = time.monotonic()
    assert engine.prefix_cache.store.disk_tier.writer.flush(60) is False
    engine.prefix_cache.close(timeout=60)
    assert time.monotonic() - started < 30
