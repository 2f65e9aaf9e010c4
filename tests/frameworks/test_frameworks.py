"""Agent frameworks drive a real server with tools. They run in an environment of their own, `.venv/frameworks`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.testing.models.scripted import write_scripted_model
from afterglow.testing.script import write_call
from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "frameworks" / "bin" / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("models")
    call = write_call("look", place="the north")
    write_scripted_model(directory / "text.gguf", [call, "It is in the north."])
    # smolagents ends with a call of its own tool.
    write_scripted_model(directory / "calls.gguf", [call, write_call("final_answer", answer="It is in the north.")])
    models = [f"text={directory / 'text.gguf'}", f"calls={directory / 'calls.gguf'}"]
    with run_server(*models, "--context", "16384", "--sequences", "2") as server:
        yield server


def run_program(program: str, *arguments: str) -> list[str]:
    """Run a program with its framework and return the lines that it prints."""
    path = Path(__file__).with_name(f"{program}_program.py")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OTEL_SDK_DISABLED": "true"}
    done = subprocess.run(
        [PYTHON, path, *arguments], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("program", ["pydantic_ai", "openai_agents"])
def test_a_framework_calls_a_tool_and_gets_the_answer(server: ServerProcess, program: str) -> None:
    assert run_program(program, server.url, "text") == ["look the north", "It is in the north."]


def test_smolagents_calls_a_tool_in_each_step(server: ServerProcess) -> None:
    """It sends results as messages of the user, so that the scripted model never sees one, and repeats its call."""
    lines = run_program("smolagents", server.url, "calls", "auto")
    assert lines[:3] == ["look the north"] * 3
    assert "look the north" not in lines[3:]


def test_smolagents_gets_valid_calls_if_it_requires_them(server: ServerProcess) -> None:
    """It does so by default. The grammar leads the scripted model to calls that are not in its script."""
    assert run_program("smolagents", server.url, "calls", "required")
