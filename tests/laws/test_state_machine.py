"""Random lives of an engine: whatever is asked of it, in whatever order, it does as if it had done nothing else.

Hypothesis submits, steps, cancels, edits, forks, evicts and breaks things. After every step memory is compared with
one computed from scratch, and every answer with that of a backend that did nothing else (truth.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from afterglow.engine import engine
from afterglow.engine.engine import MAX_DECODE_ATTEMPTS
from afterglow.engine.inspect import snapshots
from afterglow.engine.kvcache import blocks, checkpoint_store, prefix_cache, sequence, store
from afterglow.engine.kvcache import checkpoints as checkpoint
from afterglow.engine.scheduling import job
from afterglow.engine.speculation import rollback as replay
from afterglow.engine.speculation import speculator as drafting
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.request import Failed, Finished, Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, InvalidArgument, KVCacheFull
from afterglow.llama.sampling import Sampling
from support import truth
from support.drafting import Oracle
from support.play import GREEDY, KINDS, LAYOUTS, Answer, ask, collect, fake, prompt
from support.truth import Damaged, check_all

LONGEST = 70  # entries of a prompt
RECALLED: Counter[str] = Counter()  # prompts that began from what was stored, by kind of memory
BEGINNING = 1e9  # of time
PICTURES = {7: Media(b"cat", 5, 2), 8: Media(b"dog", 5, 2), 9: Media(b"clip", 2, 4)}  # instead of these tokens


class Clock:
    """Time that passes only when it is told to, and a little with every look: plans depend on it."""

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, tick: float) -> None:
        self.now, self.tick = BEGINNING, tick

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@lru_cache(maxsize=8192)
def alone(kind: str, cells: int, entries: tuple[Entry, ...], what: tuple) -> tuple[list[int], str, bytes | int | None]:
    options = dict(what)
    return truth.answer(kind, entries, cells=cells, **options | {"sampling": SAMPLINGS[options["sampling"]]})


@lru_cache(maxsize=8192)
def alone_on_the_grid(kind: str, cells: int, entries: tuple[Entry, ...], what: tuple) -> tuple:
    """Where shapes move the numbers the right answer is that of a cold engine."""
    options = dict(what)
    engine = fake(kind, ON_THE_GRID, sequences=1, cells=cells, rounding=True)
    engine.backend.ledger = engine.interner
    answer = ask(engine, entries, **options | {"sampling": SAMPLINGS[options["sampling"]]})
    return answer.tokens, answer.reason, answer.end.stop_reason


ON_THE_GRID = EngineSettings(deterministic=True, grid=8)
SAMPLINGS = {
    "greedy": GREEDY,
    "seed 1": Sampling(temperature=0.7, seed=1),
    "seed 2": Sampling(temperature=1.5, seed=2),
}
WHAT = st.fixed_dictionaries(  # what decides the answer
    {
        "sampling": st.sampled_from(sorted(SAMPLINGS)),
        "max_tokens": st.sampled_from([5, 1, 0, 30, None]),
        "stop": st.sampled_from([(), (), (b"e",), (b"no", b"kq", b"dx")]),
        "ignore_ends": st.booleans(),
    }
)
HOW = st.fixed_dictionaries(  # what must not
    {
        "boundaries": st.sampled_from([0, 0, 5, 11]).map(
            lambda apart: frozenset(range(apart, LONGEST, apart) if apart else ())
        ),
        "priority": st.sampled_from([0, 0, 0, 1]),
        "reuse": st.sampled_from([True, True, True, False]),
        "sequence": st.sampled_from([None, None, None, 0, 1]),
        "deadline": st.sampled_from([None, None, None, 5.0]),
        "salt": st.sampled_from(["", "", "", "mine"]),
    }
)
SEED = st.integers(0, 2)
PICK = st.integers(0, 20)


class Answers(dict):
    """What every request of a life will be answered, for a drafter that knows everything."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life

    def get(self, id: str, _: object = None) -> list[int]:
        life = self.life
        return alone(life.kind, life.cells, tuple(life.requests[id].entries), life.named[id])[0]


