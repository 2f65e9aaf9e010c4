"""Imports point down, are absolute and stand at the top of the file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "afterglow"
LAYERS = {
    "closing": 0, "errors": 0, "version": 0, "paths": 0,
    "media": 1,
    "llama": 1, "registry": 1, "tiny": 1,
    "engine": 2,
    "chat": 3, "completion": 3, "testing": 3,
    "answers": 4, "answering": 4, "prompting": 4, "conversation": 4, "model": 4, "loading": 4, "serving": 4,
    "server": 5,
    "cli": 6,
}  # fmt: skip
APART = ({"registry", "llama"}, {"tiny", "llama"}, {"tiny", "registry"}, {"media", "registry"}, {"media", "tiny"})
# Optional packages are imported where they are used, so that afterglow works without them.
OPTIONAL = {"huggingface_hub"}

FILES = sorted(SOURCE.rglob("*.py"))


def unit(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_units(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "afterglow":
                names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("afterglow.")}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    own = unit(path)
    if own == "__init__":
        return  # the public names come from everywhere
    for other in imported_units(ast.parse(path.read_text())) - {own}:
        assert LAYERS[other] <= LAYERS[own], f"{own} (layer {LAYERS[own]}) imports {other} (layer {LAYERS[other]})"
        assert {own, other} not in APART, f"{own} and {other} stand side by side"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_are_absolute_and_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body:
            root = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert root.split(".")[0] in OPTIONAL, f"line {node.lineno}: an import inside a block"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, "no module docstring"
