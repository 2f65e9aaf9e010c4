"""The logic of the web page that needs no browser, tested by node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.test.js"))


def test_the_logic_of_the_page_passes_its_node_tests() -> None:
    node = shutil.which("node")
    assert node is not None, "node runs the tests of the web page: install it, e.g. `apt-get install nodejs`"
    result = subprocess.run(
        [node, "--test", *map(str, FILES)], capture_output=True, text=True, timeout=240, check=False, cwd=FOLDER
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"# pass {count_tests()}" in result.stdout


def count_tests() -> int:
    return sum(line.startswith("test(") for file in FILES for line in file.read_text().splitlines())
