"""Commands of a shell: chat with piped input, errors, usage, doctor and logging."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from afterglow.testing import models
from support.commands import AFTERGLOW, run_command, run_in_process

pytestmark = pytest.mark.native


@pytest.mark.model
def test_chat_prints_the_response_to_piped_input(smollm2: Path) -> None:
    result = run_command("chat", stdin="What is the capital of France? Answer in one word.\n")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert result.stdout.endswith("\n")


def test_chat_prints_nothing_for_empty_input() -> None:
    result = run_in_process("chat", str(models.get_path("attention")), stdin="  \n")
    assert (result.returncode, result.stdout) == (0, "")


def test_max_tokens_limits_the_response() -> None:
    result = run_in_process("chat", str(models.get_path("successor-attention")), "--max-tokens", "5", stdin="hello")
    assert len(result.stdout.strip("\n")) == 5


def test_chat_in_a_dumb_terminal_responds_and_exits_with_ctrl_d() -> None:
    master, slave = pty.openpty()
    command = [*AFTERGLOW, "chat", str(models.get_path("successor-attention")), "--max-tokens", "8"]
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True, env=environment) as process:
        os.close(slave)
        output = read_until(master, b"> ")
        os.write(master, b"hello\n")
        output += read_until(master, b"> ")
        os.write(master, b"\x04")
        assert process.wait(120) == 0, output
    os.close(master)
    assert b"abcdefgh" in output


def read_until(descriptor: int, expected: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + 120
    while expected not in data and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 1)[0]:
            data += os.read(descriptor, 4096)
    return data


@pytest.mark.parametrize("command", [("chat", "no-such-model"), ("models", "path", "no-such-model")])
def test_an_unknown_model_is_one_line_on_standard_error(command: tuple[str, ...]) -> None:
    result = run_command(*command, stdin="hello")
    assert result.returncode == 1
    assert result.stderr.startswith("afterglow: no model called 'no-such-model'")
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_damaged_model_file_is_one_line_on_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    result = run_command("chat", str(path), stdin="hello")
    assert result.returncode == 1
    assert "cannot be loaded" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_full_disk_is_one_line_on_standard_error() -> None:
    command = [*AFTERGLOW, "run", "abc", "--raw", "--model", str(models.get_path("successor-attention"))]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*command, "--max-tokens", "3"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert (result.returncode, result.stderr) == (1, "afterglow: [Errno 28] No space left on device\n")


def test_characters_that_the_encoding_of_the_output_lacks_are_question_marks() -> None:
    help_text = run_command("chat", "--help", PYTHONIOENCODING="ascii")
    assert (help_text.returncode, help_text.stderr) == (0, "")
    command = ["run", "aé", "--raw", "--model", str(models.get_path("attention")), "--seed", "1"]
    options = ["--temperature", "1", "--max-tokens", "20"]
    utf8, ascii_text = (run_command(*command, *options, PYTHONIOENCODING=encoding) for encoding in ("utf-8", "ascii"))
    assert not utf8.stdout.isascii()
    assert (ascii_text.returncode, ascii_text.stdout) == (0, utf8.stdout.encode("ascii", "replace").decode())


def test_wrong_usage_has_exit_code_two() -> None:
    assert run_in_process("chat", "--max-tokens", "-1").returncode == 2
    assert run_in_process("frobnicate").returncode == 2


def test_version_and_help_are_printed() -> None:
    assert run_command("--version").stdout.startswith("afterglow 0.")
    text = run_command("--help").stdout
    for command in ("chat", "doctor", "models"):
        assert command in text


def test_doctor_prints_facts_and_self_test_results_as_json() -> None:
    result = run_command("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0, report
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


def test_doctor_prints_every_directory_in_use(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").touch()
    variables = {f"AFTERGLOW_{name.upper()}": str(tmp_path / name) for name in ("cache", "data", "models")}
    result = run_command("doctor", "--json", AFTERGLOW_SETTINGS=str(tmp_path / "settings.toml"), **variables)
    facts = json.loads(result.stdout)["facts"]
    found = [facts[f"{name} in"] for name in ("cache", "data", "models", "settings")]
    assert found == [str(tmp_path / name) for name in ("cache", "data", "models", "settings.toml")]


def test_doctor_prints_a_table() -> None:
    text = run_in_process("doctor", COLUMNS="200").stdout
    assert "self-test MTP" in text
    assert "b11549" in text


def test_doctor_reports_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    result = run_command("doctor", "--json", AFTERGLOW_LIBLLAMA=str(tmp_path / "missing.so"))
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert "missing.so" in report["facts"]["library"]


def test_verbose_prints_the_log_of_llama_cpp() -> None:
    arguments = ("--verbose", "chat", str(models.get_path("attention")), "--max-tokens", "1")
    assert "afterglow.llama.cpp" in run_command(*arguments, stdin="hello").stderr
