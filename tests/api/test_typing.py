"""Types of the public API: mypy accepts right calls and rejects each wrong one, with the settings of the project."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import afterglow

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "data" / "typing"


@pytest.mark.slow
def test_mypy_accepts_right_calls_and_rejects_each_wrong_one() -> None:
    files = [CALLS / "right_calls.py", CALLS / "wrong_calls.py"]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *map(str, files)]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout
    found = {
        (Path(path).name, int(line))
        for path, line in re.findall(r"^(\S+_calls\.py):(\d+): error", output, re.MULTILINE)
    }
    expected = {
        ("wrong_calls.py", number)
        for number, line in enumerate(files[1].read_text().splitlines(), 1)
        if line.endswith("# error")
    }
    assert expected
    assert found == expected, output


@pytest.mark.slow
def test_mypy_accepts_the_python_of_the_readme(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(tmp_path / "readme.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_public_signature_takes_untyped_keywords() -> None:
    values = [getattr(afterglow, name) for name in afterglow.__all__ if name != "__version__"]
    functions = [value for value in values if inspect.isfunction(value)]
    for value in values:
        if inspect.isclass(value):
            functions += [member for name, member in vars(value).items() if inspect.isfunction(member)]
    untyped = [
        function.__qualname__
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD and "Unpack[" not in str(parameter.annotation)
    ]
    assert len(functions) > 100
    assert not untyped
