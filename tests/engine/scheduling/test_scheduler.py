"""Who goes into the next decode: generating jobs first, short prompts before long, nobody for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.scheduling.scheduler import MIN_CHUNK_ENTRIES, compute_max_batch, compute_prefill_budget
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.testing import FakeBackend
from support.play import Answer, collect, fake, play, prompt, request


def test_a_prompt_alone_gets_the_whole_batch():
    assert (
        compute_prefill_budget(
            0, [], max_token_gap=0.1, seconds_per_step=0.02, seconds_per_entry=0.001, max_entries=512
        )
        == 512
    )


def test_beside_generating_jobs_a_prompt_gets_what_the_gap_leaves():
    assert (
        compute_prefill_budget(
            3, [], max_token_gap=0.1, seconds_per_step=0.02, seconds_per_entry=0.001, max_entries=512
        )
        == 80
    )
    assert (
        compute_prefill_budget(3, [], max_token_gap=0.1, seconds_per_step=0.2, seconds_per_entry=0.001, max_entries=512)
        == MIN_CHUNK_ENTRIES
    )
    assert (
        compute_prefill_budget(3, [], max_token_gap=10, seconds_per_step=0.2, seconds_per_entry=0.001, max_entries=512)
        == 512
    )


def test_more_short_prompts_than_answers_are_computed_together():
    costs = {"gap": 0.1, "per_step": 0.02, "per_entry": 0.001, "cells": 512}
    assert compute_prefill_budget(2, [40] * 6, **costs) == 512  # 0.26 s, of 0.3 s that six take in turn beside two
    assert compute_prefill_budget(2, [80] * 6, **costs) == 80  # it would not end them
    assert compute_prefill_budget(6, [40] * 6, **costs) == 80  # no more of them than answers


def test_a_late_crowd_of_short_prompts_takes_one_decode():
    engine = fake(sequences=8, batch_cells=512, settings=EngineSettings(max_token_gap=0.05), cells=512)
    engine.submit(request("early", prompt(10, 9), max_tokens=60, ignore_ends=True))
    for _ in range(3):
        engine.step()
    engine.prefix_cache.cost_model.seconds_per_entry, engine.prefix_cache.cost_model.seconds_per_step = 0.002, 0.001
    for seed in range(7):
        engine.submit(request(f"late {seed}", prompt(20, seed)))
    engine.step()
    assert sorted(count for _, count in engine.backend.history[-1]) == [1, *[20] * 7]


def test_a_decode_that_nothing_can_stop_takes_half_a_second_at_most():
    able = replace(fake(batch_cells=16_384).backend.capabilities, ubatch_cells=512)
    assert compute_max_batch(able, seconds_per_entry=0.01) == 16_384  # this one can be stopped
    gpu = replace(able, interruptible=False)
    assert compute_max_batch(gpu, seconds_per_entry=0.000_01) == 16_384
    assert compute_max_batch(gpu, seconds_per_entry=0.000_1) == 5000
    assert compute_max_batch(gpu, seconds_per_entry=0.01) == 512


def test_a_long_prompt_does_not_stop_running_answers():
    engine = fake(batch_cells=512, settings=EngineSettings(max_token_gap=0.05), cells=8192)
    engine.prefix_cache.cost_model.seconds_per_entry = 0.001
    engine.submit(request("talking", prompt(10, 1), max_tokens=60, ignore_ends=True))
    answers: dict[str, Answer] = {}
    for _ in range(5):
        collect(answers, engine)
    engine.prefix_cache.cost_model.seconds_per_entry, engine.prefix_cache.cost_model.seconds_per_step = 0.001, 0.001
    engine.submit(request("long", prompt(3000, 2)))
    before = len(answers["talking"].tokens)
    collect(answers, engine)
    assert len(answers["talking"].tokens) == before + 1  # it got its token in the same decode
    assert sorted(engine.backend.history[-1]) == [(0, 1), (1, 49)]  # and the prompt what fits into the gap


def test_a_short_prompt_overtakes_a_long_one():
    engine = fake(batch_cells=64, cells=4096)
    engine.submit(request("long", prompt(2000, 1), max_tokens=1))
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    engine.submit(request("short", prompt(20, 2), max_tokens=1))
    while "short" not in answers or answers["short"].end is None:
        collect(answers, engine)
    assert answers["long"].end is None


def test_waiting_earns_a_long_prompt_its_turn():
    engine = fake(batch_cells=16, cells=4096, sequences=2)
    engine.submit(request("long", prompt(300, 1), max_tokens=1))
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    long = engine._jobs["long"]
    long.submitted_at -= 60  # as if it had waited a minute
    engine.submit(request("short", prompt(40, 2), max_tokens=1))
    collect(answers, engine)
    assert engine.backend.history[-1][0][0] == 0  # the long one goes on


def test_more_generating_jobs_than_a_batch_holds_take_turns():
    engine = fake(sequences=6, batch_cells=2)
    for number in range(6):
        engine.submit(request(str(number), prompt(2, number), max_tokens=20, ignore_ends=True))
    answers: dict[str, Answer] = {}
    for _ in range(40):
        collect(answers, engine)
    said = [len(answers[str(number)].tokens) for number in range(6)]
    assert min(said) >= 8  # nobody is left out, though prompts came in between
    engine.close()


def test_an_engine_needs_an_output_for_each_sequence():
    backend = FakeBackend(sequences=4)
    backend.capabilities = replace(backend.capabilities, max_outputs=3)
    with pytest.raises(InvalidArgument, match="outputs"):
        Engine(backend)


def test_priority_goes_before_length():
    engine = fake(sequences=1)
    answers = play(engine, *(request(str(n), prompt(10, n), priority=n) for n in range(4)))
    ended = [answers[str(n)].end.usage.queue_seconds for n in range(4)]
    assert ended == sorted(ended, reverse=True)


@pytest.mark.parametrize(
    ("pieces", "stops", "found"),
    [
        ([b"the e", b"nd"], [b"end"], b"end"),
        ([b"e", b"n", b"d"], [b"end"], b"end"),
        ([b"ending"], [b"end", b"ending"], b"end"),
        ([b"abab", b"ac"], [b"abac"], b"abac"),
        ([b"nothing", b"here"], [b"end"], None),
        (["é".encode()[:1], "é".encode()[1:]], ["é".encode()], "é".encode()),
    ],
)
def test_a_stop_is_found_the_moment_its_last_byte_is_there(pieces, stops, found):
    matcher = StopMatcher(stops)
    results = [matcher.feed(piece) for piece in pieces]
    assert results[:-1] == [None] * (len(pieces) - 1)
    assert results[-1] == found
