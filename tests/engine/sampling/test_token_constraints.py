"""Minimum length of a completion: end and stop tokens are forbidden until then."""

from __future__ import annotations

from afterglow.engine.engine import Engine
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support.play import ask, prompt


def test_a_completion_has_at_least_min_tokens():
    plain = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=30).tokens
    stop = plain[3]
    options = {"stop_tokens": frozenset({stop}), "max_tokens": 30}
    assert len(ask(Engine(FakeBackend()), prompt(9), **options).tokens) <= 4
    longer = ask(Engine(FakeBackend()), prompt(9), min_tokens=12, **options).tokens
    assert len(longer) > 12
    assert longer[:3] == plain[:3]
    assert stop not in longer[:12]


def test_a_grammar_that_ends_takes_precedence_over_min_tokens():
    constraint = GrammarConstraint(grammar='start: "mn"')
    answer = ask(Engine(FakeBackend()), [5], constraint=constraint, min_tokens=10, sampling=Sampling(temperature=0))
    assert len(answer.tokens) <= 3
