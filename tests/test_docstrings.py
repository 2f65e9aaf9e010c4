"""Docstring examples that need nothing but their own module are true."""

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

PROGRAMS = ("_child", ".child_main", ".selftest")  # modules that are programs


def get_known_names(test: doctest.DocTest) -> set[str]:
    """Return the names that an example can use: of its module, of Python, and those it assigns."""
    nodes = [node for example in test.examples for node in ast.walk(ast.parse(example.source))]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return (assigned | set(test.globs) | set(vars(builtins))) - {"Path"}  # a path stands for a file of the reader


def get_used_names(test: doctest.DocTest) -> set[str]:
    nodes = [node for example in test.examples for node in ast.walk(ast.parse(example.source))]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def find_examples() -> Iterator[doctest.DocTest]:
    """Yield the examples that can run. Others, e.g. those that use a `model`, only illustrate."""
    for module in pkgutil.walk_packages(afterglow.__path__, "afterglow."):
        if not module.name.endswith(PROGRAMS):
            for test in doctest.DocTestFinder().find(importlib.import_module(module.name), module.name):
                if test.examples and not get_used_names(test) - get_known_names(test):
                    yield test


@pytest.mark.parametrize("example", list(find_examples()), ids=lambda example: example.name)
def test_a_docstring_example_is_true(example: doctest.DocTest) -> None:
    failures = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(example, out=failures.write)
    assert not failures.getvalue(), failures.getvalue()
