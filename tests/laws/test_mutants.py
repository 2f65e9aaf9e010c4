"""Mutation test of the laws: each mutant makes a law fail, and no law fails without a mutant."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from unittest import mock

import pytest

from afterglow.engine.engine import Engine
from laws import draft_mutants, media_mutants, mutants
from laws.mutants import MUTANTS, Mutant

pytestmark = [pytest.mark.full, pytest.mark.native]

MAX_SCENARIO_STEPS = 5000


def iter_scenarios(law: Callable[..., None]) -> Iterator[dict[str, object]]:
    """Yield every combination of the arguments with which pytest parametrizes the law."""
    marks = [*getattr(law, "pytestmark", []), *to_list(getattr(sys.modules[law.__module__], "pytestmark", []))]
    choices = []
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args
            names = [names] if isinstance(names, str) else names
            choices.append([dict(zip(names, to_list(value, names), strict=True)) for value in values])
    for chosen in itertools.product(*choices):
        yield {name: value for part in chosen for name, value in part.items()}


def to_list(value: object, names: list[str] | None = None) -> list:
    several = isinstance(value, list | tuple) if names is None else len(names) > 1
    return list(value) if several else [value]


def find_failure(law: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> BaseException | None:
    """Return the error of the first scenario in which the law fails."""
    for arguments in iter_scenarios(law):
        monkeypatch.setattr(Engine, "step", limit_steps(ORIGINAL_STEP))
        try:
            law(**arguments)
        except (Exception, pytest.fail.Exception) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            if last.filename in (mutants.__file__, draft_mutants.__file__, media_mutants.__file__, mock.__file__):
                raise RuntimeError("the mutant itself fails, not a law") from error
            return error
    return None


ORIGINAL_STEP = Engine.step


def limit_steps(step: Callable) -> Callable:
    """Return a step that fails after `MAX_SCENARIO_STEPS` calls."""
    remaining = iter(range(MAX_SCENARIO_STEPS))

    def limited(self: Engine) -> list:
        assert next(remaining, None) is not None, "the requests do not end"
        return step(self)

    return limited


@cache
def holds(law: Callable[..., None]) -> bool:
    with pytest.MonkeyPatch.context() as monkeypatch:
        error = find_failure(law, monkeypatch)
    assert error is None, f"{law.__name__} fails without a mutant: {error!r}"
    return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_law_fails_for_each_mutant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(holds(law) for law in mutant.laws)
    mutant.plant(monkeypatch.setattr)
    errors = {law.__name__: find_failure(law, monkeypatch) for law in mutant.laws}
    assert any(errors.values()), f"no law fails: {mutant.name}"


def test_every_mutant_has_a_law_and_a_unique_name() -> None:
    assert all(mutant.laws for mutant in MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 16
