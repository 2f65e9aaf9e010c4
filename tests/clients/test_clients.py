"""Real coding agents on a real server: they read and edit a file, and no token of their prompts is computed twice.

The model plays a script (`afterglow.testing.models.scripted`): it calls the client's tools and answers. Nothing of what
a client sends is stored; the token counts are from the log of the server. Run by `make test-clients`.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from afterglow.testing.models.scripted import write_scripted_model
from afterglow.testing.script import write_call
from support.client_packages import fetch_clients
from support.commands import AFTERGLOW
from support.server_process import ServerProcess, run_server

pytestmark = [pytest.mark.native, pytest.mark.clients, pytest.mark.timeout(1200)]

CONTEXT_TOKENS = 131_072
CLIENT_TIMEOUT_SECONDS = 300
TASK = "Make the sky green in notes.txt."
ANSWER = "The sky is green now."
REQUEST_PATTERN = re.compile(r"POST /v1/(\S+) 200 .*prompt=(\d+) cached=(\d+) generated=(\d+) .*finish=(\w+)")
# Nothing but this machine can be reached.
OFFLINE = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}


@dataclass(frozen=True)
class Case:
    """A client: its arguments, and the calls that read and edit a file."""

    name: str
    path: str  # of the requests
    arguments: tuple[str, ...]
    read: tuple[str, dict[str, str]]
    edit: tuple[str, dict[str, str]]

    def build_script(self, file: Path) -> list[str]:
        """Return the answers of the model."""
        calls = []
        for name, arguments in (self.read, self.edit):
            filled = {key: value.replace("FILE", str(file)) for key, value in arguments.items()}
            calls.append(write_call(name, **filled))
        return [f"I will read the file. {calls[0]}", calls[1], ANSWER]


CASES = [
    Case(
        name="claude",
        path="messages",
        arguments=("-p", TASK, "--allowedTools", "Read,Edit", "--permission-mode", "acceptEdits"),
        read=("Read", {"file_path": "FILE"}),
        edit=("Edit", {"file_path": "FILE", "old_string": "blue", "new_string": "green"}),
    ),
    Case(
        name="codex",
        path="responses",
        arguments=("exec", "--dangerously-bypass-approvals-and-sandbox", TASK),
        read=("exec_command", {"cmd": "cat FILE"}),
        edit=("exec_command", {"cmd": "sed -i s/blue/green/ FILE"}),
    ),
    Case(
        name="opencode",
        path="chat/completions",
        arguments=("run", TASK),
        read=("read", {"filePath": "FILE"}),
        edit=("edit", {"filePath": "FILE", "oldString": "blue", "newString": "green"}),
    ),
]


@dataclass(frozen=True)
class LoggedRequest:
    """Token counts of one request."""

    prompt: int
    cached: int
    generated: int
    finish: str


@pytest.fixture(scope="module")
def executables() -> Path:
    return fetch_clients()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    (directory / "notes.txt").write_text("The sky is blue.\n")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Start"]):
        subprocess.run([*git, *arguments], cwd=directory, check=True)
    return directory


def list_requests(server: ServerProcess, path: str) -> list[LoggedRequest]:
    """Return the requests of the conversation in their order: those that end in a call, and the one after them."""
    found = [match.groups() for match in REQUEST_PATTERN.finditer(server.stderr_text)]
    requests = [LoggedRequest(*map(int, group[1:4]), group[4]) for group in found if group[0] == path]
    first = next(number for number, request in enumerate(requests) if request.finish == "tool_calls")
    return [request for request in requests[first:] if request.prompt >= requests[first].prompt]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_agent_edits_a_file_and_computes_only_what_is_new(
    case: Case, executables: Path, repository: Path, tmp_path: Path
) -> None:
    file = repository / "notes.txt"
    write_scripted_model(tmp_path / "agent.gguf", case.build_script(file), answer_without_tools="Sky color")
    with run_server(f"agent={tmp_path / 'agent.gguf'}", "--context", str(CONTEXT_TOKENS)) as server:
        result = run_agent(case, server.url, executables, repository, tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]
        assert file.read_text() == "The sky is green.\n", result.stderr[-2000:]
        assert ANSWER in result.stdout
        server.wait_for_log("finish=stop")
        requests = list_requests(server, case.path)
    assert [request.finish for request in requests] == ["tool_calls", "tool_calls", "stop"]
    for before, request in itertools.pairwise(requests):
        new = request.prompt - before.prompt - before.generated
        assert 0 < new < 1000
        assert request.prompt - request.cached <= new + 1, requests


def run_agent(
    case: Case, url: str, executables: Path, repository: Path, home: Path
) -> subprocess.CompletedProcess[str]:
    """Run a client with `afterglow launch`, without the settings of the user."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ANTHROPIC_"))}
    return subprocess.run(
        [*AFTERGLOW, "launch", "--port", url.rpartition(":")[2], case.name, *case.arguments],
        cwd=repository,
        env={
            **variables,
            **OFFLINE,
            "HOME": str(home),
            "PWD": str(repository),  # OpenCode prefers it to the working directory
            "PATH": f"{executables}{os.pathsep}{os.environ['PATH']}",
            "IS_SANDBOX": "1",  # Claude Code refuses to work as root otherwise
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_SECONDS,
        check=False,
    )
