"""Speculation changes no token on real llama.cpp: exactly on constructed models, within a margin on random weights."""

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
from laws.test_laws_on_llama import CYCLE, agree, ordinary, plain_run
from support.drafting import Oracle
from support.play import GREEDY, LAYOUTS, ask, check, play, request

KINDS = ("attention", "window", "hybrid", "recurrent")  # the last by replay: this build keeps no snapshots of it
ROLLBACK = 6


@pytest.fixture
def engines():
    """Make engines on tiny models; all are closed at the end."""
    with ExitStack() as stack:

        def make(name: str, settings: EngineSettings, drafters=(), **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 40, "threads": 1}
            model = LlamaModel.load(models.get_path(name))
            stack.callback(model.close)
            rollback = ROLLBACK if "hybrid" in name else 0
            context = LlamaContext(model, ContextSettings(**{**defaults, "rollback": rollback, **context}))
            return Engine(LlamaBackend(context), settings, drafters)

        yield make


def looking_up(length: int) -> EngineSettings:
    return EngineSettings(speculation=length, drafters=("lookup",))


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0, 3])
def test_what_was_said_before_is_guessed_and_changes_no_token(engines, kind, unified, temperature):
    sampling = Sampling(temperature=temperature, seed=5, top_k=0, top_p=1, min_p=0) if temperature else GREEDY
    plain = engines(f"successor-{kind}", EngineSettings(speculation="off"), kv_unified=unified)
    engine = engines(f"successor-{kind}", looking_up(5), kv_unified=unified)
    words = engine.backend.context.model.vocabulary
    requests = [
        request(str(n), words.tokenize((CYCLE * 4)[n : 70 + 9 * n]), max_tokens=60, sampling=sampling) for n in range(3)
    ]
    expected, answers = play(plain, *requests), play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == expected[one.id].tokens
    check(engine)
    assert engine.counters.draft_tokens > engine.counters.accepted_tokens * (temperature > 0)
    assert engine.counters.accepted_tokens > 10
    if temperature == 0:  # after one round of the cycle every guess is right
        usage = answers["0"].end.usage
        assert usage.accepted_tokens == usage.draft_tokens > 40
        assert engine.counters.decodes < plain.counters.decodes / 2


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_right_and_wrong_guesses_change_no_token_on_random_weights(engines, kind, unified, wrong):
    cold = engines(kind, EngineSettings(speculation="off"), kv_unified=unified)
    settings = EngineSettings(speculation=4, drafters=("oracle",))
    oracle = Oracle({}, wrong, vocabulary=cold.backend.vocabulary)
    engine = engines(kind, settings, [oracle], kv_unified=unified)
    for number in range(3):
        entries = ordinary(300 + 90 * number, number)
        right, margins = plain_run(cold, entries, max_tokens=40, ignore_ends=True)
        oracle.answers["one"] = right.tokens
        answer = ask(engine, entries, max_tokens=40, ignore_ends=True)
        agree(answer, right, margins)
        usage = answer.end.usage
        assert usage.draft_tokens > 0
        assert (usage.accepted_tokens > 0) == (wrong != 1)
        assert engine.counters.rows  # and nothing was computed again: no sequence was given up
        assert not engine._running


def test_a_window_far_behind_its_beginning_is_rolled_back_and_never_given_up(engines):
    """640 entries, a window of 32: a guess too many must not cost the window before it."""
    cold = engines("window", EngineSettings(speculation="off"))
    oracle = Oracle({}, 1, vocabulary=cold.backend.vocabulary)
    engine = engines("window", EngineSettings(speculation=16, drafters=("oracle",)), [oracle])
    entries = ordinary(640, 7)
    right, margins = plain_run(cold, entries, max_tokens=100, ignore_ends=True)
    oracle.answers["one"] = right.tokens
    answer = ask(engine, entries, max_tokens=100, ignore_ends=True)
    agree(answer, right, margins)
    usage = answer.end.usage
    assert usage.draft_tokens > 900
    assert engine.counters.rows == 640 + 99 + usage.draft_tokens  # no entry was computed twice


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_memory_without_snapshots_goes_back_to_a_saved_state(engines, kind, unified, wrong):
    cold = engines(kind, EngineSettings(speculation="off"), kv_unified=unified, recurrent_snapshots=0)
    oracle = Oracle({}, wrong, vocabulary=cold.backend.vocabulary)
    settings = EngineSettings(speculation=5, drafters=("oracle",))
    engine = engines(kind, settings, [oracle], kv_unified=unified, recurrent_snapshots=0)
    assert engine.backend.capabilities.max_rollback == 0
    for number in range(3):
        entries = ordinary(200 + 90 * number, number)
        right, margins = plain_run(cold, entries, max_tokens=40, ignore_ends=True)
        oracle.answers["one"] = right.tokens
        answer = ask(engine, entries, max_tokens=40, ignore_ends=True)
        agree(answer, right, margins)
        assert answer.end.usage.draft_tokens > 0
        assert (answer.end.usage.accepted_tokens > 0) == (wrong != 1)
        check(engine)
    assert (engine.counters.replayed_entries > 0) == (wrong > 0)


def test_replay_is_chosen_where_it_pays_and_not_where_saving_costs_more(engines):
    """The choice flips with the measured cost of saving a state, and of wider decodes."""
    engine = engines("successor-recurrent", EngineSettings(drafters=("lookup",)))
    drafting, costs = engine.speculator, engine.prefix_cache.cost_model
    for rows, seconds in ((1, 0.010), (2, 0.0101), (4, 0.0102), (9, 0.0103), (17, 0.0104)):
        for _ in range(3):
            costs.step_costs.measured(rows, seconds)
    drafting.replay.seconds = 0.0001
    assert drafting._best("lookup", 0.9, 16, 1, None).length > 4
    drafting.replay.seconds = 0.1
    drafting._length_cache.clear()  # as after every decode with guesses
    assert drafting._best("lookup", 0.9, 16, 1, None).length == 0
