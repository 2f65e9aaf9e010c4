"""Contract numbers in test names have a row in docs/contracts.md, and every row has a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_contract_has_a_test_and_every_number_in_a_test_name_is_a_contract() -> None:
    documented = set(re.findall(r"^\| C(\d+) \|", (ROOT / "docs" / "contracts.md").read_text(), re.MULTILINE))
    used = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        used.update(re.findall(r"def test_c(\d+)_", path.read_text()))
    assert used <= documented, f"no row for C{', C'.join(sorted(used - documented))}"
    assert documented <= used, f"no test for C{', C'.join(sorted(documented - used))}"
