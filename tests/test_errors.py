"""Errors have their values as attributes, and survive pickling."""

from __future__ import annotations

import inspect
import pickle

import pytest

from afterglow import errors
from afterglow.errors import AfterglowError, LoadError, OutOfMemory, PromptTooLong, RequestError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AfterglowError)]


def build_example(kind: type[AfterglowError]) -> AfterglowError:
    """Return an instance with an argument of the right type for each parameter."""
    values = {"int": 7, "str": "seven", "int | None": 7}
    parameters = inspect.signature(kind.__init__).parameters.values() if "__init__" in vars(kind) else ()
    return kind(*(values[parameter.annotation] for parameter in parameters if parameter.name != "self"))


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling(kind: type[AfterglowError]) -> None:
    error = build_example(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_listed_in_the_module_docstring(kind: type[AfterglowError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_values_are_attributes_and_in_the_text() -> None:
    error = PromptTooLong(cells=41_200, limit=32_768)
    assert (error.cells, error.limit) == (41_200, 32_768)
    assert "41,200" in str(error)
    assert "32,768" in str(error)


def test_error_classes_separate_requests_from_loading() -> None:
    assert issubclass(PromptTooLong, RequestError)
    assert issubclass(OutOfMemory, LoadError)
