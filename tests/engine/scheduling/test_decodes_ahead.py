"""On a GPU, the next decode starts before the events of the last one are made. It changes no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.request import Failed, Token
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import Cancelled, DecodeFailed
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.play import KINDS, Answer, ask, check, collect, fake, play, prompt, record_events, request

OFF = EngineSettings(speculation="off")


def build_engine(kind: str = "attention", settings: EngineSettings = OFF, *, is_ahead: bool = True) -> Engine:
    engine = fake(kind, settings, sequences=3, cells_per_sequence=200)
    engine.backend.capabilities = replace(engine.backend.capabilities, computes_ahead=is_ahead)
    return engine


def build_requests() -> list[Any]:
    options = {"max_tokens": 20, "ignore_eos": True}
    return [
        request("greedy", prompt(30, 1), **options),
        request("drawn", prompt(10, 2), sampling=Sampling(temperature=0.8, seed=3), **options),
        request("penalties", prompt(12, 3), sampling=Sampling(temperature=0, repeat_penalty=1.3), **options),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_that_start_ahead_change_no_token(kind: str) -> None:
    engine, other = build_engine(kind), build_engine(kind, is_ahead=False)
    answers, expected = play(engine, *build_requests()), play(other, *build_requests())
    assert {id: answer.tokens for id, answer in answers.items()} == {
        id: answer.tokens for id, answer in expected.items()
    }
    assert engine.counters.decodes_ahead >= 15
    assert other.counters.decodes_ahead == 0
    assert engine.counters.rows == other.counters.rows  # nothing is computed in vain
    check(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": (b"zzzz",)},
        {"logprobs": 1},
        {"logprob_tokens": (3,)},
        {"line_deadline": 1e9},
        {"min_indent": 4},
    ],
)
def test_a_completion_whose_text_or_logits_are_read_is_not_computed_ahead(options: dict[str, Any]) -> None:
    engine = build_engine()
    ask(engine, prompt(10), max_tokens=8, ignore_eos=True, **options)
    assert engine.counters.decodes_ahead == 0


def test_nothing_is_computed_ahead_while_drafts_may_follow_or_in_deterministic_mode() -> None:
    for settings in (EngineSettings(speculation=2), EngineSettings(deterministic=True)):
        engine = build_engine(settings=settings)
        ask(engine, prompt(10), max_tokens=8, ignore_eos=True)
        assert engine.counters.decodes_ahead == 0


def test_no_decode_starts_after_the_last_token() -> None:
    engine = build_engine()
    answer = ask(engine, prompt(10), max_tokens=5, ignore_eos=True)
    assert len(answer.tokens) == 5
    assert engine.counters.rows == 10 + 4
    answer = ask(engine, prompt(195, 2), max_tokens=None, ignore_eos=True)  # until its sequence is full
    assert len(answer.tokens) == 6
    check(engine)


def start(engine: Engine) -> dict[str, Answer]:
    """Start a completion, and step until a decode was started ahead."""
    answers: dict[str, Answer] = {}
    engine.submit(request("first", prompt(10, 1), max_tokens=20, ignore_eos=True))
    while not engine.counters.decodes_ahead:
        collect(answers, engine)
    return answers


def test_a_request_that_arrives_joins_the_decode_after_the_one_that_was_started() -> None:
    engine = build_engine()
    answers = start(engine)
    engine.submit(request("second", prompt(12, 2), max_tokens=4))
    collect(answers, engine)
    assert "second" not in answers
    collect(answers, engine)
    assert len(answers["second"].tokens) == 1


def test_a_cancelled_request_ends_with_the_next_step_and_leaves_no_cell() -> None:
    engine = build_engine()
    answers = start(engine)
    engine.cancel("first")
    events = engine.step()
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, Cancelled)
    assert sum(isinstance(event, Token) for event in events) <= 1
    check(engine)
    entries = [*prompt(10, 1), *answers["first"].tokens]
    assert ask(engine, [*entries, 5], max_tokens=2).cached >= len(entries) - 1


def test_settling_returns_the_events_of_the_decode_and_starts_no_other() -> None:
    engine = build_engine()
    answers = start(engine)
    count = len(answers["first"].tokens)
    record_events(answers, engine.settle())
    assert len(answers["first"].tokens) == count + 1
    check(engine)  # the KV cache has what the engine has recorded
    assert engine.settle() == []


def test_a_failure_of_a_decode_that_was_started_ahead_is_retried() -> None:
    engine, expected = build_engine(), ask(build_engine(), prompt(10, 1), max_tokens=20, ignore_eos=True)
    answers = start(engine)
    engine.backend.injected_errors.append(DecodeFailed(-3, "planted"))
    while engine.is_busy:
        collect(answers, engine)
    assert not engine.backend.injected_errors
    assert answers["first"].tokens == expected.tokens


def test_an_engine_closes_while_a_decode_was_started_ahead() -> None:
    engine = build_engine(settings=replace(OFF, ram_cache_bytes=10**9))
    start(engine)
    engine.close()
    assert engine.backend.closed


@pytest.mark.native
@pytest.mark.parametrize("name", ["attention", "window", "hybrid"])
def test_decodes_that_start_ahead_change_no_token_on_llama(name: str) -> None:
    answers: list[dict[str, list[int]]] = []
    for is_ahead in (False, True):
        context = ContextSettings(cells=3 * 256, sequences=3, batch=64, threads=1)
        engine = EngineSpec(path=models.get_path(name), context_settings=context, engine_settings=OFF)()
        engine.backend.capabilities = replace(engine.backend.capabilities, computes_ahead=is_ahead)
        played = play(engine, *build_requests())
        answers.append({id: answer.tokens for id, answer in played.items()})
        assert bool(engine.counters.decodes_ahead) is is_ahead
        check(engine)
        engine.close()
    assert answers[0] == answers[1]
