"""Types of the public API: mypy accepts right calls and rejects each wrong one, with the settings of the project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
