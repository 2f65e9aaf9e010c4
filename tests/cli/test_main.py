"""The commands as a person or a script runs them: real processes."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afterglow.testing import models

AFTERGLOW = [sys.executable, "-m", "afterglow.cli.main"]


def run(*arguments: str, question: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AFTERGLOW, *arguments],
        input=question,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_piped_question_is_answered_on_standard_output(smollm2: Path) -> None:
    done = run("chat", question="What is the capital of France? Answer in one word.\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.endswith("\n")


def test_an_empty_question_gets_no_answer() -> None:
    done = run("chat", str(models.get_path("attention")), question="  \n")
    assert (done.returncode, done.stdout) == (0, "")


def test_the_answer_s_length_is_limited() -> None:
    done = run("chat", str(models.get_path("successor-attention")), "--max-tokens", "5", question="hello")
    assert len(done.stdout.strip("\n")) == 5


def test_a_conversation_in_a_terminal_answers_and_ends_with_the_person() -> None:
    master, slave = pty.openpty()
    command = [*AFTERGLOW, "chat", str(models.get_path("successor-attention")), "--max-tokens", "8"]
    plain = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True, env=plain) as process:
        os.close(slave)
        seen = read_until(master, b"> ")
        os.write(master, b"hello\n")
        seen += read_until(master, b"> ")
        os.write(master, b"\x04")
        assert process.wait(30) == 0, seen
    os.close(master)
    assert b"abcdefgh" in seen


def read_until(descriptor: int, mark: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + 30
    while mark not in data and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 1)[0]:
            data += os.read(descriptor, 4096)
    return data


@pytest.mark.parametrize("command", [("chat", "no-such-model"), ("models", "path", "no-such-model")])
def test_an_error_is_one_line_that_says_what_to_do(command: tuple[str, ...]) -> None:
    done = run(*command, question="hello")
    assert done.returncode == 1
    assert done.stderr.startswith("afterglow: no model called 'no-such-model'")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_broken_file_is_one_line_too(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    done = run("chat", str(broken), question="hello")
    assert done.returncode == 1
    assert "cannot be loaded" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_wrong_usage_is_exit_code_two() -> None:
    assert run("chat", "--max-tokens", "0").returncode == 2
    assert run("frobnicate").returncode == 2


def test_the_version_and_the_help_are_there() -> None:
    assert run("--version").stdout.startswith("afterglow 0.")
    shown = run("--help").stdout
    for command in ("chat", "doctor", "models"):
        assert command in shown


def test_doctor_says_what_a_bug_report_needs_and_tests_it() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["self_test"] == {"decode": "ok", "trim": "ok", "state round trip": "ok", "MTP": "ok"}
    for fact in (
        "afterglow",
        "python",
        "llama.cpp",
        "library",
        "processor",
        "memory",
        "models in",
        "MTP",
        "device CPU",
    ):
        assert report["facts"][fact], fact
    assert "GPU" in report["facts"]


def test_doctor_prints_a_table_for_people() -> None:
    shown = run("doctor", COLUMNS="200").stdout
    assert "self-test MTP" in shown
    assert "b11549" in shown


def test_doctor_explains_a_library_that_does_not_open(tmp_path: Path) -> None:
    done = run("doctor", "--json", AFTERGLOW_LIBLLAMA=str(tmp_path / "missing.so"))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert "missing.so" in report["facts"]["library"]


def test_verbose_shows_llama_cpp_s_log() -> None:
    done = run("--verbose", "chat", str(models.get_path("attention")), "--max-tokens", "1", question="hello")
    assert "afterglow.llama.cpp" in done.stderr
