"""An agent that is killed at any point is resumed: no write happens twice, and only new tokens are computed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.agents.events import Outcome, Question
from afterglow.agents.permissions import Decision
from afterglow.agents.store import RunStore
from afterglow.testing.models.scripted import write_scripted_model
from afterglow.testing.script import write_call
from support import killed_agent
from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.native
POINTS = 30  # of one run: 12 transactions and 3 calls; before the third there is no run yet
ANSWERS = [*(write_call("save", text=word) for word in killed_agent.WORDS), "All three are saved."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("model") / "scripted.gguf"
    write_scripted_model(path, ANSWERS)
    with run_server(f"tiny={path}", "--context", "4096", "--sequences", "4") as server:
        yield server


def start_agent(server: ServerProcess, directory: Path, salt: str, point: int) -> int:
    """Run an agent in a process of its own, which is killed at a point, and return its exit code."""
    arguments = [server.url, str(directory / "runs.db"), str(directory / "ledger"), salt, str(point)]
    command = [sys.executable, killed_agent.__file__, *arguments]
    return subprocess.run(command, timeout=120, check=False, stdout=subprocess.DEVNULL).returncode


def resume_agent(server: ServerProcess, directory: Path, salt: str) -> tuple[Outcome, list[str]]:
    """Resume the run and answer like a person who looks at the ledger."""
    ledger = directory / "ledger"

    def ask(question: Question) -> Decision:
        assert "may have been executed" in question.reason
        done = ledger.read_text() if ledger.exists() else ""
        return "deny" if any(f'"{word}"' in question.call.arguments for word in done.split()) else "allow"

    agent = killed_agent.build_agent(server.url, directory / "runs.db", ledger, salt, pass_point=lambda: None, ask=ask)
    run = agent.resume(agent.store.list_runs()[0].id)
    outcome = run.wait()
    texts = [message.content for message in run.messages if message.role == "assistant"]
    calls = [call.arguments for message in run.messages for call in message.tool_calls]
    agent.store.close()
    return outcome, [*texts, *calls]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param((4, 6, 7, 8), id="4 points"),
        pytest.param((tuple(range(3, POINTS + 1)) * 4)[:100], id="100 points", marks=pytest.mark.full),
    ],
)
def test_a_run_that_is_killed_is_resumed_without_a_second_write_and_without_prefill(
    server: ServerProcess, tmp_path: Path, points: tuple[int, ...]
) -> None:
    (tmp_path / "whole").mkdir()
    # The server may have the prompts of the other parameters in its cache: each has salts of its own.
    assert start_agent(server, tmp_path / "whole", f"whole of {len(points)}", 0) == 0
    with RunStore(tmp_path / "whole" / "runs.db") as store:
        rows = store.read(store.list_runs()[0].id)
        whole = sum(row.body["spent"]["computed"] for row in rows if "spent" in row.body)
        texts = [row.body["message"]["content"] for row in rows if row.kind == "message"]
        calls = [
            call["function"]["arguments"]
            for row in rows
            if row.kind == "message"
            for call in row.body["message"].get("tool_calls", ())
        ]
    assert whole > 0
    for number, point in enumerate(points):
        directory, salt = tmp_path / f"{number}", f"killed {number} of {len(points)}"
        directory.mkdir()
        assert start_agent(server, directory, salt, point) == -9
        outcome, generated = resume_agent(server, directory, salt)
        assert (outcome.status, outcome.text) == ("answered", "All three are saved.")
        assert (directory / "ledger").read_text().split() == list(killed_agent.WORDS)
        assert generated == [*texts, *calls]
        # A prompt that was computed before is a prefix hit; only its last token is computed again. A call that is not
        # repeated has a longer result than `saved`.
        assert outcome.spent.computed <= whole + 1 + (30 if outcome.spent.calls < 3 else 0)