class Life(RuleBasedStateMachine):
    """One engine, from its making to the end of its last request."""

    def __init__(self, kind: str, shared: bool, clock: Clock, *, deterministic: bool = False) -> None:
        super().__init__()
        self.kind, self.shared, self.clock, self.deterministic = kind, shared, clock, deterministic
        self.requests: dict[str, Request] = {}
        self.named: dict[str, tuple] = {}
        self.answers: dict[str, Answer] = {}
        self.submitted: dict[str, float] = {}
        self.cancelled: set[str] = set()
        self.squeezed: set[str] = set()  # had to end where they were, in memory that was called full
        self.failures: Counter[str] = Counter()  # decodes that were made to fail
        self.snapshots: list[snapshots.SavedSequence] = []
        self.idle_steps = 0  # in a row, without a decode or an end

    @initialize(
        sequences=st.sampled_from([3, 2, 1]),
        batch=st.sampled_from([64, 16, 8]),
        cells=st.sampled_from([100, 130]),
        rollback=st.sampled_from([0, 0, 3]),
        parked=st.sampled_from([10**9, 6000, 0]),
        limits=st.sampled_from([(8, 10**9), (3, 10**9), (1, 10**9), (4, 1500), (0, 10**9)]),
        often=st.sampled_from([0, 9]),
        tick=st.sampled_from([1e-2, 1e-5]),
        ram=st.sampled_from([10**9, 12_000, 3_000, 600, 0]),
        segment=st.sampled_from([8, 5, 64]),
        speculation=st.sampled_from(["off", 2, 5, "auto"]),
        wrong=st.sampled_from([0, 2, 3, 1]),
    )
    def make(self, sequences, batch, cells, rollback, parked, limits, often, tick, ram, segment, speculation, wrong):
        self.clock.begin(tick)
        checkpoints = CheckpointSettings(
            max_checkpoints=limits[0], max_bytes=limits[1], every_n_tokens=often, min_tokens=8, min_gap=4
        )
        self.cells = cells
        if isinstance(speculation, int) and self.kind in ("recurrent", "hybrid"):
            rollback = 3
        self.engine = fake(
            self.kind,
            EngineSettings(
                checkpoints=checkpoints,
                swap_bytes=parked,
                deterministic=self.deterministic,
                grid=ON_THE_GRID.grid,
                speculation=speculation,
                drafters=("oracle",),
                ram_cache_bytes=ram,
                block_size=segment,
            ),
            [Oracle(Answers(self), wrong)],
            sequences=sequences,
            batch_cells=batch,
            cells=cells,
            total_cells=cells if self.shared else None,
            shared=self.shared,
            rollback=rollback,
            rounding=self.deterministic,
        )
        self.engine.backend.ledger = self.engine.interner

    # --- asking

    def submit(self, entries: list[Entry], what: dict, how: dict) -> None:
        id = str(len(self.requests))
        entries = [PICTURES.get(entry, entry) for entry in entries[:LONGEST]] or [1]
        while sum(entry.cells if isinstance(entry, Media) else 1 for entry in entries) > self.cells:
            entries.pop()
        if how["sequence"] is not None:
            how = how | {"sequence": self.slot(how["sequence"])}
        options = what | {"sampling": SAMPLINGS[what["sampling"]]}
        self.requests[id] = Request(id=id, entries=entries, **options, **how)
        self.named[id] = tuple(what.items())
        self.answers[id] = Answer()
        self.submitted[id] = self.clock.now
        self.engine.submit(self.requests[id])
        self.engine._jobs[id].submitted_at = self.clock.now

    def earlier(self, pick: int) -> tuple[list[Entry], list[int]]:
        id = str(len(self.requests) - 1 - pick % len(self.requests))
        return list(self.requests[id].entries), self.answers[id].tokens

    def few(self) -> bool:
        return len(self.engine._jobs) < 6

    def some(self) -> bool:
        return bool(self.requests) and self.few()

    @precondition(few)
    @rule(length=st.sampled_from([30, 1, 60, 69]), seed=SEED, what=WHAT, how=HOW)
    def ask_something_new(self, length, seed, what, how):
        self.submit(prompt(length, seed), what, how)

    @precondition(some)
    @rule(pick=PICK, length=st.sampled_from([3, 12]), seed=SEED, what=WHAT, how=HOW)
    def go_on_with_a_conversation(self, pick, length, seed, what, how):
        entries, tokens = self.earlier(pick)
        self.submit(entries + tokens + prompt(length, seed), what, how)

    @precondition(some)
    @rule(pick=PICK, at=st.sampled_from([1, 2, 4, 20]), length=st.sampled_from([3, 12]), seed=SEED, what=WHAT, how=HOW)
    def edit_an_earlier_prompt(self, pick, at, length, seed, what, how):
        entries, _ = self.earlier(pick)
        self.submit(entries[:-at] + prompt(length, 100 + seed), what, how)

    @precondition(some)
    @rule(pick=PICK, what=WHAT, how=HOW)
    def ask_the_same_again(self, pick, what, how):
        self.submit(self.earlier(pick)[0], what, how)

    @precondition(few)
    @rule(seed=SEED, length=st.sampled_from([20, 50]), tails=st.lists(SEED, min_size=2, max_size=4), what=WHAT, how=HOW)
    def ask_several_on_one_prefix(self, seed, length, tails, what, how):
        for tail in tails:
            self.submit(prompt(length, 200 + seed) + prompt(tail, 300 + tail), what, how)

    # --- working

    def busy(self) -> bool:
        return self.engine.is_busy

    def step(self) -> None:
        now = self.clock.now
        running = set(self.engine._jobs)
        decodes = len(self.engine.backend.history)
        collect(self.answers, self.engine)
        for one in self.engine.prefix_cache.all_checkpoints:
            one.last_used = max(one.last_used, BEGINNING)
        for id in running - set(self.engine._jobs):
            self.judge(id)
        moved = len(self.engine.backend.history) > decodes or set(self.engine._jobs) != running
        self.idle_steps = 0 if moved or not running else self.idle_steps + 1
        assert self.idle_steps < 30, "a busy engine does nothing"
        for id in self.engine._jobs:
            assert id not in self.cancelled, f"{id} goes on after it was cancelled"
            deadline = self.requests[id].deadline
            assert deadline is None or now - self.submitted[id] <= deadline, f"{id} goes on after its deadline"
        check_all(self.engine)

    def judge(self, id: str) -> None:
        """Whether this request ended as it should have."""
        request, answer = self.requests[id], self.answers[id]
        now, reference = self.clock.now, alone_on_the_grid if self.deterministic else alone
        tokens, *ending = reference(self.kind, self.cells, tuple(request.entries), self.named[id])
        self.clock.now = now  # whether it was computed or remembered
        assert answer.end is not None, f"{id} is gone without an end"
        assert answer.tokens == tokens[: len(answer.tokens)]
        usage = answer.end.usage
        cells = sum(entry.cells if isinstance(entry, Media) else 1 for entry in request.entries)
        assert (usage.prompt_tokens, usage.generated_tokens) == (cells, len(answer.tokens))
        assert usage.cached_tokens < usage.prompt_tokens
        match answer.end:
            case Failed(_, Cancelled()):
                assert id in self.cancelled
            case Failed(_, DecodeFailed()):
                assert self.failures[id] >= MAX_DECODE_ATTEMPTS
            case Finished(_, "deadline"):
                assert self.clock.now - self.submitted[id] > request.deadline
            case Failed(_, KVCacheFull()):
                assert id in self.squeezed
            case Finished(_, reason, _, stop):
                assert id in self.squeezed or (answer.tokens, [reason, stop]) == (tokens, ending)
            case other:
                raise AssertionError(other)

    @precondition(busy)
    @rule()
    def step_once(self):
        self.step()

    @precondition(busy)
    @rule(count=st.integers(2, 12))
    def step_on(self, count):
        for _ in range(count):
            self.step()

    @precondition(busy)
    @rule()
    def finish(self):
        for _ in range(2000):
            if not self.engine.is_busy:
                return
            self.step()
        raise AssertionError("it does not end")

    @rule(seconds=st.sampled_from([0.1, 6.0, 2000.0]))
    def let_time_pass(self, seconds):
        self.clock.now += seconds

    # --- disturbing

    @precondition(busy)
    @rule(pick=PICK, inside=st.booleans())
    def cancel(self, pick, inside):
        id = list(self.engine._jobs)[pick % len(self.engine._jobs)]
        if inside:  # as another thread would, while a decode runs
            with patch.object(self.engine.backend, "decode", self.cancelling(id)):
                self.step()
        if id in self.engine._jobs:
            self.cancelled.add(id)
            self.engine.cancel(id)
            self.step()

    def cancelling(self, id: str) -> Callable:
        original = self.engine.backend.decode

        def decode(spans):
            self.engine.cancel(id)
            original(spans)

        return decode

    @precondition(busy)
    @rule(fault=st.sampled_from([DecodeFailed(-3, "planted"), Cancelled("planted"), KVCacheFull(1, 1)]))
    def let_a_decode_fail(self, fault):
        before = set(self.engine._jobs)
        self.engine.backend.faults.append(fault)
        if isinstance(fault, KVCacheFull):
            self.squeezed |= before
        if isinstance(fault, DecodeFailed):
            self.failures.update(before)
        self.step()
        self.engine.backend.faults.clear()
        self.squeezed -= set(self.engine._jobs)

    # --- memory

    def slot(self, pick: int) -> int:
        return pick % len(self.engine.prefix_cache.slots)

    @rule(pick=PICK, then=st.sampled_from(["keep", "fork", "put back", "put back there"]))
    def copy_a_sequence(self, pick, then):
        slot = self.engine.prefix_cache.slots[self.slot(pick)]
        try:
            if then == "keep":
                self.snapshots.append(snapshots.save(self.engine, slot.seq_id))
            elif then == "fork":
                snapshots.fork(self.engine, slot.seq_id)
            elif self.snapshots:
                snapshot = self.snapshots[pick % len(self.snapshots)]
                number = snapshots.load(self.engine, snapshot, None if then == "put back" else slot.seq_id)
                assert np.array_equal(self.engine.prefix_cache.slots[number].entries, snapshot.ids)
        except InvalidArgument:
            assert slot.busy or not len(slot)
        except KVCacheFull:
            assert self.shared or self.engine.is_busy

    @rule(pick=PICK, what=st.sampled_from(["the best", "the best", "this", "a checkpoint", "all that is stored"]))
    def lose_something(self, pick, what):
        memory = self.engine.prefix_cache
        if what == "the best":
            idle = [slot for slot in prefix_cache.slots if not slot.busy and len(slot)]
            assert prefix_cache.evict() == bool(idle)
            assert sum(len(slot) == 0 for slot in idle) == bool(idle)
        elif what == "this":
            snapshots.clear(self.engine, self.slot(pick))
        elif what == "all that is stored":
            prefix_cache.clear_store()
            assert prefix_cache.store.ram.block_bytes == 0
        elif prefix_cache.all_checkpoints:
            prefix_cache.all_checkpoints[pick % len(prefix_cache.all_checkpoints)].state = Damaged()

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, length=st.sampled_from([5, 30]), then=st.sampled_from(["pin", "unpin"]))
    def hold_on_to_a_beginning(self, pick, length, then):
        ids = self.engine.interner.intern(self.earlier(pick)[0][:length])
        with contextlib.suppress(InvalidArgument):  # more than pins may take
            getattr(self.engine.prefix_cache.store.pin_manager, then)(ids, "")

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, how=HOW)
    def ask_why(self, pick, how):
        entries, tokens = self.earlier(pick)
        request = Request(id="why", entries=(entries + tokens)[:LONGEST], **how | {"sequence": None})
        explanation = self.engine.explain(request)
        assert 0 <= explanation.reused_entries < explanation.prompt_entries == len(request.entries)

    # --- always

    @invariant()
    def everything_is_as_it_should_be(self):
        if hasattr(self, "engine"):
            check_all(self.engine)

    def teardown(self):
        if sys.exc_info()[0] is not None or not hasattr(self, "engine"):
            return
        Life.finish(self)
        assert all(answer.end is not None for answer in self.answers.values())
        assert not any(slot.busy for slot in self.engine.prefix_cache.slots)
        RECALLED[self.kind] += self.engine.prefix_cache.store.ram_counters.hits


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (checkpoint, drafting, engine, job, checkpoint_store, prefix_cache, replay, blocks, sequence, store):
        monkeypatch.setattr(module, "time", clock)
    return clock


