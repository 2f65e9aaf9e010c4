"""Laws of the engine on llama.cpp: exact on constructed models, within a measured margin on random weights."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, LAYOUTS, Answer, ask, check, collect, play, prompt, request

pytestmark = pytest.mark.native

MAX_MARGIN = 0.02  # the batch shape changes logits by about 1e-3, a wrong state by far more
CYCLE = models.CYCLE.decode()


@pytest.fixture
def engines():
    """Return a function that makes engines on tiny models; all are closed after the test."""
    with ExitStack() as stack:

        def make(name: str, *, kv_unified: bool = False, settings: EngineSettings | None = None, **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 8, "threads": 1}
            spec = EngineSpec(
                path=models.get_path(name),
                context_settings=ContextSettings(**{**defaults, **context}, kv_unified=kv_unified),
                engine_settings=settings or EngineSettings(),
            )
            engine = spec()
            stack.callback(engine.close)
            return engine

        yield make


def random_prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


def check_tokens(answer: Answer, plain: Answer, margins: list[float]) -> None:
    """Check that tokens are equal up to a position at which the margin of the cold run is small."""
    for index, (token, expected) in enumerate(itertools.zip_longest(answer.tokens, plain.tokens)):
        if token != expected:
            assert margins[index] < MAX_MARGIN, f"token {index}: {token}, not {expected}; margin {margins[index]:.3f}"
            return


def run_cold(engine: Engine, entries: list[int], **options) -> tuple[Answer, list[float]]:
    """Run a request without prefix cache; return also the margin between the two most likely tokens at each step."""
    engine.submit(request("plain", entries, logprobs=2, use_prefix_cache=False, **options))
    answer, margins = Answer(), []
    while engine.is_busy:
        for event in engine.step():
            if type(event).__name__ == "Token":
                answer.tokens.append(event.token)
                margins.append(event.alternatives[0][1] - event.alternatives[1][1])
            elif hasattr(event, "usage"):
                answer.end = event
    return answer, margins


SYSTEM, QUESTION, OTHER = random_prompt(150, 1), random_prompt(60, 2), random_prompt(70, 3)
BOUNDARIES = frozenset({150, 205})


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_reuse_changes_no_token_on_random_weights(engines, kind, kv_unified):
    engine, cold = engines(kind, kv_unified=kv_unified), engines(kind, kv_unified=kv_unified)
    first = ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES)
    turns = {
        "second turn": SYSTEM + QUESTION + first.tokens + OTHER,
        "regenerated": SYSTEM + QUESTION,
        "edited": SYSTEM + QUESTION[:55] + OTHER,
        "new conversation": SYSTEM + OTHER,
        "back to the first": SYSTEM + QUESTION + first.tokens + random_prompt(9, 9),
    }
    least = {
        "second turn": 150 + 60 + len(first.tokens) - 1,
        "regenerated": 205,
        "edited": 205,
        "new conversation": 150,
    }
    for name, entries in turns.items():
        answer = ask(engine, entries, boundaries=BOUNDARIES)
        check_tokens(answer, *run_cold(cold, entries))
        assert answer.cached >= least.get(name, 150), f"{name}: {answer.cached}"


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_c3_only_entries_after_the_last_shared_boundary_are_computed(engines, kind, kv_unified):
    """Checked by the rows that were decoded."""
    engine = engines(kind, kv_unified=kv_unified)
    ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES, max_tokens=1)
    for entries, boundary in ((SYSTEM + QUESTION, 205), (SYSTEM + QUESTION[:55] + OTHER, 205), (SYSTEM + OTHER, 150)):
        before = engine.counters.rows
        ask(engine, entries, boundaries=BOUNDARIES, max_tokens=1)
        assert engine.counters.rows - before <= len(entries) - boundary


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_reuse_concurrency_and_chunking_change_no_token_on_constructed_models(engines, kind, kv_unified):
    engine = engines(f"successor-{kind}", kv_unified=kv_unified, sequences=6)
    vocabulary = engine.backend.context.model.vocabulary
    requests = []
    for number in range(6):
        text = (CYCLE * 20)[number : 90 + 31 * number]
        requests.append(request(str(number), vocabulary.tokenize(text), max_tokens=30))
    for _ in range(2):  # cold, then warm
        answers = play(engine, *requests)
        for req in requests:
            expected, last = [], req.entries[-1]
            for _ in range(30):
                last = models.get_successor(last)
                expected.append(last)
            assert answers[req.id].tokens == expected
    assert engine.counters.max_batch_jobs >= 4
    assert engine.counters.reused_entries > 0


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_concurrency_changes_no_token_on_random_weights(engines, kind, kv_unified):
    engine, cold = engines(kind, kv_unified=kv_unified), engines(kind, kv_unified=kv_unified)
    requests = [request(str(n), random_prompt(40 + 13 * n, 50 + n), max_tokens=16) for n in range(6)]
    answers = play(engine, *requests)
    for req in requests:
        check_tokens(answers[req.id], *run_cold(cold, req.entries, max_tokens=16))
    assert engine.counters.max_batch_jobs >= 4


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_concurrent_requests_prefill_a_common_prefix_once(engines, kind, kv_unified):
    engine = engines(f"successor-{kind}", kv_unified=kv_unified)
    requests = [request(str(n), SYSTEM + random_prompt(20 + n, 70 + n), max_tokens=4) for n in range(4)]
    answers = play(engine, *requests)
    assert engine.counters.coalesced == 3
    assert sorted(answer.cached for answer in answers.values()) == [0, 150, 150, 150]
    for req in requests:
        assert answers[req.id].tokens[0] == models.get_successor(req.entries[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_tokens_cold_warm_and_concurrently(engines, kind):
    """Exactly, on the constructed model: its logits do not move."""
    sampling = Sampling(temperature=30.0, seed=5, top_k=0, top_p=1, min_p=0)
    engine = engines(f"successor-{kind}")
    cold = ask(engine, SYSTEM, sampling=sampling).tokens
    assert len(set(cold)) > 3  # at this temperature it is really drawn
    assert ask(engine, SYSTEM, sampling=sampling).tokens == cold
    others = [request(str(n), random_prompt(30, n), max_tokens=20) for n in range(3)]
    assert play(engine, request("a", SYSTEM, sampling=sampling), *others)["a"].tokens == cold


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_unified_kv_cache_evicts_then_preempts_and_fails_no_request(engines, kind):
    engine = engines(f"successor-{kind}", kv_unified=True, cells=512, sequences=4)
    ask(engine, random_prompt(200, 90))  # idle, in the way
    requests = [request(str(n), random_prompt(120, 91 + n), max_tokens=60) for n in range(4)]
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].reason in ("length", "stop")
        assert answers[req.id].tokens[:2] == [
            models.get_successor(req.entries[-1]),
            models.get_successor(models.get_successor(req.entries[-1])),
        ]
        assert len(answers[req.id].tokens) == 60
    if kind != "recurrent":  # its state does not grow
        assert engine.counters.preempted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_requests_beyond_the_streams_wait_and_end_when_their_stream_is_full(engines, kind):
    engine = engines(f"successor-{kind}", cells=512, sequences=2)
    requests = [request(str(n), random_prompt(240, 91 + n), max_tokens=60) for n in range(5)]
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].reason == "length"
        assert len(answers[req.id].tokens) == 17  # sixteen cells, and the token after the last


@pytest.mark.parametrize("kind", KINDS)
def test_c9_an_interrupted_decode_leaves_the_entries_correct(engines, kind):
    engine = engines(kind, cells=8192, sequences=2, batch=2048, ubatch=256)
    engine.submit(request("cancelled", random_prompt(2000, 1)))
    original = engine.backend.context._library.symbols.llama_decode
    calls = []

    def cancel_inside(pointer, batch):
        calls.append(batch.n_tokens)
        if len(calls) == 1:
            engine.cancel("cancelled")  # as another thread does while the decode runs
        return original(pointer, batch)

    engine.backend.context._library.symbols.llama_decode = cancel_inside
    try:
        answers: dict[str, Answer] = {}
        for _ in ("the plan", "the decode", "the end"):
            collect(answers, engine)
    finally:
        engine.backend.context._library.symbols.llama_decode = original
    assert type(answers["cancelled"].end.error).__name__ == "Cancelled"
    assert engine.counters.interrupted == 1
    check(engine)
    after = ask(engine, random_prompt(100, 2))
    check_tokens(after, *run_cold(engines(kind), random_prompt(100, 2)))


@pytest.mark.parametrize("kv_unified", LAYOUTS)
def test_recurrent_rollback_changes_no_token(kv_unified):
    """Rollback is limited to the last decode; llama.cpp itself accepts more and computes wrong results."""
    make = EngineSpec(
        path=models.get_path("hybrid"),
        context_settings=ContextSettings(
            cells=2048, sequences=1, batch=64, threads=1, recurrent_snapshots=3, kv_unified=kv_unified
        ),
    )
    system, question, other = prompt(40, 1), prompt(15, 2), prompt(17, 3)
    with closing(make()) as engine, closing(make()) as cold:
        for dropped in (3, 2, 1):
            ask(engine, system, use_prefix_cache=False, max_tokens=3, ignore_eos=True)
            for entries in (system[:-dropped] + other, system[:-dropped] + other[:-dropped] + question):
                warm = ask(engine, entries, max_tokens=1, logprobs=1)
                plain = ask(cold, entries, max_tokens=1, logprobs=1, use_prefix_cache=False)
                assert warm.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
            assert warm.cached == len(system) + len(other) - 2 * dropped
