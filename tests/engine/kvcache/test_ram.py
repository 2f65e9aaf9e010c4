"""C13: evicted sequences are stored in RAM, each prefix once, and loaded again instead of being recomputed."""

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
from afterglow.engine.types.tile import RowTile
from afterglow.llama import page_buffers
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, LAYOUTS, Answer, ask, fake, play, prompt, reference, request, set_prefill_cost

pytestmark = pytest.mark.slow

every_layout = pytest.mark.parametrize("kv_unified", LAYOUTS, ids=["streams", "unified"])
every_kind = pytest.mark.parametrize("kind", KINDS)
SMALL_BLOCKS = EngineSettings(block_size=8, ram_cache_bytes=10**8)
MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines on tiny models; they are closed at the end of the test."""
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


def make_tokens(length: int, seed: int) -> list[int]:
    """Return random tokens that are not control tokens of the tiny models."""
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


def ask_each(engine: Engine, prompts: list[list[int]], **options) -> list[Answer]:
    return [ask(engine, entries, **options) for entries in prompts]


def list_blocks(engine: Engine) -> list[Block]:
    return list(engine.prefix_cache.store.ram)


# --- more conversations than sequences


@every_layout
@every_kind
def test_six_conversations_in_four_sequences_compute_nothing_twice(kind, kv_unified):
    engine = fake(kind, SMALL_BLOCKS, kv_unified=kv_unified)
    conversations = [prompt(60 + 7 * n, n) for n in range(6)]
    answers = ask_each(engine, conversations)
    for _ in range(2):
        for number, answer in enumerate(answers):
            conversations[number] += answer.tokens[:-1] + prompt(5, 50 + number)
            known = len(conversations[number]) - 5
            answer = answers[number] = ask(engine, conversations[number])
            assert answer.cached == known, "everything except the new message is a prefix hit"
            assert answer.tokens == reference(lambda: fake(kind), conversations[number])
    assert engine.prefix_cache.store.ram.counters.hits >= 8
    assert engine.prefix_cache.store.ram.counters.hit_entries > 8 * 60


@pytest.mark.native
@every_layout
@every_kind
def test_six_conversations_in_four_sequences_on_llama(make_engine, kind, kv_unified):
    engine = make_engine(f"successor-{kind}", kv_unified=kv_unified)
    vocabulary = engine.backend.context.model.vocabulary
    texts = [("abcdefghijklmnopqrstuvwxyz" * 9)[n : 150 + n] for n in range(6)]
    conversations = [list(vocabulary.tokenize(text)) for text in texts]
    cold_answers = ask_each(engine, conversations)
    assert [cold.cached for cold in cold_answers] == [0] * 6
    for conversation, cold in zip(conversations, cold_answers, strict=True):
        warm = ask(engine, conversation + cold.tokens)
        assert warm.cached == len(conversation) + len(cold.tokens) - 1
    assert engine.prefix_cache.store.ram.counters.hits >= 4


@every_kind
def test_an_edited_prompt_reuses_the_stored_prefix_before_the_edit(kind):
    engine = fake(kind, SMALL_BLOCKS, sequences=1)
    first = prompt(80, 1)
    ask(engine, first, boundaries=frozenset({40}))
    ask(engine, prompt(50, 2))
    edited = first[:43] + prompt(20, 3)
    answer = ask(engine, edited)
    assert answer.cached == (43 if kind == "attention" else 40)  # other kinds resume only at a checkpoint
    assert answer.tokens == reference(lambda: fake(kind), edited)


@every_kind
def test_a_sequence_is_stored_before_it_is_truncated(kind):
    """Two branches of one prompt alternate in one sequence."""
    engine = fake(kind, SMALL_BLOCKS, sequences=1)
    system = prompt(64, 1)
    branches = [system + prompt(60, 2), system + prompt(60, 3)]
    branches = [branch + ask(engine, branch, boundaries=frozenset({64})).tokens for branch in branches]
    for branch in branches:
        answer = ask(engine, branch + prompt(4, 9))
        assert answer.cached == len(branch) - 1
        assert answer.tokens == reference(lambda: fake(kind), branch + prompt(4, 9))


# --- deduplication


@pytest.mark.native
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_common_prefix_of_3000_tokens_is_stored_once(make_engine, kind):
    """With streams, in which every sequence has its own cells. A block in which two prompts diverge is stored twice."""
    engine = make_engine(kind, cells=8192, sequences=2)
    set_prefill_cost(engine, 1e-2)  # computing is expensive, so everything is stored
    system = make_tokens(3000, 1)
    block_size = engine.settings.block_size
    prompts = [system + make_tokens(100, 2), system + make_tokens(100, 3)]
    for entries in prompts:
        ask(engine, entries, max_tokens=1, boundaries=frozenset({3000}))
    while engine.prefix_cache.evict():
        pass
    stored = [engine.prefix_cache.store.find_stored_prefix(np.array(entries), "").length for entries in prompts]
    assert stored == [3100, 3100]
    blocks = list_blocks(engine)
    assert sum(len(block.entries) for block in blocks) <= 3000 + 2 * 100 + 3000 % block_size
    assert sum(block.start < 3000 - 3000 % block_size for block in blocks) == 3000 // block_size
    for entries in prompts:
        answer = ask(engine, entries + make_tokens(5, 4), max_tokens=1)
        assert answer.cached == 3100


# --- states assembled from blocks


@pytest.mark.native
@pytest.mark.parametrize("flash_attention", [None, False])
@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
def test_a_state_assembled_from_blocks_gives_the_logits_of_the_saved_state(make_engine, kind, flash_attention):
    """Bit-identical, with streams."""
    engine = make_engine(kind, flash_attention=flash_attention)
    backend, prefix_cache = engine.backend, engine.prefix_cache
    entries = np.array(make_tokens(200, 1))
    ask(engine, entries, max_tokens=0)
    (slot,) = [slot for slot in prefix_cache.slots if len(slot)]
    saved = backend.save(slot.seq_id, "full")
    partial = None if kind == "attention" else backend.save(slot.seq_id, "partial")
    assert prefix_cache.store.store_sequence(slot, partial) == "stored"
    assert len(list_blocks(engine)) == 4
    assembled = prefix_cache.slots[3]
    checkpoint = None if partial is None else prefix_cache.store.build_checkpoint(entries, "", partial)
    prefix_cache.store.load(assembled, entries, prefix_cache.store.find_stored_prefix(entries, ""), checkpoint)
    backend.load(2, saved)
    logits = []
    for seq_id in (2, 3):
        backend.decode([DecodeSpan(seq_id, np.array([30, 31, 32]), 200, 1)])
        logits.append(backend.get_logits(0, 2).copy())
    assert np.array_equal(*logits)
    for seq_id in (2, 3):
        backend.clear(seq_id)
    prefix_cache.slots[3]._set_length(0)


@pytest.mark.native
def test_cells_that_are_not_contiguous_are_stored_in_order(make_engine):
    """With a unified KV cache, a sequence fills the gaps that others left."""
    engine = make_engine("attention", kv_unified=True, cells=1024, sequences=3)
    interleaved = [request(str(n), make_tokens(150, n), max_tokens=40, ignore_eos=True) for n in range(3)]
    play(engine, *interleaved)
    engine.prefix_cache.evict()
    entries = make_tokens(300, 7)
    cold = ask(engine, entries, use_prefix_cache=False)
    for number in range(3):
        ask(engine, make_tokens(320, 20 + number), max_tokens=1, use_prefix_cache=False)
    assert ask(engine, entries).cached == 300
    assert ask(engine, entries).tokens == cold.tokens


# --- the RAM budget


def fake_with_budget(kind: str, nbytes: int, **options) -> Engine:
    return fake(kind, EngineSettings(block_size=8, ram_cache_bytes=nbytes, swap_bytes=nbytes), **options)


@pytest.mark.slow
@every_layout
@every_kind
@pytest.mark.parametrize("nbytes", [0, 1_500, 10_000, 30_000])
def test_the_ram_budget_is_never_exceeded_and_changes_no_token(kind, kv_unified, nbytes):
    engine = fake_with_budget(kind, nbytes, kv_unified=kv_unified, sequences=2)
    for turn in range(3):
        for number in range(5):
            entries = prompt(30 + 9 * number, number) + prompt(4 * turn, 40 + number)
            answer = ask(engine, entries, boundaries=frozenset({16, 30}))
            assert answer.tokens == reference(lambda: fake(kind), entries)
            assert engine.prefix_cache.store.ram.budget.used_bytes <= nbytes
    if nbytes > 1_500:
        counters = engine.prefix_cache.store.ram.counters
        assert counters.evictions + counters.rejected_saves > 0


def test_the_least_recently_used_blocks_are_evicted_first():
    engine = fake_with_budget("attention", 30_000, sequences=1)
    engine.prefix_cache.store.ram.bytes_per_entry = 124.0
    old, recent, new = prompt(64, 1), prompt(64, 2), prompt(120, 3)
    ask_each(engine, [old, recent, old + prompt(4, 5), new, prompt(9, 8)])
    find_stored_prefix = engine.prefix_cache.store.find_stored_prefix
    assert find_stored_prefix(np.array(new), "").length == 120
    assert find_stored_prefix(np.array(recent), "").length < find_stored_prefix(np.array(old), "").length


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_what_waits_to_be_written_is_evicted_last(kind):
    engine = fake_with_budget(kind, 10**6, sequences=1)
    old, new = prompt(64, 1), prompt(64, 2)
    ask_each(engine, [old, new, prompt(9, 8)], boundaries=frozenset({40}))
    ram, checkpoints = engine.prefix_cache.store.ram, engine.prefix_cache.checkpoints

    def list_keys(prefix: list[int]) -> set[tuple[str, bytes]]:
        blocks = engine.prefix_cache.store.find_stored_prefix(np.array(prefix), "").blocks
        on_path = checkpoints.find_on_path(np.array(prefix), "")
        return {("cells", block.key) for block in blocks} | {("state", checkpoint.key) for checkpoint in on_path}

    unwritten = list_keys(old)
    ram.set_unwritten(unwritten)
    while list_keys(new):
        assert ram.evict_until_free(ram.budget.free_bytes + 1)
    assert list_keys(old) == unwritten
    ram.set_unwritten(())
    assert ram.evict_until_free(ram.budget.free_bytes + 1)
    assert list_keys(old) < unwritten


def test_a_pinned_prefix_is_not_evicted():
    engine = fake_with_budget("attention", 67_000, sequences=1)
    system = prompt(64, 1)
    engine.prefix_cache.store.pin_manager.pin(np.array(system), "")
    for number in range(6):
        ask(engine, system + prompt(60, 10 + number))
        ask(engine, prompt(100, 20 + number))
    assert engine.prefix_cache.store.find_stored_prefix(np.array(system), "").length == 64
    assert engine.prefix_cache.store.ram.counters.evictions > 0


def test_nothing_is_stored_if_computing_is_cheaper():
    engine = fake("attention", SMALL_BLOCKS, sequences=1)
    cost_model = engine.prefix_cache.cost_model
    set_prefill_cost(engine, 1e-9)
    cost_model.record_transfer(1_000_000, 1e3, entries=0)
    cost_model.record_prefill = lambda *_: None  # type: ignore[method-assign]
    ask_each(engine, [prompt(60, 1), prompt(60, 2)])
    assert engine.prefix_cache.store.ram.counters.saves == 0


@pytest.mark.parametrize(("row_tile", "saves"), [(None, 0), (RowTile(balanced_cells=50), 1)])
def test_few_tokens_after_many_are_stored_if_attention_to_those_takes_long(row_tile, saves):
    engine = fake("attention", SMALL_BLOCKS, sequences=1, row_tile=row_tile)
    cost_model, system = engine.prefix_cache.cost_model, prompt(600, 1)
    cost_model.record_prefill(64, 0.064, [(64, 0)])  # 1 ms without attention
    cost_model.record_prefill = cost_model.record_transfer = lambda *_: None  # type: ignore[method-assign]
    ask(engine, [*system, *prompt(20, 2)])
    (slot,) = engine.prefix_cache.slots
    cost_model._transfer.add(0.06 / engine.backend.get_state_size(slot.seq_id, "full"))
    ask(engine, [*system, *prompt(20, 3)])  # drops the end of the first conversation: 20 to 24 ms, or 12 times that
    assert engine.prefix_cache.store.ram.counters.saves == saves


@every_kind
def test_checkpoints_and_blocks_share_the_budget(kind):
    engine = fake_with_budget(kind, 15_000, sequences=2)
    for number in range(6):
        ask(engine, prompt(60, number), boundaries=frozenset({10, 20, 30, 40}))
        budget = engine.prefix_cache.store.ram.budget
        assert budget.used_bytes == sum(budget.by_kind.values()) <= 15_000


def is_page_mapped(data: np.ndarray) -> bool:
    """Return whether an array has pages of its own, which the system reclaims when it is freed."""
    base: object = data
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap.mmap)


@pytest.mark.native
@pytest.mark.parametrize("from_disk", [False, True], ids=["computed", "read"])
def test_stored_data_has_its_own_pages_and_is_counted_by_pages(make_engine, tmp_path, monkeypatch, from_disk):
    # The states of tiny models are smaller than those of real ones.
    monkeypatch.setattr(page_buffers, "MIN_MAPPED_BYTES", 1024)
    settings = EngineSettings(block_size=512, ram_cache_bytes=10**8, disk_cache_directory=tmp_path / "prefix")
    entries = make_tokens(512 + 300, 1)
    for _ in range(1 + from_disk):
        engine = make_engine("hybrid", settings, sequences=1)
        answer = ask(engine, entries, max_tokens=1, boundaries=frozenset({600}))
        ask(engine, make_tokens(40, 2), max_tokens=1)
        engine.close()
    assert (answer.cached > 800) == from_disk
    blocks = [block for block in list_blocks(engine) if block.rows.nbytes >= page_buffers.MIN_MAPPED_BYTES]
    assert {block.start for block in blocks} == {0, 512}
    checkpoints = [
        checkpoint
        for checkpoint in engine.prefix_cache.all_checkpoints
        if checkpoint.state.nbytes >= page_buffers.MIN_MAPPED_BYTES
    ]
    assert len(checkpoints) >= 1
    for block in blocks:
        assert is_page_mapped(block.rows)
        assert block.nbytes == page_buffers.get_allocated_bytes(block.rows.nbytes)
    for checkpoint in checkpoints:
        assert is_page_mapped(checkpoint.state.data)
        allocated = page_buffers.get_allocated_bytes(checkpoint.state.nbytes)
        assert checkpoint.nbytes == allocated + checkpoint.entries.nbytes


@pytest.mark.native
def test_a_state_saved_for_one_decode_is_not_page_mapped(make_engine, monkeypatch):
    """Replayed drafts save a state each. The heap reuses the memory of the last one; pages would be mapped anew."""
    monkeypatch.setattr(page_buffers, "MIN_MAPPED_BYTES", 1024)
    engine = make_engine("hybrid")
    ask(engine, make_tokens(100, 1), max_tokens=1)
    (slot,) = [slot for slot in engine.prefix_cache.slots if len(slot)]
    assert not is_page_mapped(engine.backend.save(slot.seq_id, "partial").data)
    assert is_page_mapped(engine.backend.save(slot.seq_id, "partial", long_lived=True).data)
    assert is_page_mapped(slot.save().state.data), "a swapped-out sequence is long-lived"


def test_the_eviction_history_is_bounded(monkeypatch):
    """It is not part of any budget, and prompts may be long."""
    monkeypatch.setattr(explain, "MAX_EVICTED_PREFIX_BYTES", 250 * 8)
    engine = fake("attention", EngineSettings(ram_cache_bytes=0), sequences=1)
    ask_each(engine, [prompt(100, number) for number in range(9)])
    evicted = engine.prefix_cache.eviction_history.find_by_namespace("")
    assert [len(entries) for entries in evicted] == [len(engine.prefix_cache.slots[0])] * 2
    assert engine.explain(request("again", prompt(100, 7))).evicted_entries == 100
    ask_each(engine, [prompt(400, 20), prompt(10, 21)])
    explanation = engine.explain(request("again", prompt(400, 20)))
    assert explanation.evicted_entries == 400, "the latest is recorded regardless of its length"


def test_a_model_that_needs_checkpoints_stores_nothing_without_them():
    settings = EngineSettings(block_size=8, ram_cache_bytes=10**6, checkpoints=CheckpointSettings(max_checkpoints=0))
    engine = fake("hybrid", settings, sequences=1)
    ask_each(engine, [prompt(60, 1), prompt(60, 2)])
    assert list_blocks(engine) == []


# --- deterministic mode


@every_kind
def test_stored_prefixes_give_the_same_tokens_in_deterministic_mode(kind):
    settings = EngineSettings(block_size=8, ram_cache_bytes=10**7, deterministic=True, grid=8)
    engine = fake(kind, settings, sequences=1, simulate_rounding=True)
    cold = [
        reference(lambda: fake(kind, settings, sequences=1, simulate_rounding=True), prompt(50, n)) for n in range(3)
    ]
    for _ in range(2):
        answers = ask_each(engine, [prompt(50, n) for n in range(3)], boundaries=frozenset({24, 40}))
        assert [answer.tokens for answer in answers] == cold
    assert all(answer.cached >= 40 for answer in answers)


# --- tenants


@every_layout
@every_kind
def test_cached_state_is_invisible_to_other_salts(kind, kv_unified):
    engine = fake(kind, SMALL_BLOCKS, kv_unified=kv_unified, sequences=2)
    entries = prompt(60, 1)
    first = ask(engine, entries, salt="mine", boundaries=frozenset({40}))
    for salt in ("yours", ""):
        explanation = engine.explain(request("spy", entries, salt=salt))
        assert explanation.reused_entries == 0
        assert explanation.shared_entries == 0
        assert explanation.evicted_entries == 0
        assert explanation.next_prompt_entry == entries[0]
        assert ask(engine, entries, salt=salt).cached == 0  # also evicts the first sequence to RAM
    assert ask(engine, entries + first.tokens + prompt(3, 4), salt="mine").cached == 60 + len(first.tokens) - 1
    assert ask(engine, prompt(60, 2), salt="yours").cached == 0


def test_a_request_does_not_follow_a_leader_with_another_salt():
    engine = fake("attention", sequences=3)
    answers = play(engine, *[request(salt, prompt(60, 1), salt=salt) for salt in ("a", "b")])
    assert [answer.cached for answer in answers.values()] == [0, 0]
    assert engine.counters.coalesced == 0
