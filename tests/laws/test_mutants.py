"""A law is trusted after it has been seen to fail: every planted bug breaks one, and no law fails without."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from unittest import mock

import pytest

from afterglow.engine.engine import Engine
from laws import draft_mutants as guessing_mutants
from laws import media_mutants as picture_mutants
from laws import mutants
from laws.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.full

PATIENCE = 5000  # steps of one scenario


def scenarios(law: Callable[..., None]) -> Iterator[dict[str, object]]:
    """Every set of arguments that the law's own parameters make."""
    marks = [*getattr(law, "pytestmark", []), *as_list(getattr(sys.modules[law.__module__], "pytestmark", []))]
    choices = []
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args
            names = [names] if isinstance(names, str) else names
            choices.append([dict(zip(names, as_list(value, names), strict=True)) for value in values])
    for chosen in itertools.product(*choices):
        yield {name: value for part in chosen for name, value in part.items()}


def as_list(value: object, names: list[str] | None = None) -> list:
    several = isinstance(value, list | tuple) if names is None else len(names) > 1
    return list(value) if several else [value]


def broken(law: Callable[..., None], patience: pytest.MonkeyPatch) -> BaseException | None:
    """What the first scenario that does not hold says."""
    for arguments in scenarios(law):
        patience.setattr(Engine, "step", impatient(ORIGINAL))
        try:
            law(**arguments)
        except (Exception, pytest.fail.Exception) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            if last.filename in (mutants.__file__, guessing_mutants.__file__, picture_mutants.__file__, mock.__file__):
                raise RuntimeError("the mutant itself fails, and no law") from error
            return error
    return None


ORIGINAL = Engine.step


def impatient(step: Callable) -> Callable:
    left = iter(range(PATIENCE))

    def counted(self: Engine) -> list:
        assert next(left, None) is not None, "it does not end"
        return step(self)

    return counted


@cache
def holds(law: Callable[..., None]) -> bool:
    with pytest.MonkeyPatch.context() as patience:
        error = broken(law, patience)
    assert error is None, f"{law.__name__} does not hold without any bug: {error!r}"
    return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_breaks_a_law(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(holds(law) for law in mutant.laws)
    mutant.plant(monkeypatch.setattr)
    errors = {law.__name__: broken(law, monkeypatch) for law in mutant.laws}
    assert any(errors.values()), f"no law noticed: {mutant.name}"


def test_there_is_a_law_for_every_bug_and_no_bug_twice() -> None:
    assert all(mutant.laws for mutant in MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 16
