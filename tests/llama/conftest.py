"""Fixtures for tests of the binding: tiny models and small contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models

OpenModel = Callable[..., LlamaModel]
OpenContext = Callable[..., LlamaContext]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_model(stack: ExitStack) -> OpenModel:
    """Return a function that loads a tiny model by name; closed at the end of the test."""

    def load(name: str, **settings: object) -> LlamaModel:
        model = LlamaModel.load(models.get_path(name), ModelSettings(**settings), trust=True)  # type: ignore[arg-type]
        return stack.enter_context(model)

    return load


@pytest.fixture
def open_context(open_model: OpenModel, stack: ExitStack) -> OpenContext:
    """Return a function that creates a small single-threaded context; closed at the end of the test."""

    def make(name: str | LlamaModel, **settings: object) -> LlamaContext:
        model = open_model(name) if isinstance(name, str) else name
        defaults = {"cells": 2048, "sequences": 2, "batch": 256, "outputs": 32, "threads": 1}
        return stack.enter_context(LlamaContext(model, ContextSettings(**{**defaults, **settings})))  # type: ignore[arg-type]

    return make
