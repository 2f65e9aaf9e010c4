"""The choice of drafters and lengths inside an engine, with faked costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from afterglow.engine import engine as engine_module
from afterglow.engine.engine import Engine
from afterglow.engine.speculation import speculator as drafting
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend
from support.drafting import Oracle, plain
from support.play import ask, play, prompt, request

LONG = 400


class Clock:
    """A machine on which a decode of so many rows takes so long."""

    def __init__(self, cost) -> None:
        self.now, self.cost = 1e9, cost

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Machine(FakeBackend):
    def __init__(self, clock: Clock, **options: int) -> None:
        super().__init__("attention", batch_cells=256, **options)
        self.clock = clock

    def decode(self, spans) -> None:
        super().decode(spans)
        self.clock.now += self.clock.cost(sum(len(span.ids) for span in spans))


@pytest.fixture
def machine(monkeypatch):
    def make(cost, wrong: int, *more: Oracle) -> tuple[Engine, Clock]:
        clock = Clock(cost)
        monkeypatch.setattr(engine_module, "time", clock)
        monkeypatch.setattr(drafting, "time", clock)
        answers = {"one": ask(plain("attention"), prompt(20, 1), max_tokens=LONG, ignore_ends=True).tokens}
        oracles = [Oracle(answers, wrong), *more]
        for one in more:
            one.answers = answers
        names = tuple(oracle.name for oracle in oracles)
        return Engine(Machine(clock), EngineSettings(drafters=names), oracles), clock

    return make


def memory_bound(rows: int) -> float:
    return 1.0 + 0.02 * rows


def compute_bound(rows: int) -> float:
    return 0.6 * rows + 0.4


def run(engine: Engine, clock: Clock) -> tuple[float, int, int]:
    """How many times faster than plain decoding; guesses that were computed, and right ones."""
    began = clock.now
    answer = ask(engine, prompt(20, 1), max_tokens=LONG, ignore_ends=True)
    seconds = clock.now - began - clock.cost(20)
    usage = answer.end.usage
    return (LONG - 1) * clock.cost(1) / seconds, usage.draft_tokens, usage.accepted_tokens


def test_where_rows_are_cheap_and_guesses_right_it_guesses_far(machine):
    engine, clock = machine(memory_bound, 0)
    speed, drafted, accepted = run(engine, clock)
    assert speed > 6
    assert accepted == drafted > 300


def test_where_rows_cost_what_they_bring_it_soon_stops(machine):
    engine, clock = machine(float, 2)
    speed, drafted, _ = run(engine, clock)
    assert speed >= 0.97
    assert 0 < drafted < 40


def test_the_first_decode_of_a_number_of_rows_is_charged_for_its_rows(machine):
    """Not for what it prepared; but eight answers have many numbers of rows, each of which comes a first time."""
    engine, _ = machine(float, 0)
    guessing = engine.speculator
    for rows in (1, 2):
        for _ in range(5):
            decoded(guessing, rows, rows, rows, float(rows))
    before = guessing.loss_budget.saved_seconds
    decoded(guessing, 5, 1, 1, 50.0)
    assert guessing.loss_budget.saved_seconds - before == pytest.approx(1 - 5)


def test_a_decode_right_after_guesses_says_nothing_of_those_without(machine):
    """It takes longer than the next, and guesses would look better than they are."""
    engine, _ = machine(float, 0)
    guessing = engine.speculator
    for _ in range(5):
        decoded(guessing, 1, 1, 1, 1.0)
    for _ in range(drafting.REFRESH_AFTER_DECODES):
        assert guessing._can_draft(1)
        decoded(guessing, 3, 1, 3, 2.0)
    for seconds in (1.5, 1.0):
        assert not guessing._can_draft(1)  # it is time to see again what they take
        decoded(guessing, 1, 1, 1, seconds)
    for _ in range(9):
        assert guessing._can_draft(1)
        decoded(guessing, 3, 1, 3, 2.0)
        decoded(guessing, 1, 1, 1, 1.5)
    assert guessing._estimate_seconds(1, 1) == 1.0


def decoded(guessing: drafting.Speculator, rows: int, jobs: int, tokens: int, seconds: float) -> None:
    """A decode of so many rows came and went."""
    guessing.propose_drafts([], [])
    guessing.record_decode(rows, jobs, tokens, seconds)


class Streams(Machine):
    """Computes rows of several sequences at once as far as all of them have as many, as llama.cpp does."""

    def decode(self, spans) -> None:
        FakeBackend.decode(self, spans)
        left = [len(span.ids) for span in spans]
        while left := [rows for rows in left if rows]:
            self.clock.now += self.clock.cost(min(left) * len(left))
            left = [rows - min(left) for rows in left]


def eight(monkeypatch, guessed: int, settings: EngineSettings) -> tuple[float, Engine]:
    """Seconds of eight answers, of which so many are known to a drafter, on a machine like two cores."""
    clock = Clock(lambda rows: 8 + 4 * (rows - 1) if rows <= 8 else 36 + 3 * (rows - 8))
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(drafting, "time", clock)
    prompts = {str(seed): prompt(20, seed) for seed in range(8)}
    answers = {
        id: ask(plain("attention"), entries, max_tokens=LONG, ignore_ends=True).tokens
        for id, entries in list(prompts.items())[:guessed]
    }
    engine = Engine(Streams(clock, sequences=8), settings, [Oracle(answers)])
    began = clock.now
    play(engine, *(request(id, entries, max_tokens=LONG, ignore_ends=True) for id, entries in prompts.items()))
    return clock.now - began, engine


@pytest.mark.parametrize(("guessed", "faster"), [(8, 1.15), (2, 0.97)])
def test_of_many_answers_all_guess_alike_or_none_does(monkeypatch, guessed, faster):
    without, _ = eight(monkeypatch, guessed, EngineSettings(speculation="off"))
    seconds, engine = eight(monkeypatch, guessed, EngineSettings(drafters=("oracle",)))
    assert without / seconds > faster
    assert (engine.counters.accepted_tokens > 1000) == (guessed == 8)
    assert engine.counters.draft_tokens > 0


def test_where_every_guess_is_wrong_it_soon_stops(machine):
    for cost in (memory_bound, compute_bound):
        engine, clock = machine(cost, 1)
        speed, drafted, accepted = run(engine, clock)
        assert speed >= 0.97
        assert accepted == 0 < drafted


def test_where_guesses_are_right_for_a_while_only_it_never_loses(machine):
    engine, clock = machine(memory_bound, 0)
    oracle = engine.speculator._drafters[0]
    oracle.answers["one"] = [
        token if index // 40 % 2 else (token + 1) % 64 for index, token in enumerate(oracle.answers["one"])
    ]
    speed, _, accepted = run(engine, clock)
    assert speed > 1.3
    assert accepted > 100


def test_the_choice_flips_when_the_machine_changes(machine):
    engine, clock = machine(compute_bound, 0)
    run(engine, clock)
    before = engine.counters.draft_tokens
    clock.cost = memory_bound  # another machine, or somebody else has left this one
    for _ in range(12):
        ask(engine, prompt(20, 1), max_tokens=LONG, ignore_ends=True)
    assert engine.counters.draft_tokens - before > 1000


def test_of_two_drafters_the_better_one_is_asked(machine):
    other = Oracle({}, 0)
    other.name = "better"
    engine, clock = machine(memory_bound, 2, other)
    speed, _, _ = run(engine, clock)
    assert speed > 4
    worse = engine.speculator._drafters[0]
    assert len(other.calls) > 2 * len(worse.calls)


def test_a_drafter_with_nothing_to_say_leaves_it_to_the_next(machine):
    other = Oracle({}, 0)
    other.name = "silent"
    engine, clock = machine(memory_bound, 0, other)
    other.answers = {}
    _, _, accepted = run(engine, clock)
    assert accepted > 300


def test_nobody_guesses_while_a_prompt_is_computed(machine):
    engine, _ = machine(memory_bound, 0)
    engine.backend.capabilities = replace(engine.backend.capabilities, batch_cells=24)
    engine.submit(request("one", prompt(20, 1), max_tokens=LONG, ignore_ends=True))
    for _ in range(12):
        engine.step()
    engine.submit(request("two", prompt(200, 2), max_tokens=1))
    while engine.is_busy:
        engine.step()
    together = [spans for spans in engine.backend.decode_history if len(spans) > 1]
    assert len(together) > 5
    assert all(spans[0][1] == 1 for spans in together)
    assert engine.counters.accepted_tokens > 200


class Late(Oracle):
    """A drafter that has to compute so many entries before it can guess for a job."""

    name = "late"

    def __init__(self, clock: list[Clock], entries: float, wrong: int = 0) -> None:
        super().__init__({}, wrong)
        self.clock, self.entries, self.caught = clock, entries, set()

    def estimate_catch_up_entries(self, job) -> float:
        return 0.0 if job.request.id in self.caught else self.entries

    def catch_up(self, jobs) -> None:
        self.caught |= {job.request.id for job in jobs}
        self.clock[0].now += self.entries * 0.07  # what the machine below takes for an entry of a prompt

    def release(self, job) -> None:
        self.caught.discard(job.request.id)


def late(machine, entries: float, wrong: int) -> tuple[Engine, Clock, Late]:
    clocks: list[Clock] = []
    drafter = Late(clocks, entries, wrong)
    engine, clock = machine(memory_bound, 1, drafter)
    clocks.append(clock)
    engine.speculator._drafters = [drafter]
    return engine, clock, drafter


def test_what_a_drafter_computes_first_is_no_price_of_a_guess(machine):
    """It pays within the answer: the drafter catches up once, and guesses from then on."""
    engine, clock, _ = late(machine, 50, wrong=0)
    faster, drafted, accepted = run(engine, clock)
    assert faster > 3
    assert drafted == accepted > 200
    assert engine.speculator._seconds_per_draft_token["late"].seconds == 0


def test_a_drafter_that_is_far_behind_costs_little_more_than_its_share(machine):
    """Always wrong, and a long way to go for every answer: it is tried, and then seldom."""
    engine, clock, _ = late(machine, 60, wrong=1)
    ratios = [run(engine, clock)[0] for _ in range(12)]
    assert engine.counters.draft_tokens > 0
    assert 12 / sum(1 / ratio for ratio in ratios) > 0.97


def test_a_drafter_that_would_not_be_done_before_the_answer_is_not_asked(machine):
    engine, clock, drafter = late(machine, 10_000, wrong=0)
    faster, drafted, _ = run(engine, clock)
    assert drafted == 0
    assert not drafter.caught
    assert faster > 0.99


def test_guesses_beside_a_prompt_are_not_credited_with_what_a_later_decode_won(machine):
    """A decode that holds a prompt is not measured, and the next one may be without guesses."""
    engine, _ = machine(memory_bound, 10**6)
    earlier = SimpleNamespace(draft=[5, 6], seconds_saved=0.0)
    engine.speculator._verified_jobs.append(earlier)
    for _ in range(4):
        decoded(engine.speculator, 1, 1, 1, 1.0)
    decoded(engine.speculator, 3, 1, 3, 1.0)
    assert engine.speculator.loss_budget.saved_seconds > 0
    assert earlier.seconds_saved == 0.0
