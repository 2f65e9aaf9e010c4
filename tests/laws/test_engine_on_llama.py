"""The laws on real llama.cpp: exactly on constructed models, within a measured margin on random weights."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, LAYOUTS, Answer, ask, check, collect, play, request

MARGIN = 0.02  # the shape of a batch moves logits by about 1e-3; a wrong past by far more
CYCLE = models.CYCLE.decode()


@pytest.fixture
def engines():
    """Make engines on tiny models; all are closed at the end."""
    with ExitStack() as stack:

        def make(name: str, *, unified: bool = False, settings: EngineSettings | None = None, **context) -> Engine:
            defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 8, "threads": 1}
            recipe = EngineSpec(
                path=models.get_path(name),
                context_settings=ContextSettings(**{**defaults, **context}, kv_unified=unified),
                engine_settings=settings or EngineSettings(),
            )
            engine = recipe()
            stack.callback(engine.close)
            return engine

        yield make


def ordinary(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


def agree(answer: Answer, plain: Answer, margins: list[float]) -> None:
    """Equal tokens; where they part, the plain run was undecided there."""
    for index, (one, other) in enumerate(itertools.zip_longest(answer.tokens, plain.tokens)):
        if one != other:
            assert margins[index] < MARGIN, f"token {index}: {one} instead of {other}, margin {margins[index]:.3f}"
            return


def plain_run(engine: Engine, entries: list[int], **options) -> tuple[Answer, list[float]]:
    """A cold run alone, with the margin between the two likeliest tokens at each step."""
    engine.submit(request("plain", entries, logprobs=2, reuse=False, **options))
    answer, margins = Answer(), []
    while engine.is_busy:
        for event in engine.step():
            if type(event).__name__ == "Token":
                answer.tokens.append(event.token)
                margins.append(event.alternatives[0][1] - event.alternatives[1][1])
            elif hasattr(event, "usage"):
                answer.end = event
    return answer, margins


SYSTEM, QUESTION, OTHER = ordinary(150, 1), ordinary(60, 2), ordinary(70, 3)
BOUNDARIES = frozenset({150, 205})


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_reuse_changes_no_token_on_random_weights(engines, kind, unified):
    engine, cold = engines(kind, kv_unified=unified), engines(kind, kv_unified=unified)
    first = ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES)
    turns = {
        "second turn": SYSTEM + QUESTION + first.tokens + OTHER,
        "regenerated": SYSTEM + QUESTION,
        "edited": SYSTEM + QUESTION[:55] + OTHER,
        "new conversation": SYSTEM + OTHER,
        "back to the first": SYSTEM + QUESTION + first.tokens + ordinary(9, 9),
    }
    least = {
        "second turn": 150 + 60 + len(first.tokens) - 1,
        "regenerated": 205,
        "edited": 205,
        "new conversation": 150,
    }
    for name, entries in turns.items():
        answer = ask(engine, entries, boundaries=BOUNDARIES)
        agree(answer, *plain_run(cold, entries))
        assert answer.cached >= least.get(name, 150), f"{name}: {answer.cached}"


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_c3_computes_no_more_than_after_the_last_shared_boundary(engines, kind, unified):
    """Asserted by the rows that really went through the decoder."""
    engine = engines(kind, kv_unified=unified)
    ask(engine, SYSTEM + QUESTION, boundaries=BOUNDARIES, max_tokens=1)
    for entries, boundary in ((SYSTEM + QUESTION, 205), (SYSTEM + QUESTION[:55] + OTHER, 205), (SYSTEM + OTHER, 150)):
        before = engine.counters.rows
        ask(engine, entries, boundaries=BOUNDARIES, max_tokens=1)
        assert engine.counters.rows - before <= len(entries) - boundary


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_reuse_company_and_chunking_change_no_token_on_constructed_models(engines, kind, unified):
    engine = engines(f"successor-{kind}", kv_unified=unified, sequences=6)
    vocabulary = engine.backend.context.model.vocabulary
    requests = []
    for number in range(6):
        text = (CYCLE * 20)[number : 90 + 31 * number]
        requests.append(request(str(number), vocabulary.tokenize(text), max_tokens=30))
    for _ in range(2):  # cold, then warm
        answers = play(engine, *requests)
        for one in requests:
            expected, last = [], one.entries[-1]
            for _ in range(30):
                last = models.get_successor(last)
                expected.append(last)
            assert answers[one.id].tokens == expected
    assert engine.counters.max_batch_jobs >= 4
    assert engine.counters.reused_entries > 0


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_company_changes_no_token_on_random_weights(engines, kind, unified):
    engine, cold = engines(kind, kv_unified=unified), engines(kind, kv_unified=unified)
    requests = [request(str(n), ordinary(40 + 13 * n, 50 + n), max_tokens=16) for n in range(6)]
    answers = play(engine, *requests)
    for one in requests:
        agree(answers[one.id], *plain_run(cold, one.entries, max_tokens=16))
    assert engine.counters.max_batch_jobs >= 4


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_on_one_new_prefix_compute_it_once(engines, kind, unified):
    engine = engines(f"successor-{kind}", kv_unified=unified)
    requests = [request(str(n), SYSTEM + ordinary(20 + n, 70 + n), max_tokens=4) for n in range(4)]
    answers = play(engine, *requests)
    assert engine.counters.coalesced == 3
    assert sorted(answer.cached for answer in answers.values()) == [0, 150, 150, 150]
    for one in requests:
        assert answers[one.id].tokens[0] == models.get_successor(one.entries[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_tokens_cold_warm_and_in_company(engines, kind):
    """Exactly, on the constructed model: its logits do not move."""
    sampling = Sampling(temperature=30.0, seed=5, top_k=0, top_p=1, min_p=0)
    engine = engines(f"successor-{kind}")
    cold = ask(engine, SYSTEM, sampling=sampling).tokens
    assert len(set(cold)) > 3  # at this temperature it is really drawn
    assert ask(engine, SYSTEM, sampling=sampling).tokens == cold
    company = [request(str(n), ordinary(30, n), max_tokens=20) for n in range(3)]
    assert play(engine, request("a", SYSTEM, sampling=sampling), *company)["a"].tokens == cold


@pytest.mark.parametrize("kind", KINDS)
def test_full_unified_memory_evicts_then_parks_and_fails_nobody(engines, kind):
    engine = engines(f"successor-{kind}", kv_unified=True, cells=512, sequences=4)
    ask(engine, ordinary(200, 90))  # idle, in the way
    requests = [request(str(n), ordinary(120, 91 + n), max_tokens=60) for n in range(4)]
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].reason in ("length", "stop")
        assert answers[one.id].tokens[:2] == [
            models.get_successor(one.entries[-1]),
            models.get_successor(models.get_successor(one.entries[-1])),
        ]
        assert len(answers[one.id].tokens) == 60
    if kind != "recurrent":  # its state does not grow
        assert engine.counters.preempted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_more_jobs_than_streams_wait_and_end_where_their_stream_does(engines, kind):
    engine = engines(f"successor-{kind}", cells=512, sequences=2)
    requests = [request(str(n), ordinary(240, 91 + n), max_tokens=60) for n in range(5)]
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].reason == "length"
        assert len(answers[one.id].tokens) == 17  # sixteen cells, and the token after the last


@pytest.mark.parametrize("kind", KINDS)
def test_c9_a_decode_is_interrupted_and_the_record_stays_true(engines, kind):
    engine = engines(kind, cells=8192, sequences=2, batch=2048, ubatch=256)
    engine.submit(request("gone", ordinary(2000, 1)))
    original = engine.backend.context._library.symbols.llama_decode
    calls = []

    def cancel_inside(pointer, batch):
        calls.append(batch.n_tokens)
        if len(calls) == 1:
            engine.cancel("gone")  # as another thread would, while the decode runs
        return original(pointer, batch)

    engine.backend.context._library.symbols.llama_decode = cancel_inside
    try:
        answers: dict[str, Answer] = {}
        collect(answers, engine)
        collect(answers, engine)
    finally:
        engine.backend.context._library.symbols.llama_decode = original
    assert type(answers["gone"].end.error).__name__ == "Cancelled"
    assert engine.counters.interrupted == 1
    check(engine)
    after = ask(engine, ordinary(100, 2))
    agree(after, *plain_run(engines(kind), ordinary(100, 2)))
