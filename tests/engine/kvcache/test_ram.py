"""C13: what has to leave memory goes to RAM, each beginning once, and comes back instead of being computed again."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.kvcache import explain
from afterglow.engine.kvcache.blocks import Block
from afterglow.engine.types.backend import DecodeSpan
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.llama import page_buffers
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, LAYOUTS, Answer, ask, fake, play, prompt, reference, request

everywhere = pytest.mark.parametrize("shared", LAYOUTS, ids=["streams", "unified"])
every_kind = pytest.mark.parametrize("kind", KINDS)
SMALL = EngineSettings(block_size=8, ram_cache_bytes=10**8)
Engines = Callable[..., Engine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Engines on tiny models; closed at the end of the test."""
    with ExitStack() as stack:

        def make(name: str, settings: EngineSettings | None = None, **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 256, "ubatch": 64, "outputs": 8, "threads": 1}
            engine = EngineSpec(
                path=models.get_path(name),
                context_settings=ContextSettings(**{**defaults, **context}),
                engine_settings=settings or EngineSettings(),
            )()
            stack.callback(engine.close)
            return engine

        yield make


def ordinary(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


def in_turn(engine: Engine, conversations: list[list[int]], **options) -> list[Answer]:
    return [ask(engine, one, **options) for one in conversations]


# --- the conversations that did not fit


@everywhere
@every_kind
def test_six_conversations_over_four_slots_compute_nothing_twice(kind, shared):
    engine = fake(kind, SMALL, shared=shared)
    conversations = [prompt(60 + 7 * n, n) for n in range(6)]
    firsts = in_turn(engine, conversations)
    for _ in range(2):
        for number, first in enumerate(firsts):
            conversations[number] += first.tokens[:-1] + prompt(5, 50 + number)
            known = len(conversations[number]) - 5
            answer = firsts[number] = ask(engine, conversations[number])
            assert answer.cached == known, "everything but the new message was there"
            assert answer.tokens == reference(lambda: fake(kind), conversations[number])
    assert engine.prefix_cache.store.ram_counters.hits >= 8
    assert engine.prefix_cache.store.ram_counters.hit_entries > 8 * 60


@pytest.mark.parametrize("unified", LAYOUTS, ids=["streams", "unified"])
@every_kind
def test_six_conversations_over_four_slots_on_llama(engines, kind, unified):
    engine = engines(f"successor-{kind}", kv_unified=unified)
    vocabulary = engine.backend.context.model.vocabulary
    texts = [("abcdefghijklmnopqrstuvwxyz" * 9)[n : 150 + n] for n in range(6)]
    conversations = [list(vocabulary.tokenize(text)) for text in texts]
    colds = in_turn(engine, conversations)
    assert [cold.cached for cold in colds] == [0] * 6
    for conversation, cold in zip(conversations, colds, strict=True):
        warm = ask(engine, conversation + cold.tokens)
        assert warm.cached == len(conversation) + len(cold.tokens) - 1
    assert engine.prefix_cache.store.ram_counters.hits >= 4


@every_kind
def test_an_edit_is_answered_from_what_is_stored_before_it(kind):
    engine = fake(kind, SMALL, sequences=1)
    first = prompt(80, 1)
    ask(engine, first, boundaries=frozenset({40}))
    ask(engine, prompt(50, 2))
    edited = first[:43] + prompt(20, 3)
    answer = ask(engine, edited)
    assert answer.cached == (43 if kind == "attention" else 40)  # others go on only where a checkpoint is
    assert answer.tokens == reference(lambda: fake(kind), edited)


@every_kind
def test_the_end_of_a_conversation_that_is_cut_back_is_stored_first(kind):
    """Two ways on from one prompt, over and over, in one slot."""
    engine = fake(kind, SMALL, sequences=1)
    system = prompt(64, 1)
    ways = [system + prompt(60, 2), system + prompt(60, 3)]
    ways = [one + ask(engine, one, boundaries=frozenset({64})).tokens for one in ways]
    for one in ways:
        answer = ask(engine, one + prompt(4, 9))
        assert answer.cached == len(one) - 1
        assert answer.tokens == reference(lambda: fake(kind), one + prompt(4, 9))


# --- each beginning once


def held(engine: Engine) -> list[Block]:
    return list(engine.prefix_cache.store.ram)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_two_conversations_that_share_3000_tokens_store_them_once(engines, kind):
    """In streams, where every sequence has cells of its own. What parts inside a segment is in two of them."""
    engine = engines(kind, cells=8192, sequences=2)
    system = ordinary(3000, 1)
    block = engine.settings.block_size
    asked = [system + ordinary(100, 2), system + ordinary(100, 3)]
    for one in asked:
        ask(engine, one, max_tokens=1, boundaries=frozenset({3000}))
    while engine.prefix_cache.evict():
        pass
    assert [engine.prefix_cache.store.find_stored_prefix(np.array(one), "").length for one in asked] == [3100, 3100]
    mine = held(engine)
    entries = sum(len(segment.entries) for segment in mine)
    assert entries <= 3000 + 2 * 100 + 3000 % block, "the common beginning is stored once"
    assert sum(segment.start < 3000 - 3000 % block for segment in mine) == 3000 // block
    for one in asked:
        answer = ask(engine, one + ordinary(5, 4), max_tokens=1)
        assert answer.cached == 3100


# --- a spliced state is a whole one


@pytest.mark.parametrize("flash_attention", [None, False])
@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_a_spliced_restore_gives_the_logits_of_a_whole_one(engines, kind, flash_attention):
    """Bit for bit, in streams."""
    engine = engines(kind, flash_attention=flash_attention)
    backend, memory = engine.backend, engine.prefix_cache
    ids = np.array(ordinary(200, 1))
    ask(engine, ids, max_tokens=0)
    (slot,) = [one for one in memory.slots if len(one)]
    whole = backend.save(slot.seq_id, "full")
    partial = None if kind == "attention" else backend.save(slot.seq_id, "partial")
    assert memory.store.store_sequence(slot, partial)
    assert len(held(engine)) == 4
    spliced = memory.slots[3]
    checkpoint = None if partial is None else memory.store.build_checkpoint(ids, "", partial, 0)
    memory.store.load(spliced, ids, memory.store.find_stored_prefix(ids, ""), checkpoint)
    backend.load(2, whole)
    logits = []
    for sequence in (2, 3):
        backend.decode([DecodeSpan(sequence, np.array([30, 31, 32]), 200, 1)])
        logits.append(backend.logits(0, 2).copy())
    assert np.array_equal(*logits)
    for number in (2, 3):
        backend.clear(number)
    memory.slots[3]._note(0)


def test_cells_that_do_not_lie_in_order_are_stored_in_order(engines):
    """Unified, a sequence fills the gaps that others left."""
    engine = engines("attention", kv_unified=True, cells=1024, sequences=3)
    interleaved = [request(str(n), ordinary(150, n), max_tokens=40, ignore_ends=True) for n in range(3)]
    play(engine, *interleaved)
    engine.prefix_cache.evict()
    late = ordinary(300, 7)
    cold = ask(engine, late, reuse=False)
    for number in range(3):
        ask(engine, ordinary(320, 20 + number), max_tokens=1, reuse=False)
    assert ask(engine, late).cached == 299
    assert ask(engine, late).tokens == cold.tokens


# --- the budget


def limited(kind: str, nbytes: int, **options) -> Engine:
    return fake(kind, EngineSettings(block_size=8, ram_cache_bytes=nbytes, swap_bytes=nbytes), **options)


@everywhere
@every_kind
@pytest.mark.parametrize("nbytes", [0, 300, 2_000, 6_000])
def test_the_budget_holds_and_changes_no_token(kind, shared, nbytes):
    engine = limited(kind, nbytes, shared=shared, sequences=2)
    for turn in range(3):
        for number in range(5):
            entries = prompt(30 + 9 * number, number) + prompt(4 * turn, 40 + number)
            answer = ask(engine, entries, boundaries=frozenset({16, 30}))
            assert answer.tokens == reference(lambda: fake(kind), entries)
            assert engine.prefix_cache.store.ram.used_bytes <= nbytes
    if nbytes > 300:
        assert (
            engine.prefix_cache.store.ram_counters.evictions + engine.prefix_cache.store.ram_counters.rejected_saves > 0
        )


def test_what_was_not_used_for_longest_goes_first():
    engine = limited("attention", 5_800, sequences=1)
    engine.prefix_cache.store._bytes_per_entry = 24.0
    old, recent, new = prompt(64, 1), prompt(64, 2), prompt(120, 3)
    in_turn(engine, [old, recent, old + prompt(4, 5), new, prompt(9, 8)])
    cover = engine.prefix_cache.store.find_stored_prefix
    assert cover(np.array(new), "").length == 120
    assert cover(np.array(recent), "").length < cover(np.array(old), "").length


def test_what_is_pinned_stays():
    engine = limited("attention", 13_000, sequences=1)
    system = prompt(64, 1)
    engine.prefix_cache.store.pin_manager.pin(np.array(system), "")
    for number in range(6):
        ask(engine, system + prompt(60, 10 + number))
        ask(engine, prompt(100, 20 + number))
    assert engine.prefix_cache.store.find_stored_prefix(np.array(system), "").length == 64
    assert engine.prefix_cache.store.ram_counters.evictions > 0


def test_nothing_is_stored_where_computing_is_cheaper():
    engine = fake("attention", SMALL, sequences=1)
    engine.prefix_cache.cost_model.seconds_per_entry, engine.prefix_cache.cost_model.seconds_per_byte = 1e-9, 1e-3
    with_costs = engine.prefix_cache.cost_model
    with_costs.record_prefill = lambda entries, seconds: None  # type: ignore[method-assign]
    in_turn(engine, [prompt(60, 1), prompt(60, 2)])
    assert engine.prefix_cache.store.ram_counters.saves == 0


@every_kind
def test_checkpoints_and_segments_share_the_budget(kind):
    engine = limited(kind, 3_000, sequences=2)
    for number in range(6):
        ask(engine, prompt(60, number), boundaries=frozenset({10, 20, 30, 40}))
        ram = engine.prefix_cache.store.ram
        assert ram.used_bytes == ram.block_bytes + engine.prefix_cache.checkpoints.nbytes <= 3_000


def pages_of(data: np.ndarray) -> bool:
    """Whether bytes lie in pages of their own, which the system has back when they are let go."""
    base: object = data
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap.mmap)


