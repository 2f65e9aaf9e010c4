"""Every argument that would end the process is a typed error instead. Each case runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.abort_cases import OURS, RAW

CASES = Path(__file__).with_name("abort_cases.py")


def run(form: str, case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, CASES, form, case], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("case", OURS)
def test_it_is_a_typed_error_and_the_process_lives(case: str) -> None:
    done = run("ours", case)
    assert (done.returncode, done.stdout.strip()) == (0, OURS[case][1]), done.stderr


@pytest.mark.parametrize("case", RAW)
def test_the_raw_call_really_ends_the_process(case: str) -> None:
    """So that the guard is known to guard something."""
    done = run("raw", case)
    assert done.returncode < 0, f"it survived: {done.stdout}{done.stderr}"
