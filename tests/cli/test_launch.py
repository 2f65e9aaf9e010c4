"""`afterglow launch` as a process, with a small program in the place of a coding agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from afterglow.cli.clients import get_client
from afterglow.cli.launch import check_context, find_free_port
from afterglow.cli.ps import request_json
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.testing import models
from afterglow.testing.models.scripted import write_scripted_model
from support.commands import AFTERGLOW, run_command
from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.native

# Sends one request as OpenCode would, and writes what it was given.
CLIENT = """#!{python}
import json, os, signal, sys, urllib.request
configuration = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
options = configuration["provider"]["afterglow"]["options"]
name = configuration["model"].partition("/")[2]
body = {{"model": name, "messages": [{{"role": "user", "content": "Hi"}}]}}
headers = {{"Authorization": "Bearer " + options["apiKey"], "Content-Type": "application/json"}}
request = urllib.request.Request(options["baseURL"] + "/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
print(json.dumps({{"arguments": sys.argv[1:], "answer": answer, "configuration": configuration}}), flush=True)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("waiting", flush=True)
    signal.pause()
sys.exit(3)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the client and a model that answers "Hello there."."""
    directory = tmp_path_factory.mktemp("launch")
    client = directory / "opencode"
    client.write_text(CLIENT.format(python=sys.executable))
    client.chmod(0o755)
    write_scripted_model(directory / "agent.gguf", ["Unused."], answer_without_tools="Hello there.")
    return directory


@pytest.fixture
def environment(directory: Path, tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "AFTERGLOW_DATA": str(tmp_path)}


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    arguments = [f"agent={directory / 'agent.gguf'}", f"tiny={models.get_path('successor-attention')}"]
    arguments += [f"embedding={models.get_path('embedding')}", f"my modèle={directory / 'agent.gguf'}"]
    arguments += ["--context", "20480", "--lazy-load"]
    with run_server(*arguments, AFTERGLOW_SERVER_API_KEYS="secret") as server:
        yield server


def get_port(server: ServerProcess) -> str:
    return server.url.rpartition(":")[2]


# --- the server that runs


def test_a_client_uses_the_running_server(server: ServerProcess, environment: dict[str, str]) -> None:
    keys = {"AFTERGLOW_SERVER_API_KEYS": "secret"}
    result = run_command("launch", "--port", get_port(server), "opencode", "-x", "--print", **environment, **keys)
    assert result.returncode == 3, result.stderr
    report = json.loads(result.stdout)
    assert report["arguments"] == ["-x", "--print"]
    assert report["answer"] == "Hello there."
    limit = report["configuration"]["provider"]["afterglow"]["models"]["agent"]["limit"]
    assert limit == {"context": 20_480, "output": 5_120}
    assert server.process.poll() is None


def test_a_model_that_is_not_served_is_an_error(server: ServerProcess, environment: dict[str, str]) -> None:
    arguments = ["--port", get_port(server), "--api-key", "secret", "--model", "huge", "opencode"]
    result = run_command("launch", *arguments, **environment)
    assert result.returncode == 1
    assert "'huge' is not served" in result.stderr
    assert "served are agent, tiny, embedding" in result.stderr


def test_a_model_that_cannot_call_tools_is_an_error(server: ServerProcess, environment: dict[str, str]) -> None:
    arguments = ["--port", get_port(server), "--api-key", "secret", "--model", "embedding", "opencode"]
    result = run_command("launch", *arguments, **environment)
    assert result.returncode == 1
    assert "'embedding' cannot call tools, which OpenCode needs" in result.stderr


def test_a_context_that_is_too_small_is_an_error_with_both_numbers(
    server: ServerProcess, environment: dict[str, str]
) -> None:
    result = run_command(
        "launch", "--print", "--port", get_port(server), "--api-key", "secret", "claude", **environment
    )
    assert result.returncode == 1
    assert "of 'agent' is 20,480 tokens, but Claude Code needs 32,768" in result.stderr


def test_a_wrong_key_is_an_error(server: ServerProcess, environment: dict[str, str]) -> None:
    result = run_command("launch", "--port", get_port(server), "--api-key", "wrong", "opencode", **environment)
    assert (result.returncode, "`--api-key` is not a key" in result.stderr) == (1, True), result.stderr


def test_the_name_of_a_model_may_have_spaces_and_accents(server: ServerProcess, environment: dict[str, str]) -> None:
    arguments = ["--port", get_port(server), "--api-key", "secret", "--model", "my modèle", "opencode"]
    result = run_command("launch", *arguments, **environment)
    assert result.returncode == 3, result.stderr
    assert json.loads(result.stdout)["configuration"]["model"] == "afterglow/my modèle"


def test_a_request_that_cannot_be_sent_is_not_reported_as_a_missing_server(server: ServerProcess) -> None:
    with pytest.raises(AfterglowError, match="/v1/models/my model cannot be sent: URL can't contain control"):
        request_json(server.url, "/v1/models/my model", "secret")


# --- a server of its own


def start_with_own_server(directory: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [*AFTERGLOW, "launch", "--port", "0", "--model", f"agent={directory / 'agent.gguf'}", "opencode"]
    return subprocess.Popen(
        [*command, *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def list_servers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "opencode" not in " ".join(child.cmdline())]


def test_the_server_ends_with_the_client_and_the_status_is_the_one_of_the_client(
    directory: Path, environment: dict[str, str]
) -> None:
    launch = start_with_own_server(directory, environment, "wait")
    assert launch.stdout is not None
    report = json.loads(launch.stdout.readline())
    assert report["answer"] == "Hello there."
    # The context of the settings is too small for the client, so the server has the one that it needs.
    limit = report["configuration"]["provider"]["afterglow"]["models"]["agent"]["limit"]
    assert limit["context"] >= get_client("opencode").min_context_tokens
    assert launch.stdout.readline() == "waiting\n"
    servers = list_servers(launch.pid)
    assert servers
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(60) == 7
    launch.stdout.close()
    assert not psutil.wait_procs(servers, timeout=60)[1]


@pytest.mark.parametrize("arguments", [[], ["--model", "big"]])
def test_a_model_table_is_served_as_by_serve(
    directory: Path, environment: dict[str, str], tmp_path: Path, arguments: list[str]
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[models.big]\nmodel = {json.dumps(str(directory / 'agent.gguf'))}\ncontext = 17000\n")
    result = run_command(
        "launch", "--port", "0", *arguments, "opencode", **environment, AFTERGLOW_SETTINGS=str(settings)
    )
    assert result.returncode == 3, result.stderr
    report = json.loads(result.stdout)
    assert report["answer"] == "Hello there."
    assert report["configuration"]["provider"]["afterglow"]["models"]["big"]["limit"]["context"] >= 17_000


def test_the_server_ends_if_launch_is_killed(directory: Path, environment: dict[str, str]) -> None:
    launch = start_with_own_server(directory, environment, "wait")
    assert launch.stdout is not None
    launch.stdout.readline()
    assert launch.stdout.readline() == "waiting\n"
    processes = psutil.Process(launch.pid).children(recursive=True)
    servers = list_servers(launch.pid)
    launch.kill()
    launch.wait()
    assert not psutil.wait_procs(servers, timeout=60)[1]
    for process in processes:
        if process.is_running():
            process.kill()  # the client has lost its terminal, which this one does not notice
    launch.stdout.close()


def test_a_server_that_does_not_start_is_an_error_with_its_reason(
    directory: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    result = run_command("launch", "--port", "0", "--model", str(broken), "opencode", **environment)
    assert result.returncode == 1
    assert "the server did not start: " in result.stderr
    assert "broken.gguf" in result.stderr


# --- without a server


def test_print_is_a_shell_script_that_sets_everything(environment: dict[str, str], tmp_path: Path) -> None:
    port = str(find_free_port("127.0.0.1"))
    result = run_command("launch", "--print", "--port", port, "--context", "9000", "aider", "--yes", **environment)
    assert result.returncode == 0, result.stderr
    script = f'{result.stdout}\necho "$AIDER_MODEL"; cat "$AIDER_MODEL_METADATA_FILE"'
    shell = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=True)
    name, _, metadata = shell.stdout.partition("\n")
    assert name == "openai/smollm2"
    assert json.loads(metadata)[name]["max_input_tokens"] == 9000
    assert result.stdout.splitlines()[-1] == "# aider --yes"


def test_print_shows_the_first_model_table_unless_a_model_is_set(environment: dict[str, str], tmp_path: Path) -> None:
    settings, port = tmp_path / "settings.toml", str(find_free_port("127.0.0.1"))
    arguments = ["launch", "--print", "--port", port, "aider"]
    tables = "[models.big]\nmodel = '/models/x.gguf'\ncontext = 9000\n\n[models.small]\n"
    for text, name, context in ((tables, "big", 9000), (f"model = 'small'\n\n{tables}", "small", 8192)):
        settings.write_text(text)
        result = run_command(*arguments, **environment, AFTERGLOW_SETTINGS=str(settings))
        assert f"export AIDER_MODEL=openai/{name}\n" in result.stdout, result.stderr
        assert f'"max_input_tokens": {context}' in result.stdout


def test_a_client_that_is_not_installed_is_an_error_with_the_command_to_install_it(tmp_path: Path) -> None:
    result = run_command("launch", "--port", "0", "claude", PATH=str(tmp_path))
    assert result.returncode == 1
    assert "Claude Code is not installed" in result.stderr
    assert "npm install -g @anthropic-ai/claude-code" in result.stderr


def test_the_context_of_a_client_is_checked() -> None:
    check_context(get_client("codex"), "m", 16_384)
    with pytest.raises(InvalidArgument, match="16,383 tokens, but Codex needs 16,384"):
        check_context(get_client("codex"), "m", 16_383)