# The same lives every time, and a failing one as it is: making it small takes minutes and is left to the thorough one.
MODERATE = settings(
    max_examples=80, stateful_step_count=30, derandomize=True, phases=[Phase.generate], database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
THOROUGH = settings(
    max_examples=300, stateful_step_count=60, database=None, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.parametrize("shared", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_life_of_an_engine_is_as_if_every_request_were_its_only_one(kind, shared, clock):
    RECALLED.clear()
    run_state_machine_as_test(lambda: Life(kind, shared, clock), settings=MODERATE)
    assert RECALLED[kind] > 0, "and what was stored was of use"


@pytest.mark.full
@pytest.mark.parametrize("shared", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_lives_of_an_engine_are_as_if_every_request_were_its_only_one(kind, shared, clock):
    run_state_machine_as_test(lambda: Life(kind, shared, clock), settings=THOROUGH)


@pytest.mark.parametrize("kind", KINDS)
def test_any_life_on_the_grid_gives_the_same_tokens_whatever_the_shapes(kind, clock):
    few = settings(MODERATE, max_examples=40)
    run_state_machine_as_test(lambda: Life(kind, False, clock, deterministic=True), settings=few)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_lives_on_the_grid_give_the_same_tokens_whatever_the_shapes(kind, clock):
    run_state_machine_as_test(lambda: Life(kind, False, clock, deterministic=True), settings=THOROUGH)
