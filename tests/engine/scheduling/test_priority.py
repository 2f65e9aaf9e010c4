"""Priorities: interactive requests run as if they were alone, background work advances, and no token changes.

The simulation counts the rows of decodes instead of seconds: a row costs one millisecond, a step five.
"""

from __future__ import annotations

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.scheduling.scheduler import MAX_PAUSE_SECONDS, MIN_CHUNK_ENTRIES
from afterglow.engine.types.settings import EngineSettings
from support.play import KINDS, Answer, ask, collect, fake, play, prompt, request, set_prefill_cost
from support.truth import compute_tokens, finish_checked

BACKGROUND = -10
SECONDS_PER_ENTRY, SECONDS_PER_STEP = 0.001, 0.005


def build_engine(kind: str = "attention", **options: object) -> Engine:
    """Return an engine whose costs are those of the simulation, whatever the machine does."""
    engine = fake(kind, **{"batch_cells": 512, "cells_per_sequence": 4096, **options})
    cost_model = engine.prefix_cache.cost_model
    set_prefill_cost(engine, SECONDS_PER_ENTRY)
    cost_model.seconds_per_step = SECONDS_PER_STEP
    cost_model.record_prefill = cost_model.record_decode_step = lambda *_: None
    return engine


def compute_seconds(engine: Engine, first_decode: int) -> float:
    decodes = engine.backend.decode_history[first_decode:]
    return sum(SECONDS_PER_STEP + SECONDS_PER_ENTRY * sum(rows for _, rows in spans) for spans in decodes)


def measure_first_token(engine: Engine, entries: list[int], steps_before: int) -> float:
    """Return the simulated time to first token of a request that arrives while decode `steps_before` starts."""
    answers: dict[str, Answer] = {}
    for _ in range(steps_before):
        collect(answers, engine)
    first_decode = max(0, len(engine.backend.decode_history) - 1) if steps_before else 0  # it waits for this one
    engine.submit(request("interactive", entries, max_tokens=4))
    while "interactive" not in answers or not answers["interactive"].tokens:
        collect(answers, engine)
    return compute_seconds(engine, first_decode)


@pytest.mark.parametrize("steps_before", [1, 2, 5, 40, 85, 100])
def test_eight_background_prompts_delay_a_first_token_by_less_than_a_third(steps_before: int):
    alone = measure_first_token(build_engine(sequences=9), prompt(512, 99), 0)
    engine = build_engine(sequences=9)
    for number in range(8):
        background = request(str(number), prompt(1000, number), priority=BACKGROUND, max_tokens=50, ignore_eos=True)
        engine.submit(background)
    assert measure_first_token(engine, prompt(512, 99), steps_before) <= 1.3 * alone


def test_without_a_priority_the_same_prompts_would_delay_it_more():
    alone = measure_first_token(build_engine(sequences=9), prompt(512, 99), 0)
    engine = build_engine(sequences=9)
    for number in range(8):
        engine.submit(request(str(number), prompt(1000, number), max_tokens=50, ignore_eos=True))
    assert measure_first_token(engine, prompt(512, 99), 2) > 1.3 * alone


@pytest.mark.parametrize("kind", KINDS)
def test_an_interactive_request_takes_the_sequence_of_a_background_job_and_no_token_changes(kind: str):
    engine = build_engine(kind, sequences=2)
    background = [
        request(str(n), prompt(60, n), priority=BACKGROUND, max_tokens=200, ignore_eos=True) for n in range(2)
    ]
    answers: dict[str, Answer] = {}
    for submitted in background:
        engine.submit(submitted)
    for _ in range(20):
        collect(answers, engine)
    interactive = request("interactive", prompt(50, 9), max_tokens=3)
    engine.submit(interactive)
    while "interactive" not in answers or answers["interactive"].end is None:
        collect(answers, engine)
    assert engine.counters.preempted == 1
    assert not any(answers[submitted.id].end for submitted in background)
    finish_checked(engine, answers)
    for submitted in (interactive, *background):
        assert answers[submitted.id].tokens == compute_tokens(kind, submitted)


def test_a_request_of_the_same_priority_waits_for_a_sequence():
    engine = build_engine(sequences=1)
    play(engine, *(request(str(n), prompt(20, n), max_tokens=20) for n in range(3)))
    assert engine.counters.preempted == 0


