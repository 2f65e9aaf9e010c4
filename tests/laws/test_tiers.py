"""Laws of the RAM and disk tiers: stored blocks change no token, stay within their bytes, and are per salt."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache import prefix_cache
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend
from afterglow.testing.memory import FakeCells
from support.play import KINDS, LAYOUTS, ask, fake, play, prompt, reference, request, set_prefill_cost
from support.truth import check_all

pytestmark = pytest.mark.slow
everywhere = pytest.mark.parametrize("kv_unified", LAYOUTS)
every_kind = pytest.mark.parametrize("kind", KINDS)
SYSTEM = prompt(40, 1)
PROMPTS = [SYSTEM + prompt(20 + 5 * n, 10 + n) for n in range(5)] + [prompt(37 + 4 * n, 20 + n) for n in range(3)]
PROMPTS.append(prompt(8, 30) * 6)  # equal blocks with different predecessors


def small_engine(kind: str, nbytes: int = 10**7, **options) -> Engine:
    return fake(kind, EngineSettings(block_size=8, ram_cache_bytes=nbytes, swap_bytes=nbytes), **options)


def run_conversations(engine: Engine, kind: str, turns: int = 2, **options) -> int:
    """Run all conversations turn by turn, check each completion, and return the number of reused entries."""
    conversations, reused = [list(entries) for entries in PROMPTS], 0
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
def test_stored_blocks_change_no_token(kind, kv_unified):
    engine = small_engine(kind, kv_unified=kv_unified, sequences=2)
    known = sum(len(entries) + 11 for entries in PROMPTS)
    assert run_conversations(engine, kind) >= known + 40 * 4  # everything in turn 2, and the system prompt in turn 1
    assert engine.prefix_cache.store.ram.counters.hits >= 6


@everywhere
@every_kind
def test_stored_blocks_stay_within_their_bytes(kind, kv_unified):
    for nbytes in (0, 2_000, 12_500, 35_000):
        engine = small_engine(kind, nbytes, kv_unified=kv_unified, sequences=2)
        run_conversations(engine, kind)
        assert engine.prefix_cache.store.ram.budget.used_bytes <= nbytes
    assert engine.prefix_cache.store.ram.counters.evictions > 0


def test_the_end_of_a_conversation_is_evicted_before_its_prefix():
    engine = small_engine("attention", 13_500, sequences=1)
    engine.prefix_cache.store.ram.bytes_per_entry = 124.0
    for entries in (prompt(64, 2), prompt(40, 3), [5]):
        ask(engine, entries)
    assert engine.prefix_cache.store.ram.counters.evictions > 0
    assert 40 <= engine.prefix_cache.store.find_stored_prefix(np.array(prompt(64, 2)), "").length < 64


@everywhere
@every_kind
def test_salts_share_no_cached_prefix(kind, kv_unified):
    engine = small_engine(kind, kv_unified=kv_unified, sequences=3)
    first, second = [request(salt, PROMPTS[0], salt=salt) for salt in ("one", "other")]
    answers = play(engine, first, second)  # concurrently: neither coalesced nor forked
    assert [answer.cached for answer in answers.values()] == [0, 0]
    assert engine.counters.coalesced == 0
    engine.submit(request("busy", PROMPTS[1], salt="one", max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert engine.explain(request("spy", PROMPTS[1], salt="spy")).shared_entries == 0
    assert play(engine, request("spy", PROMPTS[1], salt="spy"))["spy"].cached == 0
    while engine.prefix_cache.evict():
        pass
    assert engine.explain(request("spy", PROMPTS[0], salt="third")).shared_entries == 0
    assert ask(engine, PROMPTS[0], salt="third").cached == 0


@every_kind
def test_pinned_blocks_are_not_evicted(kind):
    engine = small_engine(kind, 13_000 if kind == "recurrent" else 47_000, sequences=1)
    engine.prefix_cache.store.pin_manager.pin(np.array(SYSTEM), "")
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({40}))
    for number in range(12):
        ask(engine, prompt(60, 50 + number))
    assert engine.prefix_cache.store.ram.counters.evictions > 0
    assert ask(engine, [*SYSTEM, 9, 9]).cached == 40


def test_swapped_bytes_are_released():
    for ending in ("end", "cancel"):
        engine = small_engine("attention", kv_unified=True, cells_per_sequence=100, total_cells=100)
        for number in range(3):
            engine.submit(request(str(number), prompt(20, 10 + number), max_tokens=30, ignore_eos=True))
        while not engine.prefix_cache.store.ram.budget.get("swapped"):
            engine.step()
        for number in range(3 if ending == "cancel" else 0):
            engine.cancel(str(number))
        while engine.is_busy:
            engine.step()
            check_all(engine)
        assert engine.prefix_cache.store.ram.budget.get("swapped") == 0


# --- disk tier


@contextmanager
def temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "prefix"


@contextmanager
def disk_engine(kind: str, directory: Path, ram_cache_bytes=10**7, block_size=8, **options) -> Iterator[Engine]:
    settings = EngineSettings(
        block_size=block_size, ram_cache_bytes=ram_cache_bytes, disk_cache_directory=directory
    )  # fmt: skip
    engine = fake(kind, settings, **options)
    engine.backend.interner = engine.interner
    try:
        yield engine
    finally:
        engine.close()


def list_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.suffix in (".cells", ".state", ".logits"))


@everywhere
@every_kind
def test_a_restart_changes_no_token(kind, kv_unified):
    with temporary_directory() as directory:
        with disk_engine(kind, directory, kv_unified=kv_unified, sequences=2) as engine:
            run_conversations(engine, kind, turns=1)
        with disk_engine(kind, directory, kv_unified=kv_unified, sequences=2) as engine:
            assert run_again(engine, kind) >= 8 * 30
            assert engine.prefix_cache.store.disk_tier.counters.hits >= 2


def test_a_sequence_larger_than_the_ram_tier_survives_a_restart():
    kind, entries, limit = "attention", prompt(4000, 7), 100_000
    options = {"block_size": 128, "cells_per_sequence": 5000}
    with temporary_directory() as directory:
        with disk_engine(kind, directory, limit, **options) as engine:
            first = ask(engine, entries)
            ram = engine.prefix_cache.store.ram
            used_bytes = []
            put = ram.put
            ram.put = lambda data: (put(data), used_bytes.append(ram.budget.used_bytes))
            engine.close(60)
            assert max(used_bytes) <= limit < ram.counters.saved_bytes
        with disk_engine(kind, directory, **options) as engine:
            second = ask(engine, entries)
            assert second.tokens == first.tokens == reference(lambda: fake(kind, cells_per_sequence=5000), entries)
            assert second.cached >= 3990


def test_an_idle_engine_stores_a_sequence_larger_than_the_ram_tier_piece_by_piece(monkeypatch):
    monkeypatch.setattr(prefix_cache, "IDLE_WRITE_SECONDS", 0.0)  # each piece is what fits into RAM
    with (
        temporary_directory() as directory,
        disk_engine("attention", directory, 100_000, block_size=128, cells_per_sequence=5000) as engine,
    ):
        ask(engine, prompt(4000, 7))
        store, pieces = engine.prefix_cache.store, 0
        while engine.run_idle_task():
            assert store.flush(60)
            store.refresh()
            pieces += 1
        assert pieces >= 2
        assert store.find_stored_prefix(np.array(prompt(4000, 7)), "").length == 4000


class WideCells(FakeCells):
    """Cells of 4 KiB, so that blocks are larger than their tables in RAM."""

    def copy_rows(self, start: int, stop: int) -> np.ndarray:
        return np.tile(FakeCells.copy_rows(self, start, stop), 256)


class WideBackend(FakeBackend):
    def extract_cells(self, state, partial) -> FakeCells:
        return WideCells(super().extract_cells(state, partial).cells, cell_bytes=4096)


def test_a_sequence_larger_than_the_disk_tier_is_not_stored_again_and_again():
    with temporary_directory() as directory:
        settings = EngineSettings(
            block_size=16, ram_cache_bytes=700_000, disk_cache_directory=directory, disk_cache_bytes=2_000_000
        )
        engine = Engine(WideBackend("attention", sequences=1), settings)
        set_prefill_cost(engine, 1.0)
        entries = prompt(1000, 7)
        first = ask(engine, entries)
        pieces = 0
        while engine.run_idle_task():
            pieces += 1
        assert pieces < 10
        assert engine.prefix_cache.store.disk_tier.counters.evictions > 0
        check_all(engine)
        assert ask(engine, [*entries, *first.tokens, 5], max_tokens=1).cached >= 1000  # still on the device
        engine.close(10)


def run_again(engine: Engine, kind: str) -> int:
    reused = 0
    for entries in PROMPTS:
        answer = ask(engine, entries + [1, 2, 3], boundaries=frozenset({40}))  # noqa: RUF005
        assert answer.tokens == reference(lambda: fake(kind), [*entries, 1, 2, 3])
        reused += ask(engine, entries[:40] + [7, 8]).cached  # noqa: RUF005
    return reused


@every_kind
def test_a_damaged_file_changes_no_token(kind):
    with temporary_directory() as directory:
        with disk_engine(kind, directory) as engine:
            ask(engine, PROMPTS[0], boundaries=frozenset({40}))
        for path in list_files(directory):
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
        with disk_engine(kind, directory) as engine:
            assert ask(engine, PROMPTS[0]).tokens == reference(lambda: fake(kind), PROMPTS[0])


@every_kind
def test_a_file_with_other_entries_changes_no_token(kind):
    """The checksum and the name of the file are right; only its entries differ."""
    with temporary_directory() as directory:
        with disk_engine(kind, directory) as engine:
            ask(engine, PROMPTS[0], boundaries=frozenset({40}))
        for path in list_files(directory):
            loaded = disk_files.load_file(path)
            entries = loaded.file.entries.copy()
            entries[0] += 1
            data = bytearray(loaded.payload)
            data[-6] ^= 1
            disk_files.write_file(path.parent, replace(loaded.file, entries=entries, payload=[bytes(data)]))
        with disk_engine(kind, directory) as engine:
            assert ask(engine, PROMPTS[0]).tokens == reference(lambda: fake(kind), PROMPTS[0])


@every_kind
def test_a_crashed_engine_does_not_store_its_kv_cache(kind):
    with temporary_directory() as directory:
        with disk_engine(kind, directory, batch_cells=16) as engine:
            first = ask(engine, PROMPTS[0])
            engine.submit(request("last", PROMPTS[0] + first.tokens + PROMPTS[5]))
            engine.step()
            engine.backend.injected_errors.append(RuntimeError("injected"))
            with suppress(RuntimeError):
                engine.step()
            for slot in engine.prefix_cache.slots:
                slot.busy = False
        with disk_engine(kind, directory) as engine:
            entries = PROMPTS[0] + first.tokens + PROMPTS[5]
            assert ask(engine, entries).tokens == reference(lambda: fake(kind), entries)
            check_all(engine)
