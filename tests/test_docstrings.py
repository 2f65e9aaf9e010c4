"""The examples in docstrings are true, wherever they need nothing but their own module."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import io
import pkgutil
from collections.abc import Iterator

import pytest

import afterglow

CHILDREN = ("_child", ".child", ".selftest")  # programs, not modules to import


def known_names(test: doctest.DocTest) -> set[str]:
    """Everything that an example may name: of its module, of Python, and what it makes itself."""
    nodes = [node for example in test.examples for node in ast.walk(ast.parse(example.source))]
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return (made | set(test.globs) | set(vars(builtins))) - {"Path"}  # of a file that only the reader has


def used_names(test: doctest.DocTest) -> set[str]:
    nodes = [node for example in test.examples for node in ast.walk(ast.parse(example.source))]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def examples() -> Iterator[doctest.DocTest]:
    for module in pkgutil.walk_packages(afterglow.__path__, "afterglow."):
        if not module.name.endswith(CHILDREN):
            for test in doctest.DocTestFinder().find(importlib.import_module(module.name), module.name):
                needed = used_names(test) - known_names(test)  # such as a model: those only show how
                if test.examples and not needed:
                    yield test


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_an_example_is_true(example: doctest.DocTest) -> None:
    failures = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(example, out=failures.write)
    assert not failures.getvalue(), failures.getvalue()
