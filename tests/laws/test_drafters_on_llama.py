"""Laws of MTP heads and draft models on llama.cpp: they change no token; their drafts are known by construction."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.speculation.draft_model import DraftModel
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, UnsupportedOperation, UnsupportedOption
from afterglow.llama.handle import list_open_handles
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from afterglow.testing.models.constructed import MISDRAFTED_TOKENS
from laws.test_engine_on_llama import CYCLE, check_tokens, random_prompt, run_cold
from support.play import GREEDY, LAYOUTS, ask, check, play, request

ROLLBACK = 6
pytestmark = pytest.mark.native


@pytest.fixture
def engines():
    """Return a function that makes engines on tiny models; all are closed after the test."""
    with ExitStack() as stack:

        def make(name: str, length: int | str, draft=None, settings=None, **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 40, "threads": 1}
            drafters = None if draft is None else ("mtp",) if draft == "mtp" else ("draft",)
            rollback = ROLLBACK if "hybrid" in name or "successor-mtp" in name else 0
            spec = EngineSpec(
                path=models.get_path(name),
                context_settings=ContextSettings(**{**defaults, "recurrent_snapshots": rollback, **context}),
                engine_settings=EngineSettings(speculation=length, drafters=drafters, **(settings or {})),
                draft=draft if draft in (None, "mtp") else models.get_path(draft),
            )
            engine = spec()
            stack.callback(engine.close)
            return engine

        yield make


def build_cycle_requests(engine: Engine, count: int = 3, **options) -> list:
    vocabulary = engine.backend.context.model.vocabulary
    options = {"max_tokens": 56, "sampling": GREEDY} | options
    return [request(str(n), vocabulary.tokenize((CYCLE * 3)[n : 40 + 9 * n]), **options) for n in range(count)]


def compute_successors(last: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        tokens.append(last := models.get_successor(last))
    return tokens


@pytest.mark.parametrize("kv_unified", LAYOUTS)
def test_c10_heads_that_are_always_right_save_three_of_four_decodes(engines, kv_unified):
    engine = engines("successor-mtp", 3, "mtp", kv_unified=kv_unified)
    requests = build_cycle_requests(engine)
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_successors(req.entries[-1], 56)
        usage = answers[req.id].end.usage
        assert usage.accepted_tokens == usage.draft_tokens > 36
        tokens_per_decode = usage.generated_tokens / (usage.generated_tokens - usage.accepted_tokens)
        assert tokens_per_decode > 3.3
    assert engine.counters.max_batch_jobs == 3
    check(engine)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("name", ["successor-mtp-75", "successor-headed"])
def test_c10_heads_that_are_wrong_after_every_fourth_token_have_an_acceptance_rate_of_three_quarters(
    engines, name, kv_unified
):
    engine = engines(name, 4, "mtp", kv_unified=kv_unified)
    requests = build_cycle_requests(engine)
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_successors(req.entries[-1], 56)
    # A hybrid recomputes the accepted tokens after a rejection, without a draft, if the sequences of a decode have
    # different numbers of rows: the next draft starts a token later, and its third token is wrong, not its fourth.
    rate = 0.5 if name == "successor-mtp-75" else 0.75
    assert engine.counters.accepted_tokens / engine.counters.draft_tokens == pytest.approx(rate, abs=0.05)
    assert engine.counters.accepted_tokens > 50


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_c10_chained_heads_draft_one_token_each(engines, kv_unified, length):
    """The first head is always right, the second is wrong after every fourth token: every draft token is known."""
    engine = engines("successor-chained", length, "mtp", kv_unified=kv_unified)
    requests = build_cycle_requests(engine)
    answers = play(engine, *requests)
    for req in requests:
        tokens = compute_successors(req.entries[-1], 56)
        assert answers[req.id].tokens == tokens
        done, draft_tokens, accepted_tokens = 1, 0, 0
        while done < 56:
            draft_length = min(length, 2, 56 - done - 1)
            right = draft_length if draft_length < 2 or tokens[done] not in MISDRAFTED_TOKENS else 1
            done, draft_tokens, accepted_tokens = done + right + 1, draft_tokens + draft_length, accepted_tokens + right
        usage = answers[req.id].end.usage
        assert (usage.draft_tokens, usage.accepted_tokens) == (draft_tokens, accepted_tokens)
    check(engine)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
def test_chained_heads_with_a_window_change_no_token_on_random_weights(engines, kv_unified):
    """Sequences are continued, restored beyond the window, stored and loaded."""
    layout = {"kv_unified": kv_unified, "sequences": 2, "cells": 2048}
    cold, engine = (
        engines("window-chained", "off", **layout),
        engines("window-chained", 2, "mtp", {"block_size": 16}, **layout),
    )
    system = random_prompt(150, 1)
    for number in range(6):
        entries = system[: 150 - 50 * (number % 2)] + random_prompt(30 + 40 * number, 10 + number)
        answer = ask(engine, entries, boundaries=frozenset({100, 150}), max_tokens=40, ignore_eos=True)
        check_tokens(answer, *run_cold(cold, entries, max_tokens=40, ignore_eos=True))
        assert answer.end.usage.draft_tokens > 0
        assert number == 0 or answer.cached >= 99
        check(engine)
    assert engine.prefix_cache.store.ram.counters.saves > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_c14_a_seed_gives_the_same_tokens_with_heads_and_without(engines, seed):
    sampling = Sampling(temperature=3.0, seed=seed, top_k=0, top_p=1, min_p=0)
    plain, engine = engines("successor-mtp-75", "off"), engines("successor-mtp-75", 4, "mtp")
    requests = build_cycle_requests(engine, sampling=sampling)
    expected, answers = play(plain, *requests), play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == expected[req.id].tokens
    assert 0 < engine.counters.accepted_tokens < engine.counters.draft_tokens


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("name", ["hybrid-mtp", "attention-mtp"])
def test_noisy_heads_change_no_token_on_random_weights(engines, name, kv_unified):
    cold, engine = engines(name, "off", kv_unified=kv_unified), engines(name, 3, "mtp", kv_unified=kv_unified)
    boundaries = frozenset({100, 150})
    system = random_prompt(150, 1)
    for number in range(4):  # cold, then with a cached prefix
        entries = system + random_prompt(30 + number, 10 + number)
        answer = ask(engine, entries, boundaries=boundaries, max_tokens=40, ignore_eos=True)
        check_tokens(answer, *run_cold(cold, entries, max_tokens=40, ignore_eos=True))
        assert answer.end.usage.draft_tokens > 0
        assert number == 0 or answer.cached >= (149 if name == "attention-mtp" else 150)
        check(engine)


MTP_MODELS = ["hybrid-mtp", "attention-mtp", "window-chained", "window-chained-short"]


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("name", MTP_MODELS)
def test_heads_draft_the_same_after_a_prefix_hit(engines, name, kv_unified):
    """The KV cache of the heads and the hidden state are restored, forked and continued. (Nothing is stored here.)

    Without checkpoints the hidden state comes from computing one more entry, which the heads hold already.
    """
    layout = {"kv_unified": kv_unified, "batch": 50, "ubatch": 50}
    engine = engines(name, 2, "mtp", **layout)
    backend = engine.backend
    backend.extract_cells = lambda state, partial: None
    entries, boundaries = random_prompt(500, 1), frozenset({100})  # longer than every window
    ask(engine, entries, boundaries=boundaries, max_tokens=1)
    cold = engines(name, 2, "mtp", **layout)
    for last in (random_prompt(20, 2), random_prompt(25, 3)):
        prompt = entries[:100] + last
        cached = ask(engine, prompt, boundaries=boundaries, max_tokens=1).cached
        assert cached >= (99 if name == "attention-mtp" else 100)
        ask(cold, prompt, boundaries=boundaries, max_tokens=1, use_prefix_cache=False)
        slot = next(slot for slot in engine.prefix_cache.slots if list(slot.entries[: len(prompt)]) == prompt)
        other = next(slot for slot in cold.prefix_cache.slots if list(slot.entries[: len(prompt)]) == prompt)
        drafts = backend.session.draft({slot.seq_id: 30})[slot.seq_id]
        assert drafts == cold.backend.session.draft({other.seq_id: 30})[other.seq_id]
        first, last = backend.head_context.memory.get_position_range(slot.seq_id)
        assert last == len(prompt) - 1
        assert first == 0 or "window" in name
        assert np.allclose(compute_head_logits(engine, slot.seq_id), compute_head_logits(cold, other.seq_id), atol=5e-3)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("tier", ["RAM", "disk"])
@pytest.mark.parametrize("name", MTP_MODELS)
def test_heads_draft_the_same_after_blocks_are_loaded(engines, tmp_path, name, kv_unified, tier):
    """Blocks hold the cells of the heads, checkpoints the hidden state and their window, also across processes."""
    settings = {"disk_cache_directory": tmp_path / "prefix", "block_size": 16}
    layout = {"sequences": 1, "cells": 1024, "kv_unified": kv_unified, "batch": 50, "ubatch": 50}
    engine = engines(name, 2, "mtp", settings, **layout)
    entries, boundaries = random_prompt(150, 1), frozenset({100})
    ask(engine, entries, boundaries=boundaries, max_tokens=1)
    ask(engine, random_prompt(60, 9), max_tokens=1)  # evicts the only sequence
    if tier == "disk":
        engine.prefix_cache.close()
        engine = engines(name, 2, "mtp", settings, **layout)
    cold = engines(name, 2, "mtp", **layout)
    for last in (random_prompt(20, 2), random_prompt(25, 3)):
        prompt = entries[:100] + last
        hits = sum(tier.counters.hits for tier in engine.prefix_cache.store.tiers)
        cached = ask(engine, prompt, boundaries=boundaries, max_tokens=1).cached
        assert cached == (99 if name == "attention-mtp" else 100)
        assert sum(tier.counters.hits for tier in engine.prefix_cache.store.tiers) == hits + 1
        ask(cold, prompt, boundaries=boundaries, max_tokens=1, use_prefix_cache=False)
        drafts = engine.backend.session.draft({0: 30})[0]
        assert drafts == cold.backend.session.draft({0: 30})[0]
        first, last = engine.backend.head_context.memory.get_position_range(0)
        assert last == len(prompt) - 1
        assert first == 0 or "window" in name
        assert np.allclose(compute_head_logits(engine), compute_head_logits(cold), atol=5e-3)
        if name == "hybrid-mtp":
            # The batches are the same, so the logits are bit-identical.
            assert np.array_equal(compute_head_logits(engine), compute_head_logits(cold))
        check(engine)
        ask(engine, random_prompt(60, 9), max_tokens=1)


def compute_head_logits(engine: Engine, sequence: int = 0) -> np.ndarray:
    """Return the logits of the first head for one more token after the entries of a sequence."""
    heads, session = engine.backend.head_context, engine.backend.session
    end = heads.memory.get_position_range(sequence)[1] + 1
    heads.batch.clear()
    heads.batch.add_row(30, position=end, sequence=sequence, output=True)
    heads.batch.hidden_states[0] = session.get_hidden_state(sequence, end)
    heads.decode()
    logits = heads.get_logits(0).copy()
    heads.memory.remove(sequence, start=end)
    return logits


def test_heads_that_cover_only_the_last_entries_are_stored_and_restored(engines, monkeypatch):
    monkeypatch.setattr("afterglow.engine.speculation.mtp.session.MAX_BACKLOG_ENTRIES", 48)
    engine = engines("hybrid-mtp", 2, "mtp", {"block_size": 16}, sequences=1, cells=1024)
    entries = random_prompt(150, 1)
    ask(engine, entries, max_tokens=1)
    ask(engine, random_prompt(60, 9), max_tokens=1)
    answer = ask(engine, [*entries, 30], max_tokens=1)
    assert answer.cached == 150
    engine.backend.session.catch_up([0])
    first, last = engine.backend.head_context.memory.get_position_range(0)
    assert (first, last) == (102, 150)
    check(engine)


def test_the_kv_cache_of_heads_is_saved_with_the_sequence(engines):
    engine = engines("hybrid-mtp", 2, "mtp")
    ask(engine, random_prompt(60, 1), max_tokens=1)
    slot = next(slot for slot in engine.prefix_cache.slots if len(slot))
    before = engine.backend.session.draft({slot.seq_id: 30})[slot.seq_id]
    saved = slot.save()
    slot.clear()
    assert engine.backend.head_context.memory.get_position_range(slot.seq_id) is None
    slot.load(saved.entries, saved.state)
    assert engine.backend.head_context.memory.get_position_range(slot.seq_id) == (0, 59)
    assert engine.backend.session.draft({slot.seq_id: 30})[slot.seq_id] == before
    assert saved.state.nbytes > saved.state.data.nbytes
    plain = type(saved.state).__mro__[1].from_bytes(saved.state.to_bytes())
    slot.load(saved.entries, plain)  # as loaded from a file: the heads start empty
    assert engine.backend.head_context.memory.get_position_range(slot.seq_id) is None
    check(engine)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("name", ["successor-mtp", "successor-mtp-75"])
def test_heads_of_a_model_without_recurrent_snapshots_use_replay(engines, name, kv_unified):
    engine = engines(name, 4, "mtp", kv_unified=kv_unified, recurrent_snapshots=0)
    requests = build_cycle_requests(engine)
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_successors(req.entries[-1], 56)
    assert engine.counters.accepted_tokens > 50
    assert (engine.counters.replayed_entries > 0) == (name == "successor-mtp-75")
    check(engine)


def test_noisy_heads_with_replay_change_no_token_on_random_weights(engines):
    cold, engine = engines("hybrid-mtp", "off"), engines("hybrid-mtp", 3, "mtp", recurrent_snapshots=0)
    for number in range(3):
        entries = random_prompt(120 + 30 * number, number)
        answer = ask(engine, entries, max_tokens=40, ignore_eos=True)
        check_tokens(answer, *run_cold(cold, entries, max_tokens=40, ignore_eos=True))
        check(engine)
    assert engine.counters.replayed_entries > 0


def test_mtp_on_a_model_without_heads_is_rejected(engines):
    with pytest.raises(UnsupportedOperation, match="no MTP heads"):
        engines("successor-hybrid", 3, "mtp")
    assert not [handle for handle in list_open_handles() if handle._name == "model"]


# --- draft models


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])
@pytest.mark.parametrize("draft", ["successor-attention", "successor-recurrent", "successor-hybrid"])
def test_an_equal_draft_model_is_always_accepted(engines, kind, draft, kv_unified):
    engine = engines(f"successor-{kind}", 4, draft, kv_unified=kv_unified)
    requests = build_cycle_requests(engine)
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_successors(req.entries[-1], 56)
        usage = answers[req.id].end.usage
        assert usage.accepted_tokens == usage.draft_tokens > 36
    check(engine)


def test_a_different_draft_model_changes_no_token(engines):
    cold, engine = engines("attention", "off"), engines("attention", 3, "draft")
    first = random_prompt(150, 1)
    for number in range(3):
        entries = first + random_prompt(20, number)
        answer = ask(engine, entries, max_tokens=40, ignore_eos=True)
        check_tokens(answer, *run_cold(cold, entries, max_tokens=40, ignore_eos=True))
        assert answer.end.usage.draft_tokens > answer.end.usage.accepted_tokens
    assert max(len(slot) for slot in get_draft_model(engine).prefix_cache.slots) > 150


def test_a_draft_model_computes_only_new_entries_of_the_next_turn(engines):
    engine = engines("successor-attention", 4, "successor-recurrent")
    backend = get_draft_model(engine)._backend
    (req,) = build_cycle_requests(engine, 1)
    first = play(engine, req)["0"].tokens
    decoded = record_decoded_rows(backend)
    turn = [*req.entries, *first, *req.entries[:7]]
    answer = ask(engine, turn, max_tokens=5)
    assert answer.tokens == compute_successors(turn[-1], 5)
    assert answer.end.usage.accepted_tokens == answer.end.usage.draft_tokens > 0
    assert sum(decoded) < 30


@pytest.mark.parametrize("tier", ["RAM", "disk"])
@pytest.mark.parametrize(
    "draft", ["successor-attention", "successor-window", "successor-recurrent", "successor-hybrid"]
)
def test_the_state_of_a_draft_model_is_stored_with_the_target_s(engines, tmp_path, draft, tier):
    """After eviction and after a restart the draft model computes only new entries, for the same salt."""
    settings = {"disk_cache_directory": tmp_path / "prefix", "block_size": 16}
    engine = engines("successor-attention", 4, draft, settings, sequences=1, cells=2048)
    vocabulary = engine.backend.context.model.vocabulary
    entries = vocabulary.tokenize((CYCLE * 8)[:200])
    ask(engine, entries, boundaries=frozenset({150}), max_tokens=8)
    ask(engine, entries[7:], max_tokens=8)  # evicts the only sequence of both
    if tier == "disk":
        for cache in (engine.prefix_cache, get_draft_model(engine).prefix_cache):
            cache.close()
        engine = engines("successor-attention", 4, draft, settings, sequences=1, cells=2048)
    decoded = record_decoded_rows(get_draft_model(engine)._backend)
    turn = entries[:150] + entries[3:9]
    answer = ask(engine, turn, max_tokens=9)
    assert answer.tokens == compute_successors(turn[-1], 9)
    assert answer.cached == 150
    assert answer.end.usage.accepted_tokens == answer.end.usage.draft_tokens > 0
    assert 0 < sum(decoded) < 30
    before = sum(decoded)
    ask(engine, turn, max_tokens=9, salt="another")
    assert sum(decoded) - before > 150
    store = get_draft_model(engine).prefix_cache.store
    assert sum(tier.counters.hits for tier in store.tiers) > 0


def test_a_draft_model_stays_within_its_share_of_the_ram_cache(engines):
    engine = engines(
        "successor-attention", 4, "successor-hybrid", {"ram_cache_bytes": 800_000}, sequences=1, cells=2048
    )
    stores = engine.prefix_cache.store, get_draft_model(engine).prefix_cache.store
    target, draft = (store.ram.budget for store in stores)
    assert target.limit + draft.limit == 800_000
    vocabulary = engine.backend.context.model.vocabulary
    for number in range(8):
        ask(engine, vocabulary.tokenize((CYCLE * 12)[number : number + 250]), max_tokens=6)
        assert target.used_bytes <= target.limit
        assert draft.used_bytes <= draft.limit
    assert draft.used_bytes > 0


def get_draft_model(engine: Engine) -> DraftModel:
    return next(drafter for drafter in engine.speculator._drafters if isinstance(drafter, DraftModel))


def record_decoded_rows(backend: LlamaBackend) -> list[int]:
    """Return a list to which the rows of each later decode are appended."""
    decoded: list[int] = []
    original = backend.decode
    backend.decode = lambda spans: decoded.append(sum(len(span.entries) for span in spans)) or original(spans)
    return decoded


@pytest.mark.model
def test_a_draft_model_with_another_vocabulary_is_rejected_with_the_first_difference(smollm2):
    with pytest.raises(InvalidArgument, match="tokens and the model"):
        EngineSpec(path=models.get_path("attention"), draft=smollm2)()


def test_only_available_drafters_can_be_named(engines):
    with pytest.raises(UnsupportedOption, match="mtp"):
        EngineSpec(path=models.get_path("attention"), engine_settings=EngineSettings(drafters=("mtp",)))()
    engine = engines("successor-mtp", "auto", "mtp")
    assert [drafter.name for drafter in engine.speculator._drafters] == ["mtp"]
