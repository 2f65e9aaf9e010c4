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
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.host.build import DraftSource, build_engine
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.speculation import calibration, draft_model
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled, KVCacheFull
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from laws.test_state_machine import MODERATE, SAMPLINGS, THOROUGH, TIMED_MODULES, Clock, EngineMachine
from support.play import LAYOUTS, check
from support.truth import check_jobs, check_trees

pytestmark = pytest.mark.native

CELLS = 256  # the fewest that llama.cpp gives a sequence
MAX_LOGPROB_DIFFERENCE = 0.03  # a different batch shape changes log-probabilities by about 1e-3, a wrong state by 0.1
COUNTERS: Counter[str] = Counter()  # over all engines of a test
# Memory kind and drafter to the model. Recurrent models with MTP heads do not exist.
MODELS = {
    ("attention", "ngram"): "attention",
    ("attention", "draft"): "attention",
    ("attention", "mtp"): "attention-mtp",
    ("window", "ngram"): "window",
    ("window", "draft"): "window",
    ("window", "mtp"): "window-chained",
    ("window", "mtp with a window"): "window-chained-short",
    ("recurrent", "ngram"): "recurrent",
    ("recurrent", "draft"): "recurrent",
    ("hybrid", "ngram"): "hybrid",
    ("hybrid", "draft"): "hybrid",
    ("hybrid", "mtp"): "hybrid-mtp",
}


class ColdContext:
    """Computes the log-probabilities of completions with nothing cached."""

    def __init__(self, model: LlamaModel) -> None:
        self.context = LlamaContext(
            model, ContextSettings(cells=2 * CELLS, batch=2 * CELLS, ubatch=2 * CELLS, outputs=2 * CELLS, threads=1)
        )
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def compute_logprobs(self, entries: list[int], tokens: list[int]) -> np.ndarray:
        """Return the log-probabilities of the vocabulary at each token of a completion."""
        key = (len(entries), *entries, *tokens)
        if key not in self._known:
            context = self.context
            context.memory.clear()
            context.batch.clear()
            context.batch.add(entries + tokens[:-1], position=0, sequence=0, outputs=len(tokens))
            context.decode()
            first = len(entries) - 1
            logits = np.stack([context.get_logits(first + row) for row in range(len(tokens))]).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            self._known[key] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return self._known[key]


@contextlib.contextmanager
def abort_decode(context: LlamaContext, nodes: int) -> Iterator[None]:
    """Abort decodes after `nodes` nodes of their graph."""
    library, remaining = get_library(), iter(range(nodes))

    @library.ffi.callback("bool(void *)")
    def should_abort(_: object) -> bool:
        return next(remaining, None) is None

    library.symbols.llama_set_abort_callback(context.pointer, should_abort, library.ffi.NULL)
    yield
    callback = library.ffi.cast("ggml_abort_callback", library.strlen)
    library.symbols.llama_set_abort_callback(context.pointer, callback, context._abort_flag)


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
        self.cells = CELLS
        context_settings = ContextSettings(
            cells=CELLS if self.kv_unified else CELLS * sequences,
            sequences=sequences,
            batch=batch,
            ubatch=16,
            outputs=24,
            threads=1,
            kv_unified=self.kv_unified,
            recurrent_snapshots=recurrent_snapshots if self.kind == "hybrid" else 0,
        )
        draft: DraftSource | None = None
        if self.drafter == "draft":
            draft = self.model.path if draft_is_target else models.get_path("draft")
        elif self.drafter != "ngram":
            draft = "mtp"
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
            draft=draft,
        )

    def check_invariants(self) -> None:
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
        expected = self.cold.compute_logprobs(list(request.entries), tokens)
        is_greedy = SAMPLINGS[options["sampling"]].temperature == 0
        vocabulary, text = self.model.vocabulary, b""
        for index, token in enumerate(tokens):
            difference = abs(answer.logprobs[index] - expected[index, token])
            assert difference < MAX_LOGPROB_DIFFERENCE, f"{id}, token {index}: log-probability off by {difference:.3f}"
            margin = expected[index].max() - expected[index, token]
            assert not is_greedy or margin < 2 * MAX_LOGPROB_DIFFERENCE, f"{id}, token {index}: margin {margin:.3f}"
            text += vocabulary.token_to_piece(token, special=False)
            done = tokens[: index + 1]
            if token in vocabulary.eog_tokens and not options["ignore_eos"]:
                return done, "stop", token
            if matches := [stop for stop in options["stop"] if text.endswith(stop)]:
                return done, "stop", max(matches, key=len)
            if len(done) == options["max_tokens"] or len(request.entries) + len(done) > self.cells:
                return done, "length", None
        return [*tokens, -1], "it does not end here", None

    @contextlib.contextmanager
    def failing_decode(self, error: Exception) -> Iterator[None]:
        backend = self.engine.backend
        if isinstance(error, Cancelled):
            with abort_decode(self.context, next(self.abort_nodes)):
                yield
            return

        def decode(spans):
            halves = [replace(span, entries=span.entries[: len(span.entries) // 2], outputs=0) for span in spans]
            halves = [span for span in halves if len(span.entries)]
            if halves and not isinstance(error, KVCacheFull):
                LlamaBackend.decode(backend, halves)  # the heads do not see a decode that failed
            raise error

        with patch.object(backend, "decode", decode):
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
        with LlamaModel.load(path, ModelSettings(mtp=drafter.startswith("mtp"))) as model:
            cold = ColdContext(model)
            COUNTERS.clear()
            run_state_machine_as_test(
                lambda: LlamaEngineMachine(kind, kv_unified, clock, drafter, model, cold), settings=examples
            )

    return run


SHORT = settings(MODERATE, max_examples=6, stateful_step_count=25)


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize(("kind", "drafter"), MODELS)
def test_random_operations_change_no_token_on_llama(run_machine, kind, drafter, kv_unified):
    run_machine(kind, drafter, kv_unified, SHORT)
    assert COUNTERS["reused_entries"] > 0
    assert COUNTERS["interrupted"] > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize(("kind", "drafter"), MODELS)
def test_many_random_operations_change_no_token_on_llama(run_machine, kind, drafter, kv_unified):
    run_machine(kind, drafter, kv_unified, settings(THOROUGH, max_examples=150))
    assert COUNTERS["reused_entries"] > 0
    assert COUNTERS["interrupted"] > 0
