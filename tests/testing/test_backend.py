"""`FakeBackend` has the methods of the backend protocol, with the same parameters and the same optional results."""

from __future__ import annotations

import inspect
from types import NoneType
from typing import get_args, get_type_hints

import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.types.backend import Backend
from afterglow.testing import FakeBackend

METHODS = [name for name, member in vars(Backend).items() if inspect.isfunction(member) and not name.startswith("_")]


def is_optional(method: object) -> bool:
    result = get_type_hints(method).get("return", NoneType)
    return NoneType in (result, *get_args(result))


@pytest.mark.parametrize("backend", [FakeBackend, LlamaBackend])
@pytest.mark.parametrize("name", METHODS)
def test_a_backend_method_has_the_signature_of_the_protocol(backend, name):
    declared, implemented = getattr(Backend, name), getattr(backend, name)
    assert list(inspect.signature(implemented).parameters) == list(inspect.signature(declared).parameters)
    assert is_optional(implemented) == is_optional(declared)
