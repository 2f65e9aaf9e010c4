"""pytest plugin of a run of llama.cpp's server tests: no downloads, a free port, a file with the outcomes."""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import pytest

LOCAL_HOSTS = (None, "", "127.0.0.1", "::1", "[::1]", "localhost", "0.0.0.0")
FETCHED_BY_SERVER = ("-IMG_URL_", "-https://")  # parts of the names of tests
OUTCOMES_VARIABLE = "LLAMA_SUITE_OUTCOMES"  # path of the file to which each test appends a line of JSON


def refuse_download(*args: object, **options: object) -> NoReturn:
    """Fail a test that downloads a model."""
    raise RuntimeError("nothing is downloaded during the comparison")


def forbid_other_hosts() -> None:
    """Let the tests connect to this machine only: some of them fetch images."""
    resolve = socket.getaddrinfo

    def resolve_local(host: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in LOCAL_HOSTS:
            raise socket.gaierror(socket.EAI_FAIL, f"{name} is not this machine: nothing is fetched")
        return resolve(host, *args, **options)

    socket.getaddrinfo = resolve_local


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Prepare the modules of the suite before they are imported."""
    forbid_other_hosts()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ.setdefault("PORT", str(probe.getsockname()[1]))
    wget = types.ModuleType("wget")
    wget.download = refuse_download  # type: ignore[attr-defined]
    sys.modules["wget"] = wget
    sys.path.insert(0, os.getcwd())
    import utils  # type: ignore[import-not-found]  # of the suite

    utils.ServerPreset.load_all = staticmethod(lambda: None)  # its models are replaced, so there is nothing to fetch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests in which the server itself would fetch an image from another machine."""
    items[:] = [item for item in items if not any(mark in item.nodeid for mark in FETCHED_BY_SERVER)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome of a test as soon as it is known, so that a run can be ended at any time."""
    if report.when != "call" and report.passed:
        return
    reason = "" if report.passed else (str(report.longrepr).strip().splitlines() or [""])[-1]
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason[:300]}
    with Path(os.environ[OUTCOMES_VARIABLE]).open("a", encoding="utf-8") as outcomes:
        outcomes.write(json.dumps(line) + "\n")