@pytest.mark.parametrize("from_disk", [False, True], ids=["computed", "read"])
def test_what_is_kept_lies_in_pages_and_is_counted_with_them(engines, tmp_path, monkeypatch, from_disk):
    monkeypatch.setattr(
        page_buffers, "MIN_MAPPED_BYTES", 1024
    )  # the states of tiny models are smaller than those of others
    settings = EngineSettings(block_size=512, ram_cache_bytes=10**8, disk_cache_directory=tmp_path / "prefix")
    ids = ordinary(512 + 300, 1)
    for _ in range(1 + from_disk):
        engine = engines("hybrid", settings, sequences=1)
        answer = ask(engine, ids, max_tokens=1, boundaries=frozenset({600}))
        ask(engine, ordinary(40, 2), max_tokens=1)
        engine.close()
    assert (answer.cached > 800) == from_disk
    segments = [segment for segment in held(engine) if segment.rows.nbytes >= page_buffers.MIN_MAPPED_BYTES]
    assert {segment.start for segment in segments} == {0, 512}
    checkpoints = [
        one for one in engine.prefix_cache.all_checkpoints if one.state.nbytes >= page_buffers.MIN_MAPPED_BYTES
    ]
    assert len(checkpoints) >= 1
    for segment in segments:
        assert pages_of(segment.rows)
        assert segment.nbytes == page_buffers.get_allocated_bytes(segment.rows.nbytes) + segment.entries.nbytes
    for checkpoint in checkpoints:
        assert pages_of(checkpoint.state.data)
        assert checkpoint.nbytes == page_buffers.get_allocated_bytes(checkpoint.state.nbytes) + checkpoint.ids.nbytes


