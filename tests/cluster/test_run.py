"""`afterglow serve --ray` as a command: it starts a cluster or joins the one of this machine, and leaves no process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from afterglow.testing import models
from support.server_process import COMMAND, list_descendants, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
RAY = Path(sys.executable).parent / "ray"


def find_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def start(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the end of the block, then end it with all processes that it started."""
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    try:
        yield process
    finally:
        left = list_descendants(process.pid)
        process.terminate()
        process.communicate(timeout=120)
        for child in psutil.wait_procs(left, timeout=30)[1]:
            child.kill()


def serve(*arguments: str, port: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    path = str(models.get_path("successor-attention"))
    sizes = ["--context", "512", "--sequences", "2", "--threads", "1", "--replicas", "2"]
    return start([*COMMAND, f"tiny={path}", *sizes, "--port", str(port), *arguments])


def wait_for_answer(process: subprocess.Popen[str], port: int) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if f"at http://127.0.0.1:{port}" in line:
            break
    assert process.poll() is None, lines
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200


def test_without_an_address_a_cluster_is_started_and_ends_with_the_command() -> None:
    port = find_port()
    with serve("--ray", port=port) as process:
        wait_for_answer(process, port)
        children = list_descendants(process.pid)
        assert len(children) > 4
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
        assert not psutil.wait_procs(children, timeout=60)[1], "an orphan process is left"


def test_without_an_address_the_cluster_of_this_machine_is_joined_and_goes_on_afterwards() -> None:
    port, head = find_port(), find_port()
    cluster = [str(RAY), "start", "--head", "--block", "--port", str(head), "--num-cpus", "4", "--disable-usage-stats"]
    with start([*cluster, "--include-dashboard", "false"]) as ray:
        assert wait_until(120, lambda: len(list_descendants(ray.pid)) >= 4)
        for arguments in (("--ray",), ("--ray", f"127.0.0.1:{head}")):
            with serve(*arguments, port=port) as process:
                wait_for_answer(process, port)
                assert not any("ServeReplica" in " ".join(one.cmdline()) for one in list_descendants(process.pid))
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=120) == 0
            assert ray.poll() is None
            replicas = [one for one in list_descendants(ray.pid) if "ServeReplica" in " ".join(one.cmdline())]
            assert not psutil.wait_procs(replicas, timeout=60)[1], "a replica is left"


def test_an_address_without_a_cluster_is_an_error() -> None:
    with serve("--ray", f"127.0.0.1:{find_port()}", port=find_port()) as process:
        _, text = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "there is no Ray cluster" in text
