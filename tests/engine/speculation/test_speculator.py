"""The choice of drafters and draft lengths inside an engine, with simulated costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from afterglow.engine import engine as engine_module
from afterglow.engine.engine import Engine
from afterglow.engine.speculation import speculator as speculator_module
from afterglow.engine.speculation.speculator import REFRESH_AFTER_DECODES, Speculator
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend
from support.drafting import Oracle, plain
from support.play import ask, play, prompt, request

pytestmark = pytest.mark.slow

LONG = 400


class FakeClock:
    """Replaces `time`. A decode advances it by `cost(rows)` seconds."""

    def __init__(self, cost) -> None:
        self.now, self.cost = 1e9, cost

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class TimedBackend(FakeBackend):
    def __init__(self, clock: FakeClock, **options: int) -> None:
        super().__init__("attention", batch_cells=256, **options)
        self.clock = clock

    def decode(self, spans) -> None:
        super().decode(spans)
        self.clock.now += self.clock.cost(sum(len(span.entries) for span in spans))


@pytest.fixture
def build_engine(monkeypatch):
    def build(cost, wrong: int, *more: Oracle) -> tuple[Engine, FakeClock]:
        clock = FakeClock(cost)
        monkeypatch.setattr(engine_module, "time", clock)
        monkeypatch.setattr(speculator_module, "time", clock)
        answers = {"one": ask(plain("attention"), prompt(20, 1), max_tokens=LONG, ignore_eos=True).tokens}
        oracles = [Oracle(answers, wrong), *more]
        for oracle in more:
            oracle.answers = answers
        names = tuple(oracle.name for oracle in oracles)
        return Engine(TimedBackend(clock), EngineSettings(drafters=names), oracles), clock

    return build


def memory_bound(rows: int) -> float:
    return 1.0 + 0.02 * rows


def compute_bound(rows: int) -> float:
    return 0.6 * rows + 0.4


def run(engine: Engine, clock: FakeClock) -> tuple[float, int, int]:
    """Return the speedup over plain decoding, the draft tokens and the accepted tokens."""
    started = clock.now
    answer = ask(engine, prompt(20, 1), max_tokens=LONG, ignore_eos=True)
    seconds = clock.now - started - clock.cost(20)
    usage = answer.end.usage
    return (LONG - 1) * clock.cost(1) / seconds, usage.draft_tokens, usage.accepted_tokens


def test_drafts_are_long_if_rows_are_cheap_and_drafts_accepted(build_engine):
    engine, clock = build_engine(memory_bound, 0)
    speedup, drafted, accepted = run(engine, clock)
    assert speedup > 6
    assert accepted == drafted > 300


def test_drafting_soon_stops_if_rows_cost_as_much_as_they_gain(build_engine):
    engine, clock = build_engine(float, 2)
    speedup, drafted, _ = run(engine, clock)
    assert speedup >= 0.97
    assert 0 < drafted < 40


def test_the_first_decode_of_a_row_count_is_charged_for_its_rows_only(build_engine):
    """Its warm-up is not charged; but eight jobs have many row counts, each of which comes a first time."""
    engine, _ = build_engine(float, 0)
    speculator = engine.speculator
    for rows in (1, 2):
        for _ in range(5):
            record_decode(speculator, rows, rows, rows, float(rows))
    before = speculator.loss_budget.saved_seconds
    record_decode(speculator, 5, 1, 1, 50.0)
    assert speculator.loss_budget.saved_seconds - before == pytest.approx(1 - 5)


def test_the_first_plain_decode_after_a_draft_is_not_measured(build_engine):
    """It takes longer than the next one and would make drafting look better than it is."""
    engine, _ = build_engine(float, 0)
    speculator = engine.speculator
    for _ in range(5):
        record_decode(speculator, 1, 1, 1, 1.0)
    for _ in range(REFRESH_AFTER_DECODES):
        assert speculator._can_draft(1)
        record_decode(speculator, 3, 1, 3, 2.0)
    for seconds in (1.5, 1.0):
        assert not speculator._can_draft(1)  # the cost of plain decodes is measured again
        record_decode(speculator, 1, 1, 1, seconds)
    for _ in range(9):
        assert speculator._can_draft(1)
        record_decode(speculator, 3, 1, 3, 2.0)
        record_decode(speculator, 1, 1, 1, 1.5)
    assert speculator._estimate_seconds(1, 1) == 1.0


def record_decode(speculator: Speculator, rows: int, jobs: int, tokens: int, seconds: float) -> None:
    """Record one decode without drafters being asked."""
    speculator.propose_drafts([], [])
    speculator.record_decode(rows, jobs, tokens, seconds)


class UnevenBatchBackend(TimedBackend):
    """Computes rows of several sequences together only up to the smallest row count, as llama.cpp does."""

    def decode(self, spans) -> None:
        FakeBackend.decode(self, spans)
        remaining = [len(span.entries) for span in spans]
        while remaining := [rows for rows in remaining if rows]:
            self.clock.now += self.clock.cost(min(remaining) * len(remaining))
            remaining = [rows - min(remaining) for rows in remaining]


def run_eight_jobs(monkeypatch, drafted_jobs: int, settings: EngineSettings) -> tuple[float, Engine]:
    """Return the seconds of eight jobs, `drafted_jobs` of which a drafter knows, at the costs of two CPU cores."""
    clock = FakeClock(lambda rows: 8 + 4 * (rows - 1) if rows <= 8 else 36 + 3 * (rows - 8))
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(speculator_module, "time", clock)
    prompts = {str(seed): prompt(20, seed) for seed in range(8)}
    answers = {
        id: ask(plain("attention"), entries, max_tokens=LONG, ignore_eos=True).tokens
        for id, entries in list(prompts.items())[:drafted_jobs]
    }
    engine = Engine(UnevenBatchBackend(clock, sequences=8), settings, [Oracle(answers)])
    started = clock.now
    play(engine, *(request(id, entries, max_tokens=LONG, ignore_eos=True) for id, entries in prompts.items()))
    return clock.now - started, engine


@pytest.mark.slow
@pytest.mark.parametrize(("drafted_jobs", "speedup"), [(8, 1.15), (2, 0.97)])
def test_of_many_jobs_all_draft_alike_or_none_does(monkeypatch, drafted_jobs, speedup):
    plain_seconds, _ = run_eight_jobs(monkeypatch, drafted_jobs, EngineSettings(speculation="off"))
    seconds, engine = run_eight_jobs(monkeypatch, drafted_jobs, EngineSettings(drafters=("oracle",)))
    assert plain_seconds / seconds > speedup
    assert (engine.counters.accepted_tokens > 1000) == (drafted_jobs == 8)
    assert engine.counters.draft_tokens > 0


def test_drafting_soon_stops_if_every_draft_is_rejected(build_engine):
    for cost in (memory_bound, compute_bound):
        engine, clock = build_engine(cost, 1)
        speedup, drafted, accepted = run(engine, clock)
        assert speedup >= 0.97
        assert accepted == 0 < drafted


def test_drafts_that_are_accepted_only_at_times_still_save_time(build_engine):
    engine, clock = build_engine(memory_bound, 0)
    oracle = engine.speculator._drafters[0]
    oracle.answers["one"] = [
        token if index // 40 % 2 else (token + 1) % 64 for index, token in enumerate(oracle.answers["one"])
    ]
    speedup, _, accepted = run(engine, clock)
    assert speedup > 1.3
    assert accepted > 100


def test_the_choice_follows_a_change_of_the_machine(build_engine):
    engine, clock = build_engine(compute_bound, 0)
    run(engine, clock)
    before = engine.counters.draft_tokens
    clock.cost = memory_bound  # another machine, or other load on it has ended
    for _ in range(12):
        ask(engine, prompt(20, 1), max_tokens=LONG, ignore_eos=True)
    assert engine.counters.draft_tokens - before > 1000


def test_the_better_of_two_drafters_is_used(build_engine):
    better = Oracle({}, 0)
    better.name = "better"
    engine, clock = build_engine(memory_bound, 2, better)
    speedup, _, _ = run(engine, clock)
    assert speedup > 4
    worse = engine.speculator._drafters[0]
    assert len(better.calls) > 2 * len(worse.calls)


def test_if_a_drafter_returns_no_tokens_the_next_one_is_asked(build_engine):
    silent = Oracle({}, 0)
    silent.name = "silent"
    engine, clock = build_engine(memory_bound, 0, silent)
    silent.answers = {}
    _, _, accepted = run(engine, clock)
    assert accepted > 300


def test_there_are_no_drafts_during_a_prefill(build_engine):
    engine, _ = build_engine(memory_bound, 0)
    engine.backend.capabilities = replace(engine.backend.capabilities, batch_cells=24)
    engine.submit(request("one", prompt(20, 1), max_tokens=LONG, ignore_eos=True))
    for _ in range(12):
        engine.step()
    engine.submit(request("two", prompt(200, 2), max_tokens=1))
    while engine.is_busy:
        engine.step()
    mixed = [spans for spans in engine.backend.decode_history if len(spans) > 1]
    assert len(mixed) > 5
    assert all(spans[0][1] == 1 for spans in mixed)
    assert engine.counters.accepted_tokens > 200


class LateDrafter(Oracle):
    """A drafter that has to compute `entries` entries before it can draft for a job."""

    name = "late"

    def __init__(self, clock: list[FakeClock], entries: float, wrong: int = 0) -> None:
        super().__init__({}, wrong)
        self.clock, self.entries, self.caught_up = clock, entries, set()

    def estimate_catch_up_entries(self, running) -> float:
        return 0.0 if running.job.request.id in self.caught_up else self.entries

    def catch_up(self, jobs) -> None:
        self.caught_up |= {running.job.request.id for running in jobs}
        self.clock[0].now += self.entries * 0.07  # seconds per prompt entry on this machine

    def release(self, job) -> None:
        self.caught_up.discard(job.request.id)


def build_late_engine(build_engine, entries: float, wrong: int) -> tuple[Engine, FakeClock, LateDrafter]:
    clocks: list[FakeClock] = []
    drafter = LateDrafter(clocks, entries, wrong)
    engine, clock = build_engine(memory_bound, 1, drafter)
    clocks.append(clock)
    engine.speculator._drafters = [drafter]
    return engine, clock, drafter


def test_catching_up_is_not_part_of_the_cost_per_draft_token(build_engine):
    """It pays off within the completion: the drafter catches up once and drafts from then on."""
    engine, clock, _ = build_late_engine(build_engine, 50, wrong=0)
    speedup, drafted, accepted = run(engine, clock)
    assert speedup > 3
    assert drafted == accepted > 200
    assert engine.speculator._seconds_per_draft_token["late"].seconds == 0


def test_the_usage_of_a_request_contains_the_time_of_catching_up_for_it(build_engine):
    engine, _, drafter = build_late_engine(build_engine, 50, wrong=0)
    answer = ask(engine, prompt(20, 1), max_tokens=LONG, ignore_eos=True)
    assert any(drafter.calls)
    saved = engine.speculator.loss_budget.saved_seconds
    assert answer.end.usage.speculation_seconds_saved == pytest.approx(saved)


@pytest.mark.slow
def test_a_drafter_that_is_far_behind_costs_little_more_than_its_share(build_engine):
    """Always rejected, with much to catch up for every request: it is tried, and then seldom."""
    engine, clock, _ = build_late_engine(build_engine, 60, wrong=1)
    speedups = [run(engine, clock)[0] for _ in range(12)]
    assert engine.counters.draft_tokens > 0
    assert 12 / sum(1 / speedup for speedup in speedups) > 0.97


def test_a_drafter_that_would_not_catch_up_before_the_completion_ends_is_not_used(build_engine):
    engine, clock, drafter = build_late_engine(build_engine, 10_000, wrong=0)
    speedup, drafted, _ = run(engine, clock)
    assert drafted == 0
    assert not drafter.caught_up
    assert speedup > 0.99


def test_drafts_next_to_a_prefill_are_not_credited_with_savings_of_a_later_decode(build_engine):
    """A decode with prefill is not measured, and the next one may have no draft tokens."""
    engine, _ = build_engine(memory_bound, 10**6)
    earlier = SimpleNamespace(draft=[5, 6], job=SimpleNamespace(speculation_seconds_saved=0.0))
    engine.speculator._verified_jobs.append(earlier)
    for _ in range(4):
        record_decode(engine.speculator, 1, 1, 1, 1.0)
    record_decode(engine.speculator, 3, 1, 3, 1.0)
    assert engine.speculator.loss_budget.saved_seconds > 0
    assert earlier.job.speculation_seconds_saved == 0.0


def test_savings_are_credited_to_the_requests_with_drafts_in_the_measured_decode(monkeypatch):
    """Not to one whose drafts were in a decode with prefill, which is not measured."""
    clock = FakeClock(memory_bound)
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(speculator_module, "time", clock)
    prompts = {"beside a prefill": prompt(20, 1), "alone": prompt(20, 3)}
    answers = {
        id: ask(plain("attention"), entries, max_tokens=LONG, ignore_eos=True).tokens for id, entries in prompts.items()
    }
    engine = Engine(TimedBackend(clock), EngineSettings(speculation=2, drafters=("oracle",)), [Oracle(answers)])
    for _ in range(4):
        record_decode(engine.speculator, 1, 1, 1, clock.cost(1))
    engine.submit(request("beside a prefill", prompts["beside a prefill"], max_tokens=6, ignore_eos=True))
    engine.step()
    play(engine, request("prefill", prompt(700, 2), max_tokens=1))
    assert engine.counters.draft_tokens > 0
    saved_before = engine.speculator.loss_budget.saved_seconds
    engine.submit(request("alone", prompts["alone"], max_tokens=LONG, ignore_eos=True))
    for _ in range(20):
        engine.step()
    saved = engine.speculator.loss_budget.saved_seconds - saved_before
    assert saved > 0
    assert engine.running_jobs[0].job.speculation_seconds_saved == pytest.approx(saved)


@pytest.mark.parametrize("max_tokens", [12, 13, 14])
def test_the_usage_of_a_request_has_the_savings_of_its_last_decode(build_engine, max_tokens):
    engine, clock = build_engine(memory_bound, 0)
    for _ in range(8):
        record_decode(engine.speculator, 1, 1, 1, clock.cost(1))
    saved_before = engine.speculator.loss_budget.saved_seconds
    answer = ask(engine, prompt(20, 1), max_tokens=max_tokens, ignore_eos=True)
    saved = engine.speculator.loss_budget.saved_seconds - saved_before
    assert saved > 0
    assert answer.end.usage.speculation_seconds_saved == pytest.approx(saved)


def test_tokens_that_a_grammar_forces_are_no_savings_of_drafts(monkeypatch):
    """Each draft is rejected, so that it costs two rows; then five tokens are forced, as without drafts."""
    clock = FakeClock(float)
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(speculator_module, "time", clock)
    drafter = Oracle({"one": [4] * LONG})
    backend = TimedBackend(clock, vocabulary_size=26)
    engine = Engine(backend, EngineSettings(speculation=2, drafters=("oracle",)), [drafter])
    for _ in range(4):
        record_decode(engine.speculator, 1, 1, 1, clock.cost(1))
    constraint = GrammarConstraint(grammar='start: (/[b-k]{3}/ "world")+')
    answer = ask(engine, [1 + token % 25 for token in prompt(20, 1)], constraint=constraint, max_tokens=100)
    assert engine.counters.forced_tokens > 20
    assert engine.counters.draft_steps > 5
    lost = engine.counters.draft_tokens - engine.counters.accepted_tokens
    assert answer.end.usage.speculation_seconds_saved == pytest.approx(-lost, abs=1.0)
