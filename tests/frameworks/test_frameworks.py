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


@pytest.mark.parametrize(
    ("program", "model"), [("pydantic_ai", "text"), ("openai_agents", "text"), ("smolagents", "calls")]
)
def test_a_framework_calls_a_tool_and_gets_the_answer(server: ServerProcess, program: str, model: str) -> None:
    path = Path(__file__).with_name(f"{program}_program.py")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OTEL_SDK_DISABLED": "true"}
    done = subprocess.run(
        [PYTHON, path, server.url, model], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    if program == "smolagents":  # sends `tool_choice: required`, whose grammar leads the scripted model to other text
        assert done.stdout.startswith("look ")
        assert len(done.stdout.splitlines()) > 1
    else:
        assert done.stdout.splitlines() == ["look the north", "It is in the north."]