def test_what_is_saved_for_one_decode_does_not_wait_for_pages(engines, monkeypatch):
    """Replayed guesses save a state each; the heap has the room of the last one, pages have to be had anew."""
    monkeypatch.setattr(page_buffers, "MIN_MAPPED_BYTES", 1024)
    engine = engines("hybrid")
    ask(engine, ordinary(100, 1), max_tokens=1)
    (slot,) = [one for one in engine.prefix_cache.slots if len(one)]
    assert not pages_of(engine.backend.save(slot.seq_id, "partial").data)
    assert pages_of(engine.backend.save(slot.seq_id, "partial", long_lived=True).data)
    assert pages_of(slot.save().state.data), "a parked sequence stays"


def test_of_what_had_to_go_only_so_many_entries_are_remembered(monkeypatch):
    """They are in no budget, and prompts may be long."""
    monkeypatch.setattr(explain, "MAX_EVICTED_PREFIX_BYTES", 250 * 8)
    engine = fake("attention", EngineSettings(ram_cache_bytes=0), sequences=1)
    in_turn(engine, [prompt(100, number) for number in range(9)])
    assert [len(gone) for gone in engine.prefix_cache.eviction_history.find_by_salt("")] == [
        len(engine.prefix_cache.slots[0])
    ] * 2
    assert engine.explain(request("again", prompt(100, 7))).evicted_entries == 100
    in_turn(engine, [prompt(400, 20), prompt(10, 21)])
    assert engine.explain(request("again", prompt(400, 20))).evicted_entries == 400, "the last one, however long it is"


