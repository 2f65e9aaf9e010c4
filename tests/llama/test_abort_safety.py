"""Every argument that would abort the process raises a typed error. Each case runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import abort_cases
from support.abort_cases import BINDING_CASES, NATIVE_CASES

pytestmark = pytest.mark.native


def run_case(form: str, case: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, abort_cases.__file__, form, case]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


@pytest.mark.parametrize("case", BINDING_CASES)
def test_the_binding_raises_a_typed_error(case: str) -> None:
    result = run_case("binding", case)
    assert (result.returncode, result.stdout.strip()) == (0, BINDING_CASES[case][1]), result.stderr


@pytest.mark.parametrize("case", NATIVE_CASES)
def test_the_native_call_aborts_the_process(case: str) -> None:
    """Shows that the check of the binding is necessary."""
    result = run_case("native", case)
    assert result.returncode < 0, f"it survived: {result.stdout}{result.stderr}"
