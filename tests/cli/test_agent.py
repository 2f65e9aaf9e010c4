"""`afterglow agent`, `afterglow runs` and `afterglow mcp` with a model that plays a script and a real MCP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import afterglow
from afterglow.agents import mcp
from afterglow.agents.mcp_server import build_mcp_server
from afterglow.cli import agent
from afterglow.testing import models
from afterglow.testing.models.scripted import write_scripted_model
from afterglow.testing.script import script_answers, write_call
from support.commands import AFTERGLOW, ChatTerminal, run_in_process

pytestmark = pytest.mark.native
SERVER = Path(__file__).parents[1] / "support" / "hostile_mcp.py"
Command = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "scripted.gguf"
    write_scripted_model(path, [write_call("good.work"), "Everything is done."])
    return path


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    path = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": [str(SERVER), "polite"]}
    path.write_text(json.dumps({"mcpServers": {"good": entry}}))
    return path


@pytest.fixture
def run(tmp_path: Path, model: Path, servers: Path) -> Command:
    def run(*arguments: str) -> CompletedProcess[str]:
        flags = ["--store", str(tmp_path / "runs.db")]
        if arguments[0] == "agent":
            flags += ["--model", str(model), "--mcp", str(servers), "--context", "4096", "--threads", "1"]
        return run_in_process(*arguments, *flags)

    return run


def test_a_task_is_done_with_the_tools_of_a_server(run: Command) -> None:
    result = run("agent", "Do it.", "--allow", "external")
    assert (result.returncode, result.stdout) == (0, "Everything is done.\n")
    assert "→ good.work({})" in result.stderr
    assert "← ok: done" in result.stderr


def test_a_denied_tool_is_not_offered_and_calls_of_it_are_not_made(run: Command) -> None:
    result = run("agent", "Do it.", "--deny", "good.*")
    assert "← ok" not in result.stderr


def test_without_a_terminal_a_run_waits_and_is_resumed_with_an_answer(run: Command) -> None:
    waiting = run("agent", "Do it.")
    assert waiting.returncode == 1
    command = re.search(r"afterglow agent --resume (\S+) --answer (\S+)=allow", waiting.stderr)
    assert command is not None
    denied = run("agent", "--resume", command[1], "--answer", f"{command[2]}=maybe")
    assert "must be CALL=allow or CALL=deny" in denied.stderr
    resumed = run("agent", "--resume", command[1], "--answer", f"{command[2]}=allow")
    assert (resumed.returncode, resumed.stdout) == (0, "Everything is done.\n")


def test_a_run_that_stopped_at_a_limit_continues_with_a_higher_one(run: Command) -> None:
    stopped = run("agent", "Do it.", "--rounds", "1", "--allow", "external")
    assert "stopped: the limit of 1 rounds is reached" in stopped.stderr
    id = run("runs", "list").stdout.split()[0]
    resumed = run("agent", "--resume", id, "Go on.", "--rounds", "9", "--allow", "external")
    assert (resumed.returncode, resumed.stdout) == (0, "Everything is done.\n")
    stopped = run("agent", "--resume", id, "Go on.", "--seconds", "0", "--allow", "external")
    assert "stopped: the limit of" in stopped.stderr


def test_a_message_for_a_run_that_is_refused_is_not_stored(run: Command, servers: Path) -> None:
    run("agent", "Do it.", "--allow", "external")
    id = run("runs", "list").stdout.split()[0]
    rows = run("runs", "export", id).stdout
    content = servers.read_text()
    servers.write_text(json.dumps({"mcpServers": {}}))
    refused = run("agent", "--resume", id, "And more.")
    servers.write_text(content)
    assert "`tools` must be those of the run, good.work" in refused.stderr
    assert run("runs", "export", id).stdout == rows


def test_runs_are_listed_shown_exported_and_verified(run: Command, tmp_path: Path) -> None:
    assert "no agent ran yet" in run("runs", "list").stderr
    run("agent", "Do it.", "--allow", "external")
    (line,) = run("runs", "list").stdout.splitlines()
    id, status = line.split()[:2]
    assert status == "answered"
    shown = run("runs", "show", id).stdout
    assert "good.work({})  because of the effect external" in shown
    assert "ok: done" in shown
    rows = [json.loads(line) for line in run("runs", "export", id[:-2]).stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["started", "message", "intent", "result", "message", "finished"]
    verified = run("runs", "verify")
    assert verified.returncode == 0
    head = verified.stdout.split()[-1]
    assert run("runs", "verify", "--head", head).returncode == 0
    connection = sqlite3.connect(tmp_path / "runs.db")
    connection.execute("DROP TRIGGER rows_are_not_changed")
    connection.execute("UPDATE rows SET body = replace(body, 'done', 'gone')")
    connection.commit()
    connection.close()
    verified = run("runs", "verify")
    assert verified.returncode == 1
    assert "was changed" in verified.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["agent", "chat"])
def test_the_servers_of_tools_end_with_a_command_that_is_terminated(
    tmp_path: Path, model: Path, servers: Path, command: str
) -> None:
    servers.write_text(servers.read_text().replace("polite", "hang"))  # it ignores the end of its input
    flags = ["--mcp", str(servers), "--allow", "external", "--context", "4096", "--threads", "1", "--private"]
    arguments = ["agent", "Do it.", "--model", str(model)] if command == "agent" else ["chat", str(model)]
    process = subprocess.Popen(
        [*AFTERGLOW, *arguments, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "AFTERGLOW_DATA": str(tmp_path)},
    )
    assert process.stdin is not None
    process.stdin.write(b"Do it.")
    process.stdin.close()
    try:
        wait_until(lambda: bool(list_servers(process.pid)))
        (server,) = list_servers(process.pid)
        time.sleep(3)  # until the call
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    finally:
        process.kill()
        process.wait()


def list_servers(pid: int) -> list[psutil.Process]:
    """Return the servers of tools that a command has started. A template may have another child process."""
    found: list[psutil.Process] = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [child] if "hang" in child.cmdline() else []
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_task_is_required(run: Command) -> None:
    assert "`TASK` is missing" in run("agent").stderr


def test_an_answer_without_a_run_that_waits_is_refused(run: Command) -> None:
    for answer in ("garbage", "call_1=allow"):
        refused = run("agent", "Do it.", "--answer", answer)
        assert refused.returncode != 0
        assert "`--answer` needs --resume" in refused.stderr


@pytest.mark.parametrize("source", ["flag", "variable"])
def test_a_private_agent_writes_nothing_of_a_run_to_disk(
    tmp_path: Path, model: Path, servers: Path, source: str
) -> None:
    environment = {"AFTERGLOW_DATA": str(tmp_path / "data"), "AFTERGLOW_CACHE": str(tmp_path / "cache")}
    environment |= {"AFTERGLOW_DISK_CACHE": "on"} | ({"AFTERGLOW_PRIVATE": "true"} if source == "variable" else {})
    flags = ["--model", str(model), "--mcp", str(servers), "--context", "4096", "--threads", "1"]
    flags += ["--private"] if source == "flag" else []
    result = run_in_process("agent", "Do it.", "--allow", "external", *flags, **environment)
    assert (result.returncode, result.stdout) == (0, "Everything is done.\n")
    waiting = run_in_process("agent", "Do it.", *flags, **environment)
    assert (waiting.returncode, "--resume" in waiting.stderr) == (1, False)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "cache" / "prefix").exists()
    refused = run_in_process("agent", "--resume", "a-run", *flags, **environment)
    assert refused.returncode == 1
    assert "`--resume` cannot be used with --private" in refused.stderr
    stored = run_in_process("agent", "Do it.", *flags, "--store", str(tmp_path / "runs.db"), **environment)
    assert "afterglow agent --resume" in stored.stderr
    assert (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("overflow", [None, "shift"])
def test_a_run_that_outgrows_the_context_is_compacted_unless_the_settings_say_otherwise(
    run: Command, monkeypatch: pytest.MonkeyPatch, overflow: str | None
) -> None:
    if overflow is not None:
        monkeypatch.setenv("AFTERGLOW_OVERFLOW", overflow)
    first = run("agent", "alpha beta " * 400, "--allow", "external")
    assert "the context is full" not in first.stderr
    id = run("runs", "list").stdout.split()[0]
    second = run("agent", "--resume", id, "gamma delta " * 400, "--allow", "external")
    assert (second.returncode, second.stdout) == (0, "Everything is done.\n")
    replaces = "a new summary replaces" if overflow is None else "the prompt leaves out"
    assert f"the context is full: {replaces}" in second.stderr


@pytest.mark.parametrize("overflow", [None, "shift"])
def test_the_mcp_server_compacts_unless_the_settings_say_otherwise(
    model: Path, monkeypatch: pytest.MonkeyPatch, overflow: str | None
) -> None:
    given: dict[str, Any] = {}

    def build(loaded: Any, **values: Any) -> Any:
        given.update(values)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(agent, "build_mcp_server", build)
    if overflow is not None:
        monkeypatch.setenv("AFTERGLOW_OVERFLOW", overflow)
    assert run_in_process("mcp", str(model), "--context", "2048", "--threads", "1").returncode == 0
    assert given.get("overflow") == overflow  # without one, agents compact


def test_the_mcp_server_has_no_flag_without_effect_and_writes_nothing_if_it_is_private(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(loaded: Any, **values: Any) -> Any:
        return SimpleNamespace(run=lambda: loaded.complete("x" * 300, max_tokens=1))

    monkeypatch.setattr(agent, "build_mcp_server", build)
    flags = ("mcp", str(model), "--context", "2048", "--threads", "1", "--disk-cache")
    refused = run_in_process(*flags, "--system", "Be brief.")
    assert (refused.returncode, "No such option: --system" in refused.stderr) == (2, True)
    for private in ([], ["--private"]):
        cache = tmp_path / f"cache{len(private)}"
        assert run_in_process(*flags, *private, AFTERGLOW_CACHE=str(cache)).returncode == 0
        assert (cache / "prefix").exists() == (not private)


def test_chat_calls_the_tools_of_a_server(model: Path, servers: Path) -> None:
    result = run_in_process(
        *("chat", str(model), "--mcp", str(servers), "--allow", "external", "--context", "4096", "--threads", "1"),
        stdin="Do it.",
    )
    assert "Everything is done." in result.stdout
    refused = run_in_process(
        *("chat", str(model), "--mcp", str(servers), "--deny", "external", "--context", "4096", "--threads", "1"),
        stdin="Do it.",
    )
    assert "Everything is done." in refused.stdout  # the model got the refusal as the result


def test_chat_returns_to_a_mark_and_explains_its_cache() -> None:
    terminal = ChatTerminal()
    terminal.send_line("hello")
    assert "marked here after 3 messages" in terminal.send_line("/mark here")
    terminal.send_line("more")
    assert "here: 3 messages" in terminal.send_line("/mark")
    assert "3 messages left" in terminal.send_line("/rewind here")
    assert re.search(r"the last prompt had \d+ tokens: \d+ cached, \d+ computed", terminal.send_line("/why"))
    assert "forked a conversation of 3 messages" in terminal.send_line("/fork")
    assert terminal.exit() == 0


async def use_server(server: Any) -> tuple[str, list[str], dict[str, Any]]:
    from mcp import Client

    async with Client(server) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert sorted(names) == ["ask", "explain", "fork"]
        asked = await client.call_tool("ask", {"question": "Who?", "context": "x" * 300})
        forked = await client.call_tool("fork", {"context": "x" * 300, "tasks": ["One?", "Two?"]})
        explained = await client.call_tool("explain", {"question": "Who?", "context": "x" * 300})
        return (
            asked.content[0].text,
            forked.structured_content["result"],
            explained.structured_content.get("result", explained.structured_content),
        )


def test_a_model_is_offered_as_an_mcp_server() -> None:
    path, answers = models.get_path("attention"), ["Me.", "One.", "One."]
    with afterglow.load(path, context=2048, sequences=3, threads=1) as loaded, script_answers(loaded, answers):
        asked, forked, explained = asyncio.run(use_server(build_mcp_server(loaded)))
    assert (asked, forked) == ("Me.", ["One.", "One."])
    assert explained["prompt_tokens"] == explained["cached_tokens"]


@pytest.mark.slow
def test_the_mcp_server_of_the_command_line_is_used_by_our_own_client(model: Path) -> None:
    async def ask() -> str:
        command = [*AFTERGLOW, "mcp", str(model), "--context", "2048", "--threads", "1"]
        server = mcp(command, name="glow", start_seconds=120)
        tools = {tool.tool.name: tool for tool in await server.open()}
        try:
            answer: str = await tools["glow.ask"].execute('{"question": "Who?"}')
            return answer
        finally:
            await server.close()

    assert asyncio.run(ask()) == "Done."