def test_a_model_without_checkpoints_stores_nothing_that_it_could_not_use():
    settings = EngineSettings(block_size=8, ram_cache_bytes=10**6, checkpoints=CheckpointSettings(max_checkpoints=0))
    engine = fake("hybrid", settings, sequences=1)
    in_turn(engine, [prompt(60, 1), prompt(60, 2)])
    assert held(engine) == []


# --- the deterministic grid


@every_kind
def test_on_the_grid_stored_beginnings_give_the_same_tokens(kind):
    settings = EngineSettings(block_size=8, ram_cache_bytes=10**7, deterministic=True, grid=8)
    engine = fake(kind, settings, sequences=1, rounding=True)
    cold = [reference(lambda: fake(kind, settings, sequences=1, rounding=True), prompt(50, n)) for n in range(3)]
    for _ in range(2):
        answers = in_turn(engine, [prompt(50, n) for n in range(3)], boundaries=frozenset({24, 40}))
        assert [answer.tokens for answer in answers] == cold
    assert all(answer.cached >= 40 for answer in answers)


# --- tenants


@everywhere
@every_kind
def test_another_salt_sees_nothing(kind, shared):
    engine = fake(kind, SMALL, shared=shared, sequences=2)
    mine = prompt(60, 1)
    first = ask(engine, mine, salt="mine", boundaries=frozenset({40}))
    for salt in ("yours", ""):
        theirs = engine.explain(request("spy", mine, salt=salt))
        assert (theirs.reused_entries, theirs.shared_entries, theirs.evicted_entries, theirs.next_prompt_entry) == (
            0,
            0,
            0,
            mine[0],
        )
        assert ask(engine, mine, salt=salt).cached == 0  # which also pushes mine out to RAM
    assert ask(engine, mine + first.tokens + prompt(3, 4), salt="mine").cached == 60 + len(first.tokens) - 1
    assert ask(engine, prompt(60, 2), salt="yours").cached == 0


def test_a_request_of_another_salt_does_not_wait_for_a_leader():
    engine = fake("attention", sequences=3)
    answers = play(engine, *[request(salt, prompt(60, 1), salt=salt) for salt in ("a", "b")])
    assert [answer.cached for answer in answers.values()] == [0, 0]
    assert engine.counters.coalesced == 0
