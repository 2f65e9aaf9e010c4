"""Laws of what is stored outside of memory: it changes no token, keeps to its bytes, and is nobody else's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.types.settings import EngineSettings
from support.play import KINDS, LAYOUTS, ask, fake, play, prompt, reference, request
from support.truth import check_all

everywhere = pytest.mark.parametrize("shared", LAYOUTS)
every_kind = pytest.mark.parametrize("kind", KINDS)
SYSTEM = prompt(40, 1)
WAYS = [SYSTEM + prompt(20 + 5 * n, 10 + n) for n in range(5)] + [prompt(37 + 4 * n, 20 + n) for n in range(3)]
WAYS.append(prompt(8, 30) * 6)  # the same eight entries, after ever more of them


def small(kind: str, nbytes: int = 10**7, **options) -> Engine:
    return fake(kind, EngineSettings(block_size=8, ram_cache_bytes=nbytes, swap_bytes=nbytes), **options)


def converse(engine: Engine, kind: str, turns: int = 2, **options) -> int:
    """Every conversation in turn, each answer checked; how many entries were reused."""
    conversations, reused = [list(way) for way in WAYS], 0
    for turn in range(turns):
        for number, entries in enumerate(conversations):
            answer = ask(engine, entries, boundaries=frozenset({40}), **options)
            assert answer.tokens == reference(lambda: fake(kind), entries)
            check_all(engine)
            reused += answer.cached
            entries += [*answer.tokens, *prompt(3, 100 * turn + number)]
    return reused


@everywhere
@every_kind
def test_what_is_stored_changes_no_token(kind, shared):
    engine = small(kind, shared=shared, sequences=2)
    known = sum(len(way) + 11 for way in WAYS)
    assert converse(engine, kind) >= known + 40 * 4  # all of the second turn, and the system prompt in the first
    assert engine.prefix_cache.store.ram_counters.hits >= 6


@everywhere
@every_kind
def test_what_is_stored_keeps_to_its_bytes(kind, shared):
    for nbytes in (0, 400, 2_500, 7_000):
        engine = small(kind, nbytes, shared=shared, sequences=2)
        converse(engine, kind)
        assert engine.prefix_cache.store.ram.used_bytes <= nbytes
    assert engine.prefix_cache.store.ram_counters.evictions > 0


def test_the_end_of_a_conversation_goes_before_its_beginning():
    engine = small("attention", 2_600, sequences=1)
    engine.prefix_cache.store._bytes_per_entry = 24.0
    for entries in (prompt(64, 2), prompt(40, 3), [5]):
        ask(engine, entries)
    assert engine.prefix_cache.store.ram_counters.evictions > 0
    assert 40 <= engine.prefix_cache.store.find_stored_prefix(np.array(prompt(64, 2)), "").length < 64


@everywhere
@every_kind
def test_no_salt_finds_what_another_computed(kind, shared):
    engine = small(kind, shared=shared, sequences=3)
    one, other = [request(salt, WAYS[0], salt=salt) for salt in ("one", "other")]
    answers = play(engine, one, other)  # side by side: no waiting for one another, no fork
    assert [answer.cached for answer in answers.values()] == [0, 0]
    assert engine.counters.coalesced == 0
    engine.submit(request("busy", WAYS[1], salt="one", max_tokens=50, ignore_ends=True))
    for _ in range(4):
        engine.step()
    assert engine.explain(request("spy", WAYS[1], salt="spy")).shared_entries == 0
    assert play(engine, request("spy", WAYS[1], salt="spy"))["spy"].cached == 0
    while engine.prefix_cache.evict():
        pass
    assert engine.explain(request("spy", WAYS[0], salt="third")).shared_entries == 0
    assert ask(engine, WAYS[0], salt="third").cached == 0


@every_kind
def test_what_is_pinned_stays(kind):
    engine = small(kind, 4_000 if kind == "recurrent" else 9_000, sequences=1)
    engine.prefix_cache.store.pin_manager.pin(np.array(SYSTEM), "")
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({40}))
    for number in range(12):
        ask(engine, prompt(60, 50 + number))
    assert engine.prefix_cache.store.ram_counters.evictions > 0
    assert ask(engine, [*SYSTEM, 9, 9]).cached == 40


def test_parked_bytes_are_given_back():
    for ending in ("end", "cancel"):
        engine = small("attention", shared=True, cells=100, total_cells=100)
        for number in range(3):
            engine.submit(request(str(number), prompt(20, 10 + number), max_tokens=30, ignore_ends=True))
        while not engine.prefix_cache.swapped_bytes:
            engine.step()
        for number in range(3 if ending == "cancel" else 0):
            engine.cancel(str(number))
        while engine.is_busy:
            engine.step()
            check_all(engine)
        assert engine.prefix_cache.swapped_bytes == 0


# --- on disk


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "prefix"


@contextmanager
def on_disk(kind: str, directory: Path, **options) -> Iterator[Engine]:
    settings = EngineSettings(block_size=8, ram_cache_bytes=10**7, disk_cache_directory=directory)
    engine = fake(kind, settings, **options)
    engine.backend.ledger = engine.interner
    try:
        yield engine
    finally:
        engine.close()


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.suffix in (".cells", ".state"))


@everywhere
@every_kind
def test_a_restart_changes_no_token(kind, shared):
    with folder() as directory:
        with on_disk(kind, directory, shared=shared, sequences=2) as engine:
            converse(engine, kind, turns=1)
        with on_disk(kind, directory, shared=shared, sequences=2) as engine:
            assert converse_again(engine, kind) >= 8 * 30
            assert engine.prefix_cache.store.disk_counters.hits >= 2


def converse_again(engine: Engine, kind: str) -> int:
    reused = 0
    for way in WAYS:
        answer = ask(engine, way + [1, 2, 3], boundaries=frozenset({40}))  # noqa: RUF005
        assert answer.tokens == reference(lambda: fake(kind), [*way, 1, 2, 3])
        reused += ask(engine, way[:40] + [7, 8]).cached  # noqa: RUF005
    return reused


@every_kind
def test_a_damaged_file_changes_no_token(kind):
    with folder() as directory:
        with on_disk(kind, directory) as engine:
            ask(engine, WAYS[0], boundaries=frozenset({40}))
        for path in files(directory):
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
        with on_disk(kind, directory) as engine:
            assert ask(engine, WAYS[0]).tokens == reference(lambda: fake(kind), WAYS[0])


@every_kind
def test_a_file_of_other_entries_changes_no_token(kind):
    """Its checksum and its name are right: only the entries in it tell."""
    with folder() as directory:
        with on_disk(kind, directory) as engine:
            ask(engine, WAYS[0], boundaries=frozenset({40}))
        for path in files(directory):
            loaded = disk_files.load_file(path)
            ids = loaded.file.entries.copy()
            ids[0] += 1
            data = bytearray(loaded.payload)
            data[-6] ^= 1
            disk_files.write_file(path.parent, replace(loaded.file, entries=ids, payload=[bytes(data)]))
        with on_disk(kind, directory) as engine:
            assert ask(engine, WAYS[0]).tokens == reference(lambda: fake(kind), WAYS[0])


@every_kind
def test_an_engine_that_crashed_stores_nothing_of_what_it_was_doing(kind):
    with folder() as directory:
        with on_disk(kind, directory, batch_cells=16) as engine:
            first = ask(engine, WAYS[0])
            engine.submit(request("last", WAYS[0] + first.tokens + WAYS[5]))
            engine.step()
            engine.backend.faults.append(RuntimeError("a bug"))
            with suppress(RuntimeError):
                engine.step()
            for slot in engine.prefix_cache.slots:
                slot.busy = False
        with on_disk(kind, directory) as engine:
            entries = WAYS[0] + first.tokens + WAYS[5]
            assert ask(engine, entries).tokens == reference(lambda: fake(kind), entries)
            check_all(engine)
