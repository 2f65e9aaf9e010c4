"""Docstring examples are true. Examples of the public API run on SmolLM2 instead (test_examples.py)."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import io
import pkgutil
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow import agents
from afterglow.engine.engine import Engine
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.types.request import Request
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import FakeBackend, models
from support.media_prompts import noise_image

PROGRAMS = ("_child", ".child_main", ".selftest")  # modules that are programs
# Public names; test_examples.py runs their examples.
PUBLIC = [getattr(afterglow, name) for name in afterglow.__all__ if name != "__version__"]
PUBLIC += [getattr(agents, name) for name in agents.__all__ if name != "AgentEvent"]  # a union of types
PUBLIC_NAMES = {f"{value.__module__}.{value.__qualname__}" for value in PUBLIC}
# Examples that show an order of calls inside a larger loop.
SKETCHES = {"afterglow.engine.speculation.mtp.session.MtpSession"}
# Files that examples name as if they were the reader's.
FILES = {"model.gguf": "attention", "style.gguf": "adapter", "mmproj.gguf": "projector-llava"}
PROMPT = list(range(1, 13))


class ExampleNames:
    """Values of the names that examples use without defining them: small real objects."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    @functools.cached_property
    def path(self) -> Path:
        return models.get_path("attention")

    @functools.cached_property
    def model(self) -> LlamaModel:
        return self._stack.enter_context(LlamaModel.load(self.path))

    @functools.cached_property
    def context(self) -> LlamaContext:
        """A context after the decode of a prompt."""
        settings = ContextSettings(cells=512, sequences=2)
        context = self._stack.enter_context(LlamaContext(self.model, settings))
        context.batch.add(PROMPT, position=0, sequence=0, outputs=1)
        context.decode()
        return context

    @property
    def batch(self) -> Any:
        return self.context.batch

    @property
    def vocabulary(self) -> Any:
        return self.model.vocabulary

    @functools.cached_property
    def backend(self) -> FakeBackend:
        return FakeBackend()

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.backend)

    @functools.cached_property
    def engine_thread(self) -> EngineThread:
        return self._stack.enter_context(EngineThread(lambda: self.engine))

    request = Request(id="a", entries=PROMPT, max_tokens=1)
    tokens = PROMPT
    row = len(PROMPT) - 1
    image = noise_image(1)
    template = "{% for message in messages %}<|im_start|>{{ message.content }}<think></think>{% endfor %}"


NATIVE_NAMES = {"path", "model", "context", "batch", "vocabulary", "Path", "models"}


def get_used_names(test: doctest.DocTest) -> set[str]:
    nodes = [node for example in test.examples for node in ast.walk(ast.parse(example.source))]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def find_examples() -> Iterator[Any]:
    for module in pkgutil.walk_packages(afterglow.__path__, "afterglow."):
        if module.name == "afterglow.cluster.router":  # needs Ray
            continue
        if module.name.endswith(PROGRAMS):
            continue
        imported = importlib.import_module(module.name)
        if ">>>" not in inspect.getsource(imported):
            continue
        for test in doctest.DocTestFinder().find(imported, module.name):
            is_public = test.name in PUBLIC_NAMES or test.name.rpartition(".")[0] in PUBLIC_NAMES
            if test.examples and not is_public and test.name not in SKETCHES:
                is_native = NATIVE_NAMES & get_used_names(test)
                yield pytest.param(test, id=test.name, marks=pytest.mark.native if is_native else ())


@pytest.mark.parametrize("example", list(find_examples()))
def test_a_docstring_example_is_true(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that uses a name which is neither defined nor in `ExampleNames` fails."""
    used = get_used_names(example)
    failures = io.StringIO()
    monkeypatch.chdir(tmp_path)  # examples may write files
    if "Path" in used:
        for name, model in FILES.items():
            shutil.copy(models.get_path(model), name)
    with ExitStack() as stack:
        names = ExampleNames(stack)
        for name in used - set(example.globs):
            if hasattr(ExampleNames, name):
                example.globs[name] = getattr(names, name)
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=failures.write)
    assert not failures.getvalue(), failures.getvalue()
