"""Stateful test of the engine: after any sequence of operations, each request gets its isolated result.

Hypothesis submits, steps, cancels, edits, forks, evicts and injects errors. After every step the KV cache is compared
with one computed from scratch, and every completion with that of a backend that did nothing else (support/truth.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar
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
from afterglow.engine.kvcache import blocks, checkpoints, prefix_cache, sequence, store
from afterglow.engine.kvcache.cost_model import PrefillCosts
from afterglow.engine.scheduling import job
from afterglow.engine.speculation import rollback, speculator
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.request import EngineEvent, Failed, Finished, Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, InvalidArgument, KVCacheFull
from afterglow.llama.sampling import Sampling
from support import truth
from support.drafting import Oracle
from support.play import GREEDY, KINDS, LAYOUTS, Answer, ask, fake, prompt, record_events
from support.truth import Damaged, check_all

pytestmark = pytest.mark.slow

MAX_PROMPT_ENTRIES = 70
RAM_TIER_HITS: Counter[str] = Counter()  # prefix hits in the RAM tier, by memory kind
AHEAD_DECODES: Counter[str] = Counter()  # decodes that were started ahead, by memory kind
START_SECONDS = 1e9  # first reading of the clock
# Media entries that replace these tokens in prompts.
MEDIA_BY_TOKEN = {7: Media(b"cat", 5, 2), 8: Media(b"dog", 5, 2), 9: Media(b"clip", 2, 4)}


class Clock:
    """A clock that advances on request, and by `tick` with every `perf_counter` call. Plans depend on it."""

    def __init__(self) -> None:
        self.start(0.0)

    def start(self, tick: float) -> None:
        self.now, self.tick = START_SECONDS, tick

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@lru_cache(maxsize=8192)
def compute_isolated(
    kind: str, cells: int, entries: tuple[Entry, ...], output: tuple
) -> tuple[list[int], str, bytes | int | None]:
    options = dict(output)
    return truth.compute_completion(
        kind, entries, cells_per_sequence=cells, **options | {"sampling": SAMPLINGS[options["sampling"]]}
    )


@lru_cache(maxsize=8192)
def compute_cold(kind: str, cells: int, entries: tuple[Entry, ...], output: tuple) -> tuple:
    """Return the result of a cold engine: with simulated rounding, results depend on the batch shape."""
    options = dict(output)
    engine = fake(kind, DETERMINISTIC, sequences=1, cells_per_sequence=cells, simulate_rounding=True)
    engine.backend.interner = engine.interner
    answer = ask(engine, entries, **options | {"sampling": SAMPLINGS[options["sampling"]]})
    return answer.tokens, answer.reason, answer.end.stop_reason


DETERMINISTIC = EngineSettings(deterministic=True, grid=8)
SAMPLINGS = {
    "greedy": GREEDY,
    "seed 1": Sampling(temperature=0.7, seed=1),
    "seed 2": Sampling(temperature=1.5, seed=2),
}
OUTPUT = st.fixed_dictionaries(  # options that determine the result
    {
        "sampling": st.sampled_from(sorted(SAMPLINGS)),
        "max_tokens": st.sampled_from([5, 1, 0, 30, None]),
        "stop": st.sampled_from([(), (), (b"e",), (b"no", b"kq", b"dx")]),
        "ignore_eos": st.booleans(),
    }
)
CACHING = st.fixed_dictionaries(  # options that must not change it
    {
        "boundaries": st.sampled_from([0, 0, 5, 11]).map(
            lambda distance: frozenset(range(distance, MAX_PROMPT_ENTRIES, distance) if distance else ())
        ),
        "priority": st.sampled_from([0, 0, 0, 1]),
        "use_prefix_cache": st.sampled_from([True, True, True, False]),
        "sequence": st.sampled_from([None, None, None, 0, 1]),
        "deadline": st.sampled_from([None, None, None, 5.0]),
        "salt": st.sampled_from(["", "", "", "mine"]),
    }
)
SEED = st.integers(0, 2)
PICK = st.integers(0, 20)


class IsolatedAnswers(dict):
    """The isolated tokens of every request, for the drafter."""

    def __init__(self, machine: EngineMachine) -> None:
        super().__init__()
        self.machine = machine

    def get(self, id: str, _: object = None) -> list[int]:
        machine = self.machine
        return compute_isolated(
            machine.kind, machine.cells, tuple(machine.requests[id].entries), machine.output_options[id]
        )[0]


class EngineMachine(RuleBasedStateMachine):
    """One engine, from its construction to the end of its last request.

    The methods up to `make` are what depends on the backend; `test_state_machine_on_llama.py` overrides them.
    """

    scale = 1  # of the lengths of prompts
    media_by_token: ClassVar[dict[int, Media]] = MEDIA_BY_TOKEN
    observed: ClassVar[dict[str, int]] = {}  # fields of every request that add to its events

    def __init__(
        self, kind: str, kv_unified: bool, clock: Clock, *, deterministic: bool = False, computes_ahead: bool = False
    ) -> None:
        super().__init__()
        self.computes_ahead = computes_ahead
        self.kind, self.kv_unified, self.clock, self.deterministic = kind, kv_unified, clock, deterministic
        self.requests: dict[str, Request] = {}
        self.output_options: dict[str, tuple] = {}
        self.answers: dict[str, Answer] = {}
        self.submitted: dict[str, float] = {}
        self.cancelled: set[str] = set()
        self.may_end_early: set[str] = set()  # because of an injected KVCacheFull
        self.failures: Counter[str] = Counter()  # injected decode failures by request
        self.snapshots: list[snapshots.SavedSequence] = []
        self.idle_steps = 0  # consecutive steps without a decode or an ended request

    def check_engine(self) -> None:
        check_all(self.engine)

    def compute_expected(self, id: str) -> tuple[list[int], str, bytes | int | None]:
        """Return the tokens, the finish reason and the stop reason that a request must have."""
        reference = compute_cold if self.deterministic else compute_isolated
        return reference(self.kind, self.cells, tuple(self.requests[id].entries), self.output_options[id])

    @contextlib.contextmanager
    def failing_decode(self, error: Exception) -> Iterator[None]:
        """Make the next decode raise an error, after it has changed as much as such a decode does."""
        self.engine.backend.injected_errors.append(error)
        yield
        self.engine.backend.injected_errors.clear()

    def damage(self, checkpoint: checkpoints.Checkpoint) -> None:
        checkpoint.state = Damaged(checkpoint.state.nbytes)

    @initialize(
        sequences=st.sampled_from([3, 2, 1]),
        batch=st.sampled_from([64, 16, 8]),
        cells=st.sampled_from([100, 130]),
        recurrent_snapshots=st.sampled_from([0, 0, 3]),
        swap_bytes=st.sampled_from([10**9, 6000, 0]),
        limits=st.sampled_from([(8, 10**9), (3, 10**9), (1, 10**9), (4, 1500), (0, 10**9)]),
        every_n_tokens=st.sampled_from([0, 9]),
        tick=st.sampled_from([1e-2, 1e-5]),
        ram_cache_bytes=st.sampled_from([10**9, 60_000, 15_000, 3_000, 0]),
        block_size=st.sampled_from([8, 5, 64]),
        speculation=st.sampled_from(["off", 2, 5, "auto"]),
        wrong=st.sampled_from([0, 2, 3, 1]),
    )
    def make(
        self,
        sequences,
        batch,
        cells,
        recurrent_snapshots,
        swap_bytes,
        limits,
        every_n_tokens,
        tick,
        ram_cache_bytes,
        block_size,
        speculation,
        wrong,
    ):
        self.clock.start(tick)
        checkpoint_settings = CheckpointSettings(
            max_checkpoints=limits[0], max_bytes=limits[1], every_n_tokens=every_n_tokens, min_tokens=8, min_gap=4
        )
        self.cells = cells
        if isinstance(speculation, int) and self.kind in ("recurrent", "hybrid"):
            recurrent_snapshots = 3
        self.engine = fake(
            self.kind,
            EngineSettings(
                checkpoints=checkpoint_settings,
                swap_bytes=swap_bytes,
                deterministic=self.deterministic,
                grid=DETERMINISTIC.grid,
                speculation="off" if self.deterministic else speculation,
                drafters=("oracle",),
                ram_cache_bytes=ram_cache_bytes,
                block_size=2 * DETERMINISTIC.grid if self.deterministic and block_size == 5 else block_size,
            ),
            [Oracle(IsolatedAnswers(self), wrong)],
            sequences=sequences,
            batch_cells=batch,
            cells_per_sequence=cells,
            total_cells=cells if self.kv_unified else None,
            kv_unified=self.kv_unified,
            recurrent_snapshots=recurrent_snapshots,
            simulate_rounding=self.deterministic,
        )
        self.engine.prefix_cache.cost_model.prefill_costs = PrefillCosts()  # of the simulated clock
        self.engine.backend.interner = self.engine.interner
        capabilities = self.engine.backend.capabilities
        self.engine.backend.capabilities = replace(capabilities, computes_ahead=self.computes_ahead)

    # --- submitting

    def submit(self, entries: list[Entry], output: dict, caching: dict) -> None:
        id = str(len(self.requests))
        entries = [self.media_by_token.get(entry, entry) for entry in entries[: MAX_PROMPT_ENTRIES * self.scale]] or [1]
        while sum(entry.cells if isinstance(entry, Media) else 1 for entry in entries) > self.cells:
            entries.pop()
        if caching["sequence"] is not None:
            caching = caching | {"sequence": self.slot(caching["sequence"])}
        caching = caching | {"boundaries": frozenset(self.scale * boundary for boundary in caching["boundaries"])}
        options = output | {"sampling": SAMPLINGS[output["sampling"]]} | self.observed
        self.requests[id] = Request(id=id, entries=entries, **options, **caching)
        self.output_options[id] = tuple(output.items())
        self.answers[id] = Answer()
        self.submitted[id] = self.clock.now
        self.engine.submit(self.requests[id])
        self.engine._jobs[id].submitted_at = self.clock.now

    def earlier(self, pick: int) -> tuple[list[Entry], list[int]]:
        id = str(len(self.requests) - 1 - pick % len(self.requests))
        return list(self.requests[id].entries), self.answers[id].tokens

    def has_capacity(self) -> bool:
        return len(self.engine._jobs) < 6

    def has_earlier_request(self) -> bool:
        return bool(self.requests) and self.has_capacity()

    @precondition(has_capacity)
    @rule(length=st.sampled_from([30, 1, 60, 69]), seed=SEED, output=OUTPUT, caching=CACHING)
    def submit_new_prompt(self, length, seed, output, caching):
        self.submit(prompt(self.scale * length, seed), output, caching)

    @precondition(has_earlier_request)
    @rule(pick=PICK, length=st.sampled_from([3, 12]), seed=SEED, output=OUTPUT, caching=CACHING)
    def continue_conversation(self, pick, length, seed, output, caching):
        entries, tokens = self.earlier(pick)
        self.submit(entries + tokens + prompt(self.scale * length, seed), output, caching)

    @precondition(has_earlier_request)
    @rule(
        pick=PICK,
        at=st.sampled_from([1, 2, 4, 20]),
        length=st.sampled_from([3, 12]),
        seed=SEED,
        output=OUTPUT,
        caching=CACHING,
    )
    def edit_earlier_prompt(self, pick, at, length, seed, output, caching):
        entries, _ = self.earlier(pick)
        self.submit(entries[:-at] + prompt(length, 100 + seed), output, caching)

    @precondition(has_earlier_request)
    @rule(pick=PICK, output=OUTPUT, caching=CACHING)
    def repeat_prompt(self, pick, output, caching):
        self.submit(self.earlier(pick)[0], output, caching)

    @precondition(has_capacity)
    @rule(
        seed=SEED,
        length=st.sampled_from([20, 50]),
        tails=st.lists(SEED, min_size=2, max_size=4),
        output=OUTPUT,
        caching=CACHING,
    )
    def submit_several_with_common_prefix(self, seed, length, tails, output, caching):
        for tail in tails:
            self.submit(prompt(self.scale * length, 200 + seed) + prompt(tail, 300 + tail), output, caching)

    # --- stepping

    def is_busy(self) -> bool:
        return self.engine.is_busy

    def record(self, events: Iterable[EngineEvent], running: set[str]) -> None:
        """Record the events of a step, before which these requests were `running`, and check those that ended."""
        record_events(self.answers, events)
        for checkpoint in self.engine.prefix_cache.all_checkpoints:
            checkpoint.last_used = max(checkpoint.last_used, START_SECONDS)
        for id in running - set(self.engine._jobs):
            self.check_result(id)

    def settle(self) -> None:
        """Finish a decode that was started ahead, as a host does before it uses the engine between two steps."""
        running = set(self.engine._jobs)
        self.record(self.engine.settle(), running)

    def step(self) -> None:
        now = self.clock.now
        running = set(self.engine._jobs)
        decodes = self.engine.counters.decodes
        self.record(self.engine.step(), running)
        progressed = self.engine.counters.decodes > decodes or set(self.engine._jobs) != running
        self.idle_steps = 0 if progressed or not running else self.idle_steps + 1
        assert self.idle_steps < 30, "a busy engine makes no progress"
        for id in self.engine._jobs:
            assert id not in self.cancelled, f"{id} runs after it was cancelled"
            deadline = self.requests[id].deadline
            assert deadline is None or now - self.submitted[id] <= deadline, f"{id} runs after its deadline"
        self.check_settled_engine()

    def check_result(self, id: str) -> None:
        """Check that a request ended as it should."""
        request, answer = self.requests[id], self.answers[id]
        now = self.clock.now
        tokens, *ending = self.compute_expected(id)
        self.clock.now = now  # the reference may have advanced it
        assert answer.end is not None, f"{id} has no end event"
        assert answer.tokens == tokens[: len(answer.tokens)]
        usage = answer.end.usage
        cells = sum(entry.cells if isinstance(entry, Media) else 1 for entry in request.entries)
        assert (usage.prompt_tokens, usage.generated_tokens) == (cells, len(answer.tokens))
        assert usage.cached_tokens <= usage.prompt_tokens
        match answer.end:
            case Failed(_, Cancelled()):
                assert id in self.cancelled
            case Failed(_, DecodeFailed()):
                assert self.failures[id] >= MAX_DECODE_ATTEMPTS
            case Finished(_, "deadline"):
                assert self.clock.now - self.submitted[id] > request.deadline
            case Failed(_, KVCacheFull()):
                assert id in self.may_end_early
            case Finished(_, reason, _, stop):
                assert id in self.may_end_early or (answer.tokens, [reason, stop]) == (tokens, ending)
            case other:
                raise AssertionError(other)

    @precondition(is_busy)
    @rule()
    def step_once(self):
        self.step()

    @precondition(is_busy)
    @rule(count=st.integers(2, 12))
    def step_several(self, count):
        for _ in range(count):
            self.step()

    @precondition(is_busy)
    @rule()
    def run_until_idle(self):
        for _ in range(2000):
            if not self.engine.is_busy:
                return
            self.step()
        raise AssertionError("the requests do not end")

    @rule(seconds=st.sampled_from([0.1, 6.0, 2000.0]))
    def advance_clock(self, seconds):
        self.clock.now += seconds

    # --- cancels and errors

    @precondition(is_busy)
    @rule(pick=PICK, inside_decode=st.booleans())
    def cancel(self, pick, inside_decode):
        id = list(self.engine._jobs)[pick % len(self.engine._jobs)]
        if inside_decode:  # as another thread does while a decode runs
            with patch.object(self.engine.backend, "decode", self.cancel_during_decode(id)):
                self.step()
        if id in self.engine._jobs:
            self.cancelled.add(id)
            self.engine.cancel(id)
            self.step()

    def cancel_during_decode(self, id: str) -> Callable:
        original = self.engine.backend.decode

        def decode(spans):
            self.engine.cancel(id)
            original(spans)

        return decode

    @precondition(is_busy)
    @rule(error=st.sampled_from([DecodeFailed(-3, "planted"), Cancelled("planted"), KVCacheFull(1, 1)]))
    def inject_decode_error(self, error):
        before = set(self.engine._jobs)
        if isinstance(error, KVCacheFull):
            self.may_end_early |= before
        if isinstance(error, DecodeFailed):
            self.failures.update(before)
        with self.failing_decode(error):
            self.step()
            self.settle()
        self.may_end_early -= set(self.engine._jobs)

    # --- cached state

    def slot(self, pick: int) -> int:
        return pick % len(self.engine.prefix_cache.slots)

    @rule(pick=PICK, then=st.sampled_from(["save", "fork", "load", "load into slot"]))
    def copy_sequence(self, pick, then):
        self.settle()
        slot = self.engine.prefix_cache.slots[self.slot(pick)]
        try:
            if then == "save":
                self.snapshots.append(snapshots.save(self.engine, slot.number))
            elif then == "fork":
                snapshots.fork(self.engine, slot.number)
            elif self.snapshots:
                snapshot = self.snapshots[pick % len(self.snapshots)]
                number = snapshots.load(self.engine, snapshot, None if then == "load" else slot.number)
                assert np.array_equal(self.engine.prefix_cache.slots[number].entries, snapshot.entries)
        except InvalidArgument:
            assert slot.busy or not len(slot)
        except KVCacheFull:
            assert self.kv_unified or self.engine.is_busy

    @rule(pick=PICK, operation=st.sampled_from(["evict", "evict", "slot", "checkpoint", "store"]))
    def lose_cached_state(self, pick, operation):
        self.settle()
        cache = self.engine.prefix_cache
        if operation == "evict":
            idle = [slot for slot in cache.slots if not slot.busy and len(slot)]
            assert cache.evict() == bool(idle)
            assert sum(len(slot) == 0 for slot in idle) == bool(idle)
        elif operation == "slot":
            if cache.slots[self.slot(pick)].busy:
                with pytest.raises(InvalidArgument, match="in use"):
                    snapshots.clear(self.engine, self.slot(pick))
            else:
                snapshots.clear(self.engine, self.slot(pick))
        elif operation == "store":
            cache.clear_store()
            assert cache.store.ram.budget.get("blocks") == 0
        elif cache.all_checkpoints:
            self.damage(cache.all_checkpoints[pick % len(cache.all_checkpoints)])

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, length=st.sampled_from([5, 30]), then=st.sampled_from(["pin", "unpin"]))
    def change_pin(self, pick, length, then):
        prefix = self.engine.interner.intern(self.earlier(pick)[0][:length])
        with contextlib.suppress(InvalidArgument):  # the limit on pinned bytes
            getattr(self.engine.prefix_cache.store.pin_manager, then)(prefix, "")

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, caching=CACHING)
    def explain(self, pick, caching):
        entries, tokens = self.earlier(pick)
        request = Request(
            id="explained", entries=(entries + tokens)[:MAX_PROMPT_ENTRIES], **caching | {"sequence": None}
        )
        explanation = self.engine.explain(request)
        assert 0 <= explanation.reused_entries <= explanation.prompt_entries == len(request.entries)

    # --- invariants

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "engine"):
            self.check_settled_engine()

    def check_settled_engine(self) -> None:
        if self.engine._launched is None:  # otherwise the KV cache has more cells than the engine has recorded
            self.check_engine()

    def teardown(self):
        if sys.exc_info()[0] is not None or not hasattr(self, "engine"):
            return
        EngineMachine.run_until_idle(self)
        assert all(answer.end is not None for answer in self.answers.values())
        assert not any(slot.busy for slot in self.engine.prefix_cache.slots)
        AHEAD_DECODES[self.kind] += self.engine.counters.decodes_ahead
        RAM_TIER_HITS[self.kind] += self.engine.prefix_cache.store.ram.counters.hits


TIMED_MODULES = (checkpoints, speculator, engine, job, prefix_cache, rollback, blocks, sequence, store)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in TIMED_MODULES:
        monkeypatch.setattr(module, "time", clock)
    return clock


# The same examples every time, and failures are not shrunk: shrinking takes minutes and is left to the thorough test.
MODERATE = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, phases=[Phase.generate], database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
THOROUGH = settings(
    max_examples=300, stateful_step_count=60, database=None, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_give_each_request_its_isolated_result(kind, kv_unified, clock):
    RAM_TIER_HITS.clear()
    examples = settings(MODERATE, max_examples=90 if kv_unified else 60)  # loads from RAM are rarer there
    run_state_machine_as_test(lambda: EngineMachine(kind, kv_unified, clock), settings=examples)
    assert RAM_TIER_HITS[kind] > 0, "no prefix was loaded from the RAM tier"


@pytest.mark.full
@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_operations_give_each_request_its_isolated_result(kind, kv_unified, clock):
    run_state_machine_as_test(lambda: EngineMachine(kind, kv_unified, clock), settings=THOROUGH)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_with_decodes_that_start_ahead_give_each_request_its_isolated_result(kind, kv_unified, clock):
    AHEAD_DECODES.clear()
    run_state_machine_as_test(lambda: EngineMachine(kind, kv_unified, clock, computes_ahead=True), settings=MODERATE)
    assert AHEAD_DECODES[kind] > 20


@pytest.mark.full
@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_operations_with_decodes_that_start_ahead_give_each_request_its_isolated_result(
    kind, kv_unified, clock
):
    run_state_machine_as_test(lambda: EngineMachine(kind, kv_unified, clock, computes_ahead=True), settings=THOROUGH)


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_in_deterministic_mode_give_the_cold_result(kind, clock):
    fewer = settings(MODERATE, max_examples=30)
    run_state_machine_as_test(lambda: EngineMachine(kind, False, clock, deterministic=True), settings=fewer)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_operations_in_deterministic_mode_give_the_cold_result(kind, clock):
    run_state_machine_as_test(lambda: EngineMachine(kind, False, clock, deterministic=True), settings=THOROUGH)
