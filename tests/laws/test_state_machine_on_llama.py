"""The state machine of the engine on llama.cpp: tiny models of every memory kind, both KV layouts, every drafter.

The weights are random, so the state of a sequence decides its tokens. A cold context computes the logits of every
completion in one decode; the log-probabilities that the engine reported must be equal within the effect of the batch
shape. Errors are real: a decode is aborted inside its graph, or fails after half of its rows.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import build_engine
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.speculation import calibration, draft_model
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from laws.test_state_machine import MODERATE, SAMPLINGS, THOROUGH, TIMED_MODULES, Clock, EngineMachine
from support.llama_engines import EXACT, MIN_CELLS, MODELS, ColdContext, abort_decodes, fail_decodes, get_draft
from support.play import LAYOUTS, check
from support.truth import check_jobs, check_trees

pytestmark = pytest.mark.native

COUNTERS: Counter[str] = Counter()  # over all engines of a test


class LlamaEngineMachine(EngineMachine):
    """One engine on llama.cpp."""

    scale = 3
    media_by_token: ClassVar[dict] = {}
    observed: ClassVar[dict[str, int]] = {"logprobs": 0}
    engine: Engine

    def __init__(
        self, kind: str, kv_unified: bool, clock: Clock, drafter: str, model: LlamaModel, cold: ColdContext
    ) -> None:
        super().__init__(kind, kv_unified, clock)
        self.drafter, self.model, self.cold = drafter, model, cold
        self.abort_nodes = itertools.cycle((0, 7, 30, 90, 200, 600))

    @initialize(
        sequences=st.sampled_from([3, 2, 4]),
        batch=st.sampled_from([64, 24]),
        recurrent_snapshots=st.sampled_from([4, 4, 0]),
        swap_bytes=st.sampled_from([10**9, 0]),
        max_checkpoints=st.sampled_from([8, 2, 0]),
        tick=st.sampled_from([1e-2, 1e-5]),
        ram_cache_bytes=st.sampled_from([10**9, 300_000, 0]),
        speculation=st.sampled_from([4, 2, "auto", "off"]),
        draft_is_target=st.booleans(),
    )
    def make(
        self,
        sequences,
        batch,
        recurrent_snapshots,
        swap_bytes,
        max_checkpoints,
        tick,
        ram_cache_bytes,
        speculation,
        draft_is_target,
    ):
        self.clock.start(tick)
        self.cells = MIN_CELLS
        context_settings = ContextSettings(
            cells=MIN_CELLS if self.kv_unified else MIN_CELLS * sequences,
            sequences=sequences,
            batch=batch,
            ubatch=16,
            outputs=24,
            threads=1,
            kv_unified=self.kv_unified,
            recurrent_snapshots=recurrent_snapshots if self.kind == "hybrid" else 0,
            **EXACT,
        )
        self.context = LlamaContext(self.model, context_settings)
        self.engine = build_engine(
            self.context,
            EngineSettings(
                checkpoints=CheckpointSettings(
                    max_checkpoints=max_checkpoints, every_n_tokens=50, min_tokens=16, min_gap=8
                ),
                swap_bytes=swap_bytes,
                speculation=speculation,
                ram_cache_bytes=ram_cache_bytes,
                block_size=16,
            ),
            draft=get_draft(self.drafter, self.model.path, draft_is_target=draft_is_target),
        )

    def submit(self, entries: list[Entry], output: dict, caching: dict) -> None:
        """Submit a request. Only every fourth may generate until its sequence is full: that takes most of the time."""
        if output["max_tokens"] is None and len(self.requests) % 4:
            output = output | {"max_tokens": 12}
        super().submit(entries, output, caching)

    def check_engine(self) -> None:
        check_jobs(self.engine)
        check_trees(self.engine)
        check(self.engine)
        cache = self.engine.prefix_cache
        assert cache.store.ram.used_bytes <= cache.store.ram.limit
        for slot in cache.slots:
            assert self.engine.backend.can_resume_at(slot.seq_id, slot.position), f"slot {slot.seq_id} cannot continue"

    def compute_expected(self, id: str) -> tuple[list[int], str, bytes | int | None]:
        """Check the tokens against a cold context. Return those up to the first at which the request must end."""
        request, answer, options = self.requests[id], self.answers[id], dict(self.output_options[id])
        tokens = answer.tokens
        if options["max_tokens"] == 0 or not tokens:
            return [], "length", None
        self.cold.check(request.entries, answer, is_greedy=SAMPLINGS[options["sampling"]].temperature == 0)
        vocabulary, stop_matcher = self.model.vocabulary, StopMatcher(options["stop"] or (b"\0 no text has this",))
        for index, token in enumerate(tokens):
            done, stop = tokens[: index + 1], stop_matcher.feed(vocabulary.token_to_piece(token, special=False))
            if token in vocabulary.eog_tokens and not options["ignore_eos"]:
                return done, "stop", token
            if stop is not None:
                return done, "stop", stop
            if len(done) == options["max_tokens"] or len(request.entries) + len(done) > self.cells:
                return done, "length", None
        return [*tokens, -1], "it does not end here", None

    @contextlib.contextmanager
    def failing_decode(self, error: Exception) -> Iterator[None]:
        is_abort = isinstance(error, Cancelled)
        nodes = next(self.abort_nodes)
        with abort_decodes(self.context, nodes) if is_abort else fail_decodes(self.engine, error):
            yield

    def damage(self, checkpoint: Checkpoint) -> None:
        checkpoint.state = replace(checkpoint.state, key=b"of another model")

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            if sys.exc_info()[0] is None:
                self.run_until_idle()
                self.continue_idle_sequences()
                for name in ("preempted", "accepted_tokens", "reused_entries", "interrupted"):
                    COUNTERS[name] += getattr(self.engine.counters, name)
                COUNTERS["rejected_tokens"] += self.engine.counters.draft_tokens - self.engine.counters.accepted_tokens
                COUNTERS["ram_hits"] += self.engine.prefix_cache.store.ram_counters.hits
        finally:
            self.engine.close()
            self.context.close()

    def continue_idle_sequences(self) -> None:
        """Ask for one more token after every sequence, which shows that its state is right."""
        output = {"sampling": "greedy", "max_tokens": 2, "stop": (), "ignore_eos": True}
        options = {"boundaries": frozenset(), "priority": 0, "use_prefix_cache": True, "sequence": None}
        for slot in self.engine.prefix_cache.slots:
            if 0 < len(slot) < self.cells - 2:
                entries = [int(entry) for entry in slot.entries]
                self.submit([*entries, 33], output, options | {"deadline": None, "salt": slot.salt})
                self.run_until_idle()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (*TIMED_MODULES, draft_model, calibration):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def run_machine(clock):
    """Return a function that runs the state machine of a memory kind and a drafter."""

    def run(kind: str, drafter: str, kv_unified: bool, examples: settings) -> None:
        path = models.get_path(MODELS[kind, drafter])
        with LlamaModel.load(path, ModelSettings(mtp=drafter.startswith("mtp")), trust=True) as model:
            cold = ColdContext(model)
            COUNTERS.clear()
            run_state_machine_as_test(
                lambda: LlamaEngineMachine(kind, kv_unified, clock, drafter, model, cold), settings=examples
            )

    return run


SHORT = settings(MODERATE, max_examples=4, stateful_step_count=20)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize(("kind", "drafter"), MODELS)
def test_random_operations_change_no_token_on_llama(run_machine, kind, drafter, kv_unified):
    run_machine(kind, drafter, kv_unified, SHORT)
    assert COUNTERS["reused_entries"] > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize(("kind", "drafter"), MODELS)
def test_many_random_operations_change_no_token_on_llama(run_machine, kind, drafter, kv_unified):
    run_machine(kind, drafter, kv_unified, settings(THOROUGH, max_examples=150))
    assert COUNTERS["reused_entries"] > 0
    assert COUNTERS["interrupted"] > 0
