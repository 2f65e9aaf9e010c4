"""What every test shares: caches of its own, and the rule that a skipped test is a failure unless it is explained."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from afterglow import registry
from afterglow.llama.handle import Handle, list_open_handles
from support.browser import CHROMIUM, MISSING, is_browser_required

# A run in the background inherits that interrupts are ignored, and would hand that on to every program it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No time limit per example: on a busy machine any of them can take long.
hypothesis.settings.register_profile("afterglow", deadline=None)
hypothesis.settings.load_profile("afterglow")

# Tests that may be skipped, each with the reason why that is right.
ALLOWED_SKIPS = {
    "tests/registry/test_wheel.py::test_a_full_disk_leaves_no_files": "needs a mount",
    "tests/llama/library/test_loader.py::test_the_declarations_generator_reads_a_header": "needs a C preprocessor",
    "tests/models/test_trained_pair.py::test_a_trained_vision_model_names_colors_cold_and_warm": (
        "needs files beside the repository; the pair in testing/models/colors.py is asked the same in every run"
    ),
}


@pytest.fixture(scope="session", autouse=True)
def caches_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tiny models and probe results go to a temporary folder; the real model stays where `make chat` keeps it."""
    before = dict(os.environ)
    os.environ["AFTERGLOW_MODELS"] = str(registry.models_directory())
    os.environ["AFTERGLOW_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["AFTERGLOW_DATA"] = str(tmp_path_factory.mktemp("data"))
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"  # a test finds in memory what it put there itself
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def list_own_handles() -> Iterator[Callable[[], list[Handle]]]:
    """List the open native handles of this test, without those of shared fixtures. Every test closes its handles."""
    before = set(list_open_handles())

    def list_own() -> list[Handle]:
        return [handle for handle in list_open_handles() if handle not in before]

    yield list_own
    left = list_own()
    for handle in left:
        handle.close()
    assert not left, f"left open: {left}"


@pytest.fixture(scope="session")
def smollm2(caches_of_our_own: None) -> Path:
    """The real chat model, fetched once."""
    return registry.pull("smollm2")


FILE_OF_NATIVE_TESTS = re.compile(r"^pytestmark = .*mark\.(native|model|slow|full|cluster)\b", re.MULTILINE)
LONG_FILES = (
    "tests/models/",
    "tests/laws/test_state_machine",
    "tests/llama/gguf/test_probe.py",
    "tests/cli/test_repl.py",
)
LEFT_OUT = ("full", "clients", "frameworks", "cluster")  # markers of tests that run only if they are asked for
SECONDS_BY_MARKER = {"full": 60.0, "model": 5.0, "native": 0.4, "slow": 0.2}  # of a test, roughly


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of a parallel run its own cores, so that their engines do not share cores."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]
        os.sched_setaffinity(0, own or cores)


@pytest.hookimpl(optionalhook=True)  # the environment with Ray has no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the longest file between the processes."""
    from support.file_scheduling import FileScheduling

    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of native tests in `make unit`: that takes longer than the unit tests of many files."""
    if "not (native or" not in config.getoption("-m") or collection_path.suffix != ".py":
        return None
    return True if FILE_OF_NATIVE_TESTS.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long variants, and begin with the files that take longest, so that all processes end together."""
    seconds: Counter[Path] = Counter()
    for item in items:
        seconds[item.path] += next((s for marker, s in SECONDS_BY_MARKER.items() if item.get_closest_marker(marker)), 0)
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG_FILES), -seconds[item.path]))
    if CHROMIUM is None and not is_browser_required():
        leave_out(config, items, "browser")
    if config.getoption("-m"):
        return
    for marker in LEFT_OUT:
        leave_out(config, items, marker)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect without garbage collection, and exclude modules and collected tests from it afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def leave_out(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    """Deselect the tests with a marker."""
    left_out = [item for item in items if item.get_closest_marker(marker)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> str | None:
    """Say at the start if there is no browser."""
    return MISSING if CHROMIUM is None else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = {report.nodeid for report in reporter.stats.get("skipped", [])} if reporter else set()
    unexplained = sorted(test for test in skipped if test.split("[")[0] not in ALLOWED_SKIPS)
    if unexplained and exitstatus == 0:
        reporter.write_line(f"skipped without being on the list in tests/conftest.py: {unexplained}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
