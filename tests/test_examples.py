"""The example scripts and the docstring examples of the public API run. Code of pages: test_docs.py."""

from __future__ import annotations

import asyncio
import doctest
import io
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import afterglow
from afterglow import agents

ROOT = Path(__file__).parents[1]


@pytest.mark.model
@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_an_example_script_runs(script: Path, smollm2: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


PUBLIC = {name: getattr(afterglow, name) for name in afterglow.__all__ if name != "__version__"}
PUBLIC |= {name: getattr(agents, name) for name in agents.__all__ if name != "AgentEvent"}  # a union of types


@pytest.mark.model
@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_examples_of_a_public_name_are_true(
    name: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
    value = PUBLIC[name]
    assert ">>>" in (value.__doc__ or ""), f"{name} has no example"
    tests = [test for test in doctest.DocTestFinder(recurse=True).find(value, name) if test.examples]
    needs_model = any("model" in example.source for test in tests for example in test.examples)
    with afterglow.load(smollm2, context=512) if needs_model else nullcontext() as model:
        for test in tests:
            test.globs.update({**PUBLIC, "afterglow": afterglow, "model": model, "asyncio": asyncio})
            failures = io.StringIO()
            doctest.DocTestRunner(verbose=False).run(test, out=failures.write, clear_globs=False)
            assert not failures.getvalue(), failures.getvalue()


def test_the_readme_lists_every_folder_of_the_package() -> None:
    text = (ROOT / "README.md").read_text()
    for folder in (ROOT / "src" / "afterglow").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"{folder.name}/" in text, folder.name
