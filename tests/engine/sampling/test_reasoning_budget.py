"""The reasoning budget: reasoning is closed when its tokens are used up."""

from __future__ import annotations

import re

from afterglow.engine.engine import Engine
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.testing import FakeBackend
from support.play import ask, prompt


def decode_text(tokens: list[int]) -> str:
    backend = FakeBackend()
    return b"".join(backend.token_to_piece(token) for token in tokens if token).decode()


def budget(max_tokens: int, *, starts_open: bool = True) -> ReasoningBudget:
    return ReasoningBudget(
        max_tokens=max_tokens,
        start_marker=b"ab",
        end_marker=b"yz",
        closing_tokens=(24, 25, 12),
        starts_open=starts_open,
    )


def test_reasoning_is_closed_when_its_budget_is_used_up():
    plain = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=30)
    assert "yz" not in decode_text(plain.tokens)[:8]
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=30, reasoning_budget=budget(5))
    assert answer.tokens[:5] == plain.tokens[:5]
    assert decode_text(answer.tokens)[5:8] == "yzm"
    assert len(answer.tokens) == 30


def test_reasoning_that_ends_within_its_budget_is_not_changed():
    constraint = GrammarConstraint(grammar='start: "mnyz" "ooooo"')
    answer = ask(Engine(FakeBackend()), [5], constraint=constraint, reasoning_budget=budget(4))
    assert decode_text(answer.tokens) == "mnyzooooo"


def test_reasoning_that_the_model_opens_is_counted_from_its_start_marker():
    closed = budget(3, starts_open=False)
    optional = GrammarConstraint(grammar='start: "ooooo" ("ab" /m*/ "yzm")? "n"')
    answer = ask(Engine(FakeBackend()), [5], constraint=optional, reasoning_budget=closed, max_tokens=60)
    assert re.fullmatch("ooooo(abm{0,3}yzm)?n", decode_text(answer.tokens))
    required = GrammarConstraint(grammar='start: "ab" /m+/ "yzm" "n"')
    answer = ask(Engine(FakeBackend()), [5], constraint=required, reasoning_budget=closed)
    assert decode_text(answer.tokens) == "abmmmyzmn"


def test_a_budget_of_zero_closes_reasoning_at_once():
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=10, reasoning_budget=budget(0))
    assert decode_text(answer.tokens).startswith("yzm")
