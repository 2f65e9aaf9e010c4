"""`Agent.connect`: an agent on a real server process, with tools in this process."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from afterglow.agents import Agent, Outcome, Permissions, Run, effect
from afterglow.agents.remote import build_fields
from afterglow.errors import EngineError, InvalidArgument, RequestError
from afterglow.testing.models.scripted import write_scripted_model
from afterglow.testing.script import write_call
from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.native


@effect("write")
def save(text: str) -> str:
    """Save a text."""
    return "saved"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("model") / "scripted.gguf"
    write_scripted_model(path, [write_call("save", text="the report"), "It is saved."])
    with run_server(f"tiny={path}", "--context", "4096", "--sequences", "4") as server:
        yield server


def connect(server: ServerProcess, **options: Any) -> Agent:
    return Agent.connect(server.url, "x" * 2000, model="tiny", tools=[save], **options)


def test_a_run_calls_tools_over_http(server: ServerProcess) -> None:
    outcome = connect(server, permissions=Permissions(write="allow")).start("Save it.").wait()
    assert (outcome.status, outcome.text) == ("answered", "It is saved.")
    assert outcome.spent.calls == 1


def test_an_agent_is_used_in_one_event_loop_after_the_other(server: ServerProcess) -> None:
    agent = connect(server, permissions=Permissions(write="allow"))
    for _ in range(2):
        assert asyncio.run(agent.start("Save it.")._drive()).text == "It is saved."
    asyncio.run(agent.close())


def test_a_run_waits_is_resumed_and_forked_without_prefill(server: ServerProcess, tmp_path: Path) -> None:
    async def wait_resume_and_fork() -> tuple[Outcome, Run, list[Outcome]]:
        async with connect(server, store=tmp_path / "runs.db") as agent:
            waiting = await agent.start("Save this.")
        async with connect(server, store=tmp_path / "runs.db") as agent:
            run = agent.resume(waiting.run_id, {waiting.waiting[0].call.id: "allow"})
            await run
            return waiting, run, await run.fork(["Check a.", "Check b."], allow=set())

    waiting, run, outcomes = asyncio.run(wait_resume_and_fork())
    assert waiting.status == "waiting"
    assert run.outcome is not None
    assert run.outcome.text == "It is saved."
    assert run.outcome.spent.computed - waiting.spent.computed < 60  # the result; the prompt has 800 tokens
    assert all(outcome.spent.computed < 60 for outcome in outcomes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "does not answer as an OpenAI API does, but with '{broken'"),
        ("[]", "does not answer as an OpenAI API does"),
        ('{"choices": [{"delta": {"tool_calls": [{}]}}]}', "does not answer as an OpenAI API does"),
        ('{"error": "no memory"}', ": no memory"),
    ],
)
def test_an_answer_of_another_kind_of_server_is_an_error(line: str, message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"data: {line}\n\n".encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(EngineError, match=re.escape(message)):
            Agent.connect(f"http://127.0.0.1:{other.server_port}").start("Go.").wait()
        thread.join()


def test_errors_of_the_server_name_it(server: ServerProcess) -> None:
    with pytest.raises(RequestError, match="answered 400: The prompt has"):
        connect(server).start("x " * 20_000).wait()
    with pytest.raises(EngineError, match="cannot be reached"):
        Agent.connect("http://127.0.0.1:9", model="tiny").start("Go.").wait()
    with pytest.raises(InvalidArgument, match="cannot be sent to a server"):
        connect(server, sequence=1).start("Go.").wait()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("url", url) for url in ("localhost:8080", "", "http://", "http://localhost:99999", "http://localhost:x", 5)),
        *(("api_key", key) for key in ("schlüssel", "two words", "a\nb", 5)),
    ],
)
def test_a_wrong_argument_of_a_connection_is_named(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"`{argument}` must"):
        Agent.connect(**{"url": "http://localhost:8080", argument: value})


@pytest.mark.parametrize(("name", "value"), [("response_format", int), ("chat_template_kwargs", {"date": object()})])
def test_an_option_that_is_no_json_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"`{name}` cannot be sent to a server"):
        build_fields({name: value})  # type: ignore[misc]
