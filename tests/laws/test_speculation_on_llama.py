"""Laws of speculative decoding on llama.cpp: exact on constructed models, within a margin on random weights."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from laws.test_engine_on_llama import CYCLE, check_tokens, random_prompt, run_cold
from support.drafting import Oracle
from support.play import GREEDY, LAYOUTS, ask, check, play, request

KINDS = ("attention", "window", "hybrid", "recurrent")  # the last one by replay: this build has no recurrent snapshots
ROLLBACK = 6
pytestmark = pytest.mark.native


@pytest.fixture
def engines():
    """Return a function that makes engines on tiny models; all are closed after the test."""
    with ExitStack() as stack:

        def make(name: str, settings: EngineSettings, drafters=(), **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 40, "threads": 1}
            model = LlamaModel.load(models.get_path(name))
            stack.callback(model.close)
            rollback = ROLLBACK if "hybrid" in name else 0
            context = LlamaContext(model, ContextSettings(**{**defaults, "recurrent_snapshots": rollback, **context}))
            return Engine(LlamaBackend(context), settings, drafters)

        yield make


def ngram_settings(length: int) -> EngineSettings:
    return EngineSettings(speculation=length, drafters=("ngram",))


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0, 3])
def test_the_ngram_drafter_changes_no_token(engines, kind, kv_unified, temperature):
    sampling = Sampling(temperature=temperature, seed=5, top_k=0, top_p=1, min_p=0) if temperature else GREEDY
    plain = engines(f"successor-{kind}", EngineSettings(speculation="off"), kv_unified=kv_unified)
    engine = engines(f"successor-{kind}", ngram_settings(5), kv_unified=kv_unified)
    vocabulary = engine.backend.context.model.vocabulary
    requests = [
        request(str(n), vocabulary.tokenize((CYCLE * 4)[n : 70 + 9 * n]), max_tokens=60, sampling=sampling)
        for n in range(3)
    ]
    expected, answers = play(plain, *requests), play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == expected[req.id].tokens
    check(engine)
    assert engine.counters.draft_tokens > engine.counters.accepted_tokens * (temperature > 0)
    assert engine.counters.accepted_tokens > 10
    if temperature == 0:  # after one round of the cycle every draft token is accepted
        usage = answers["0"].end.usage
        assert usage.accepted_tokens == usage.draft_tokens > 40
        assert engine.counters.decodes < plain.counters.decodes / 2


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_accepted_and_rejected_drafts_change_no_token_on_random_weights(engines, kind, kv_unified, wrong):
    cold = engines(kind, EngineSettings(speculation="off"), kv_unified=kv_unified)
    settings = EngineSettings(speculation=4, drafters=("oracle",))
    oracle = Oracle({}, wrong, vocabulary=cold.backend.vocabulary_size)
    engine = engines(kind, settings, [oracle], kv_unified=kv_unified)
    for number in range(3):
        entries = random_prompt(300 + 90 * number, number)
        expected, margins = run_cold(cold, entries, max_tokens=40, ignore_eos=True)
        oracle.answers["one"] = expected.tokens
        answer = ask(engine, entries, max_tokens=40, ignore_eos=True)
        check_tokens(answer, expected, margins)
        usage = answer.end.usage
        assert usage.draft_tokens > 0
        assert (usage.accepted_tokens > 0) == (wrong != 1)
        assert engine.counters.rows  # nothing was computed again: no sequence was cleared
        assert not engine._running


def test_a_sliding_window_is_rolled_back_and_never_cleared(engines):
    """640 entries, a window of 32: too many draft tokens must not push the window out."""
    cold = engines("window", EngineSettings(speculation="off"))
    oracle = Oracle({}, 1, vocabulary=cold.backend.vocabulary_size)
    engine = engines("window", EngineSettings(speculation=16, drafters=("oracle",)), [oracle])
    entries = random_prompt(640, 7)
    expected, margins = run_cold(cold, entries, max_tokens=100, ignore_eos=True)
    oracle.answers["one"] = expected.tokens
    answer = ask(engine, entries, max_tokens=100, ignore_eos=True)
    check_tokens(answer, expected, margins)
    usage = answer.end.usage
    assert usage.draft_tokens > 900
    assert engine.counters.rows == 640 + 99 + usage.draft_tokens  # no entry is computed twice


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_model_without_recurrent_snapshots_restores_a_saved_state(engines, kind, kv_unified, wrong):
    cold = engines(kind, EngineSettings(speculation="off"), kv_unified=kv_unified, recurrent_snapshots=0)
    oracle = Oracle({}, wrong, vocabulary=cold.backend.vocabulary_size)
    settings = EngineSettings(speculation=5, drafters=("oracle",))
    engine = engines(kind, settings, [oracle], kv_unified=kv_unified, recurrent_snapshots=0)
    assert engine.backend.capabilities.max_rollback == 0
    for number in range(3):
        entries = random_prompt(200 + 90 * number, number)
        expected, margins = run_cold(cold, entries, max_tokens=40, ignore_eos=True)
        oracle.answers["one"] = expected.tokens
        answer = ask(engine, entries, max_tokens=40, ignore_eos=True)
        check_tokens(answer, expected, margins)
        assert answer.end.usage.draft_tokens > 0
        assert (answer.end.usage.accepted_tokens > 0) == (wrong != 1)
        check(engine)
    assert (engine.counters.replayed_entries > 0) == (wrong > 0)


def test_replay_is_used_only_if_it_costs_less_than_it_saves(engines):
    """The choice depends on the measured cost of saving a state and of larger decodes."""
    engine = engines("successor-recurrent", EngineSettings(drafters=("ngram",)))
    speculator, costs = engine.speculator, engine.prefix_cache.cost_model
    for rows, seconds in ((1, 0.010), (2, 0.0101), (4, 0.0102), (9, 0.0103), (17, 0.0104)):
        for _ in range(3):
            costs.step_costs.record(rows, seconds)
    speculator.rollback.seconds_per_state.value = 0.0001
    assert speculator._find_best_length("ngram", 0.9, 16, 1, None).length > 4
    speculator.rollback.seconds_per_state.value = 0.1
    speculator._length_cache.clear()  # as after every decode with draft tokens
    assert speculator._find_best_length("ngram", 0.9, 16, 1, None).length == 0
