"""OpenMP threads spin briefly, unless the user chose a wait policy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from afterglow.llama.library.openmp import SPIN_COUNT, limit_spinning

OPEN_LIBRARY = (
    "import os; from afterglow.llama.library.loader import get_library; get_library(); print(dict(os.environ))"
)


def open_library(**variables: str) -> subprocess.CompletedProcess[str]:
    """Open llama.cpp in a process of its own; libgomp prints its settings to stderr."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose", **variables}
    return subprocess.run(
        [sys.executable, "-c", OPEN_LIBRARY], capture_output=True, text=True, check=True, env=environment, timeout=120
    )


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is the OpenMP runtime of the Linux build")
def test_the_library_is_opened_with_a_short_spin() -> None:
    done = open_library()
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr
    assert "GOMP_SPINCOUNT" not in done.stdout, "the environment of the process is unchanged"


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is the OpenMP runtime of the Linux build")
def test_a_spin_count_of_the_user_is_kept() -> None:
    assert "GOMP_SPINCOUNT = '77'" in open_library(GOMP_SPINCOUNT="77").stderr


def test_a_wait_policy_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with limit_spinning():
        assert "GOMP_SPINCOUNT" not in os.environ


def test_the_environment_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def fail_to_open() -> None:
        with limit_spinning():
            assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
            raise OSError("no such library")

    with pytest.raises(OSError, match="no such library"):
        fail_to_open()
    assert "GOMP_SPINCOUNT" not in os.environ
