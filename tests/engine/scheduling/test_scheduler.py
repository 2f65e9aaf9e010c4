"""The batch scheduler: decoding jobs first, short prompts before long ones, no job starves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.cost_model import RecentTimings
from afterglow.engine.scheduling.scheduler import (
    MIN_CHUNK_ENTRIES,
    BatchBudget,
    compute_max_batch,
    compute_prefill_budget,
    partition_jobs,
    schedule,
)
from afterglow.engine.types.adapters import LoadedAdapter
from afterglow.engine.types.settings import EngineSettings
from afterglow.engine.types.tile import RowTile
from afterglow.errors import InvalidArgument
from afterglow.testing import FakeBackend
from support.play import Answer, collect, fake, play, prompt, request, set_prefill_cost


def test_a_prefill_leaves_time_for_decoding_jobs_with_other_adapters():
    engine = fake(
        sequences=2,
        batch_cells=512,
        settings=EngineSettings(max_token_gap=0.1, speculation="off"),
        cells_per_sequence=1024,
        adapters={"a": LoadedAdapter(digest="a")},
    )
    engine.submit(request("base", prompt(10, 1), max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    set_prefill_cost(engine, 0.002)
    engine.prefix_cache.cost_model.seconds_per_step = 0.02
    engine.submit(request("a", prompt(400, 2), adapters=(("a", 1.0),)))
    while not engine.backend.adapter_history[-1]:
        engine.step()
    ((_, rows),) = engine.backend.decode_history[-1]
    assert rows < 100  # of 400


def test_a_prefill_alone_gets_the_whole_batch():
    budget = compute_prefill_budget(
        0, [], max_token_gap=0.1, seconds_per_step=0.02, seconds_per_entry=0.001, max_entries=512
    )
    assert budget == 512


@pytest.mark.parametrize(
    ("max_token_gap", "seconds_per_step", "expected"), [(0.1, 0.02, 80), (0.1, 0.2, MIN_CHUNK_ENTRIES), (10, 0.2, 512)]
)
def test_with_decoding_jobs_a_prefill_gets_what_the_token_gap_leaves(max_token_gap, seconds_per_step, expected):
    budget = compute_prefill_budget(
        3,
        [],
        max_token_gap=max_token_gap,
        seconds_per_step=seconds_per_step,
        seconds_per_entry=0.001,
        max_entries=512,
    )
    assert budget == expected


def test_more_short_prompts_than_decoding_jobs_are_prefilled_together():
    costs = {"max_token_gap": 0.1, "seconds_per_step": 0.02, "seconds_per_entry": 0.001, "max_entries": 512}
    assert compute_prefill_budget(2, [40] * 6, **costs) == 512  # 0.26 s, of 0.3 s that six take in turn beside two
    assert compute_prefill_budget(2, [80] * 6, **costs) == 80  # one decode would not complete them
    assert compute_prefill_budget(6, [40] * 6, **costs) == 80  # not more prompts than decoding jobs


def test_many_short_prompts_that_arrive_late_take_one_decode():
    engine = fake(sequences=8, batch_cells=512, settings=EngineSettings(max_token_gap=0.05), cells_per_sequence=512)
    engine.submit(request("early", prompt(10, 9), max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    set_prefill_cost(engine, 0.002)
    engine.prefix_cache.cost_model.seconds_per_step = 0.001
    for seed in range(7):
        engine.submit(request(f"late {seed}", prompt(20, seed)))
    engine.step()
    assert sorted(count for _, count in engine.backend.decode_history[-1]) == [1, *[20] * 7]


def test_a_decode_that_cannot_be_interrupted_takes_half_a_second_at_most():
    cpu = replace(fake(batch_cells=16_384).backend.capabilities, ubatch_cells=512)
    assert compute_max_batch(cpu, seconds_per_entry=0.01) == 16_384  # can be interrupted
    gpu = replace(cpu, interruptible=False)
    assert compute_max_batch(gpu, seconds_per_entry=0.000_01) == 16_384
    assert compute_max_batch(gpu, seconds_per_entry=0.000_1) == 5000
    assert compute_max_batch(gpu, seconds_per_entry=0.01) == 512
    assert compute_max_batch(replace(gpu, ubatch_cells=2048), seconds_per_entry=0.01) == 512
    assert compute_max_batch(replace(gpu, ubatch_cells=64), seconds_per_entry=0.01) == 64


def test_a_long_prefill_does_not_stall_decoding_jobs():
    engine = fake(batch_cells=512, settings=EngineSettings(max_token_gap=0.05), cells_per_sequence=8192)
    set_prefill_cost(engine, 0.001)
    engine.submit(request("decoding", prompt(10, 1), max_tokens=60, ignore_eos=True))
    answers: dict[str, Answer] = {}
    for _ in range(5):
        collect(answers, engine)
    engine.prefix_cache.cost_model.seconds_per_step = 0.001
    engine.submit(request("long", prompt(3000, 2)))
    before = len(answers["decoding"].tokens)
    collect(answers, engine)
    assert len(answers["decoding"].tokens) == before + 1  # it got its token in the same decode
    assert sorted(engine.backend.decode_history[-1]) == [(0, 1), (1, 49)]  # the prefill got what fits into the gap


@pytest.mark.parametrize(("max_token_gap", "rows"), [(0.055, 65), (0.1, 99), (0.03, 28)])
def test_a_chunk_beside_an_answer_completes_a_tile_if_that_takes_little_longer(max_token_gap, rows):
    settings = EngineSettings(max_token_gap=max_token_gap, speculation="off")
    tile = RowTile(balanced_cells=2000)
    engine = fake(batch_cells=512, settings=settings, cells_per_sequence=8192, row_tile=tile)
    engine.submit(request("decoding", prompt(10, 1), max_tokens=60, ignore_eos=True))
    for _ in range(5):
        engine.step()
    costs = engine.prefix_cache.cost_model
    costs.record_prefill = lambda *_: None  # what the fake backend takes is noise
    costs.seconds_per_step, costs._time_unit = 0.001, RecentTimings()
    costs._time_unit.add(0.001)
    engine.submit(request("long", prompt(3000, 2)))
    engine.step()
    assert sorted(engine.backend.decode_history[-1]) == [(0, 1), (1, rows)]


def test_the_last_chunk_of_a_prompt_takes_its_rest_with_it():
    engine = fake(batch_cells=512, settings=EngineSettings(speculation="off"), row_tile=RowTile(balanced_cells=2000))
    engine.submit(request("decoding", prompt(10, 1), max_tokens=60, ignore_eos=True))
    for _ in range(5):
        engine.step()
    budget = BatchBudget(cells=512, prefill_entries=60, row_tile=engine.backend.capabilities.row_tile)
    engine.submit(request("almost", prompt(63, 2)))
    engine._admit_waiting()
    decoding, prefilling, _ = partition_jobs(engine.running_jobs)
    assert [rows for _, rows in schedule(decoding, prefilling, budget, 0.0)] == [1, 63]


def test_prefill_after_many_tokens_is_expected_to_take_longer():
    """Each row reads all cells, so that fewer rows fit into the gap between tokens."""
    costs: list[float] = []
    for tokens in (0, 4000):
        engine = fake(batch_cells=512, cells_per_sequence=8192, row_tile=RowTile(balanced_cells=1000))
        engine.prefix_cache.cost_model.record_prefill(64, 0.064, [(64, 0)])
        engine.submit(request("long", prompt(5000, 2)))
        engine._admit_waiting()
        (running,) = engine.running_jobs
        running.sequence.position = tokens
        costs.append(engine._estimate_seconds_per_entry([running]))
    assert costs == [0.001, 0.002]


def test_a_short_prompt_overtakes_a_long_one():
    engine = fake(batch_cells=64, cells_per_sequence=4096)
    engine.submit(request("long", prompt(2000, 1), max_tokens=1))
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    engine.submit(request("short", prompt(20, 2), max_tokens=1))
    while "short" not in answers or answers["short"].end is None:
        collect(answers, engine)
    assert answers["long"].end is None


def test_a_long_prompt_that_has_waited_is_not_overtaken():
    engine = fake(batch_cells=16, cells_per_sequence=4096, sequences=2)
    engine.submit(request("long", prompt(300, 1), max_tokens=1))
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    long = engine._jobs["long"]
    long.submitted_at -= 60  # as if it had waited a minute
    engine.submit(request("short", prompt(40, 2), max_tokens=1))
    collect(answers, engine)
    assert engine.backend.decode_history[-1][0][0] == 0  # the long prompt continues


def test_more_decoding_jobs_than_a_batch_holds_take_turns():
    engine = fake(sequences=6, batch_cells=2)
    for number in range(6):
        engine.submit(request(str(number), prompt(2, number), max_tokens=20, ignore_eos=True))
    answers: dict[str, Answer] = {}
    for _ in range(40):
        collect(answers, engine)
    token_counts = [len(answers[str(number)].tokens) for number in range(6)]
    assert min(token_counts) >= 8  # no job starves, although prefills came in between
    engine.close()


def test_an_engine_needs_an_output_for_each_sequence():
    backend = FakeBackend(sequences=4)
    backend.capabilities = replace(backend.capabilities, max_outputs=3)
    with pytest.raises(InvalidArgument, match="outputs"):
        Engine(backend)


def test_priority_goes_before_length():
    engine = fake(sequences=1)
    answers = play(engine, *(request(str(n), prompt(10, n), priority=n) for n in range(4)))
    queue_seconds = [answers[str(n)].end.usage.queue_seconds for n in range(4)]
    assert queue_seconds == sorted(queue_seconds, reverse=True)