def test_background_prefill_shrinks_beside_the_tokens_of_an_interactive_request():
    engine = build_engine(sequences=2)
    engine.submit(request("interactive", prompt(10, 1), max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.submit(request("background", prompt(1000, 2), priority=BACKGROUND))
    for _ in range(3):
        engine.step()
    assert sorted(rows for _, rows in engine.backend.decode_history[-1]) == [1, MIN_CHUNK_ENTRIES]


def test_a_leader_has_the_priority_of_its_follower():
    """An interactive request waits for a prefix that a background job computes, before other background jobs."""
    engine = build_engine(sequences=6)
    shared = prompt(600, 50)
    engine.submit(request("leader", [*shared, *prompt(400, 51)], priority=BACKGROUND, max_tokens=4))
    for number in range(3):
        engine.submit(request(str(number), prompt(900, number), priority=BACKGROUND, max_tokens=4))
    alone = measure_first_token(build_engine(sequences=6), [*shared, *prompt(20, 52)], 0)
    assert measure_first_token(engine, [*shared, *prompt(20, 52)], 2) <= 1.3 * alone
    assert engine.counters.coalesced == 1


def test_a_preempted_leader_has_its_own_priority_again_when_no_request_follows_it():
    """It took the sequence of a request that started in the same step, which never ended: its logits were dropped."""
    engine = fake("attention", EngineSettings(block_size=8, ram_cache_bytes=10**7), sequences=2, batch_cells=64)
    repeated = [request(f"repeated {n}", prompt(40, n), priority=3, max_tokens=4) for n in range(2)]
    for earlier in repeated:
        ask(engine, earlier.entries, max_tokens=4)
    answers: dict[str, Answer] = {}
    shared = prompt(300, 50)
    leader = request("leader", [*shared, 1], priority=BACKGROUND, max_tokens=4)
    engine.submit(leader)
    collect(answers, engine)
    engine.submit(request("follower", [*shared, 2], priority=5))
    collect(answers, engine)
    assert engine.counters.coalesced == 1
    for number in range(2):
        engine.submit(request(f"urgent {number}", prompt(30, 20 + number), priority=9, max_tokens=4))
    collect(answers, engine)
    assert engine.counters.preempted == 1
    engine.cancel("follower")
    while not all(answers.get(f"urgent {number}", Answer()).end for number in range(2)):
        collect(answers, engine)
    for submitted in repeated:
        engine.submit(submitted)
    finish_checked(engine, answers)
    assert engine.counters.preempted == 1
    for submitted in (leader, *repeated):
        assert answers[submitted.id].tokens == compute_tokens("attention", submitted)


def test_a_job_takes_the_sequence_that_was_preempted_for_it_and_does_not_wait_for_a_leader():
    """Without a RAM tier, preempting a leader loses the prefix. The job followed one after the other, without end."""
    engine = fake("attention", EngineSettings(ram_cache_bytes=0), sequences=2, batch_cells=64)
    shared = prompt(150, 50)
    background = [
        request(str(n), [*shared, n], priority=BACKGROUND, max_tokens=8, use_prefix_cache=False) for n in range(4)
    ]
    answers: dict[str, Answer] = {}
    for submitted in background:
        engine.submit(submitted)
    collect(answers, engine)
    interactive = request("interactive", [*shared, *prompt(20, 51)], max_tokens=3)
    engine.submit(interactive)
    for _ in range(20):
        collect(answers, engine)
    assert answers["interactive"].end is not None
    assert engine.counters.preempted == 1
    finish_checked(engine, answers)
    for submitted in (interactive, *background):
        assert answers[submitted.id].tokens == compute_tokens("attention", submitted)


def test_a_paused_job_takes_part_in_a_decode_after_some_seconds():
    engine = build_engine(sequences=3)
    decoding = request("decoding", prompt(20, 1), priority=BACKGROUND, max_tokens=50, ignore_eos=True)
    prefilling = request("prefilling", prompt(3000, 2), priority=BACKGROUND)
    for submitted in (decoding, prefilling):
        engine.submit(submitted)
    for _ in range(4):
        engine.step()
    engine.submit(request("interactive", prompt(1300, 3)))
    engine.step()
    assert engine.backend.decode_history[-1] == [(2, 512)]  # both are paused
    for id in ("decoding", "prefilling"):
        engine._jobs[id].admitted_at -= MAX_PAUSE_SECONDS
        engine._jobs[id].last_decoded_at -= MAX_PAUSE_SECONDS
    engine.step()
    engine.step()
    assert engine.backend.decode_history[-2:] == [[(0, 1), (2, 511)], [(2, 277), (1, MIN_CHUNK_ENTRIES)]]


def test_background_work_ends_with_the_highest_priorities_first():
    engine = build_engine(sequences=1)
    answers = play(engine, *(request(str(n), prompt(40, n), priority=-n) for n in (3, 1, 2, 0)))
    seconds = [answers[str(n)].end.usage.queue_seconds for n in range(4)]
    assert seconds == sorted(seconds)


def test_a_transient_sequence_is_evicted_before_others_and_stored_in_no_tier():
    settings = EngineSettings(block_size=8, ram_cache_bytes=10**7)
    engine = fake(settings=settings, sequences=3)
    conversation = prompt(40, 1)
    ask(engine, conversation)
    for number in range(2, 12):
        ask(engine, prompt(60, number), is_transient=True, priority=BACKGROUND)
    assert engine.prefix_cache.store.ram.budget.get("blocks") == 0
    assert ask(engine, [*conversation, 3]).cached == 40
