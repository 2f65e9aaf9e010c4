"""MCP servers: real child processes, HTTP and in-process servers; hostile ones end as a tool error without orphans."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from afterglow.agents import Agent, load_mcp_servers, mcp
from afterglow.agents.execution import MAX_RESULT_CHARACTERS, execute_call
from afterglow.agents.loop import ToolResult
from afterglow.agents.mcp_client import McpServer
from afterglow.chat.messages import ToolCall
from afterglow.errors import InvalidArgument, ToolServerFailed

pytestmark = pytest.mark.slow
HOSTILE = Path(__file__).parents[1] / "support" / "hostile_mcp.py"
CALL = ToolCall(id="1", name="bad.work", arguments="{}")
CALL_SECONDS = 3.0


def build_server(kind: str, **options: Any) -> McpServer:
    return mcp([sys.executable, str(HOSTILE), kind], name="bad", **options)


def list_descendants() -> set[int]:
    marked = set()
    for process in psutil.process_iter():
        try:
            if "MCP_SERVER_OWNER" in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                marked.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return marked


def call_once(kind: str) -> ToolResult:
    """Call the tool of a server within the time limit, close it, and check that no process is left."""

    async def call() -> ToolResult:
        server = build_server(kind)
        try:
            (tool,) = await server.open()
            return await execute_call(tool, CALL, seconds=CALL_SECONDS)
        finally:
            await server.close()

    before = list_descendants()
    result = asyncio.run(call())
    deadline = time.monotonic() + 20  # a killed process ends when it runs next
    while not list_descendants() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list_descendants() <= before, "a process is left"
    return result


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("crash", "error: the MCP server bad failed"),
        ("hang", "error: bad.work did not end within 3 seconds"),
        ("flood", "error: the MCP server bad failed: it wrote a message of more than 16 MiB"),
        ("malformed", "error: the MCP server bad failed: it wrote 21 lines that are no messages"),
        ("chatter", "error: bad.work did not end within 3 seconds"),
        ("wrong", "error: "),
    ],
)
def test_a_server_that_misbehaves_is_a_tool_error_within_the_time_limit(kind: str, told: str) -> None:
    result = call_once(kind)
    assert result.status == "error"
    assert result.text.startswith(told)


def test_grandchildren_end_with_the_server() -> None:
    assert call_once("grandchildren") == ToolResult("ok", "started")


def test_a_large_result_is_cut() -> None:
    result = call_once("large")
    assert result.status == "ok"
    assert len(result.text) < MAX_RESULT_CHARACTERS + 100
    assert "characters are left out" in result.text


def test_a_server_that_does_not_start_is_an_error_that_says_why() -> None:
    async def open(server: McpServer) -> None:
        try:
            await server.open()
        finally:
            await server.close()

    before = list_descendants()
    with pytest.raises(ToolServerFailed, match="did not start within 1 seconds"):
        asyncio.run(open(build_server("silent", start_seconds=1)))
    with pytest.raises(ToolServerFailed, match="bad failed"):
        asyncio.run(open(build_server("missing", start_seconds=20)))
    with pytest.raises(ToolServerFailed, match="cannot be started"):
        asyncio.run(open(mcp(["/no/such/program"], name="none")))
    assert list_descendants() <= before


def test_a_start_that_is_cancelled_is_repeated_by_the_next_call_and_the_server_can_be_closed() -> None:
    async def cancel_start() -> None:
        server = build_server("silent", start_seconds=3)
        start = asyncio.create_task(server.open())
        await asyncio.sleep(0.5)
        start.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(start, return_exceptions=True)
            with pytest.raises(ToolServerFailed, match="did not start within 3 seconds"):
                await server.call("work", "{}")
            await server.close()

    before = list_descendants()
    asyncio.run(cancel_start())
    assert list_descendants() <= before


def test_a_server_that_crashed_is_started_again_by_the_next_call(tmp_path: Path) -> None:
    async def call_twice() -> list[ToolResult]:
        server = build_server("crash")
        (tool,) = await server.open()
        results = [await execute_call(tool, CALL, seconds=20) for _ in range(2)]
        await server.close()
        return results

    assert [result.status for result in asyncio.run(call_twice())] == ["error", "error"]


def test_a_server_that_hangs_is_started_again_and_one_that_is_only_slow_is_not() -> None:
    async def start_again(kind: str) -> bool:
        server = build_server(kind)
        (tool,) = await server.open()
        try:
            process = server._process
            results = [await execute_call(tool, CALL, seconds=seconds) for seconds in (1, 8)]
            if kind == "slow":
                assert [result.status for result in results] == ["error", "ok"]
            return server._process is not process
        finally:
            await server.close()

    assert asyncio.run(start_again("hang")) is True
    assert asyncio.run(start_again("slow")) is False


def test_annotations_are_claims_unless_the_server_is_trusted() -> None:
    async def find_effect(**options: Any) -> str:
        server = build_server("polite", **options)
        (tool,) = await server.open()
        await server.close()
        return tool.effect

    assert asyncio.run(find_effect()) == "external"
    assert asyncio.run(find_effect(trust=True)) == "read"
    assert asyncio.run(find_effect(effects={"wo*": "write"})) == "write"


def build_official_server() -> Any:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("calculator")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return server


async def add(server: McpServer) -> ToolResult:
    (tool,) = await server.open()
    try:
        return await execute_call(tool, ToolCall(id="1", name=tool.tool.name, arguments='{"a": 1, "b": 2}'), seconds=20)
    finally:
        await server.close()


def test_a_server_in_this_process_is_called() -> None:
    assert asyncio.run(add(mcp(build_official_server(), name="calc"))).text == "3"


def test_of_two_tools_with_the_same_name_the_second_is_left_out() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("x")
    server.add_tool(lambda: "first", name="a b", description="First.")
    server.add_tool(lambda: "second", name="a_b", description="Second.")

    async def call() -> list[str]:
        async with Agent.connect("http://localhost:1", tools=[mcp(server, name="x")]) as agent:
            return [f"{tool.tool.name} {tool.tool.description}" for tool in await agent.open_tools()]

    assert asyncio.run(call()) == ["x.a_b First."]


def test_a_server_over_http_is_called() -> None:
    import uvicorn

    async def serve_and_add() -> ToolResult:
        config = uvicorn.Config(build_official_server().streamable_http_app(), port=0, log_level="error")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        result = await add(mcp(f"http://127.0.0.1:{port}/mcp", name="calc", headers={"x-test": "1"}))
        server.should_exit = True
        await task
        return result

    assert asyncio.run(serve_and_add()).text == "3"


def test_servers_are_read_from_the_usual_file(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": [str(HOSTILE), "polite"], "effects": {"work": "read"}}
    path.write_text(json.dumps({"mcpServers": {"good": entry, "far": {"url": "http://127.0.0.1:1/mcp"}}}))
    assert [server.name for server in load_mcp_servers(path)] == ["good", "far"]
    path.write_text(json.dumps({"mcpServers": {"bad": {"command": "x", "argz": []}}}))
    with pytest.raises(InvalidArgument, match="argz is not a field"):
        load_mcp_servers(path)
    path.write_text("[]")
    with pytest.raises(InvalidArgument, match="not a file of MCP servers"):
        load_mcp_servers(path)


@pytest.mark.parametrize("transport", ["http", "streamable-http", "streamableHttp"])
def test_the_transport_of_a_server_may_be_named(tmp_path: Path, transport: str) -> None:
    path = tmp_path / "mcp.json"
    entries = {"near": {"type": "stdio", "command": "x"}, "far": {"type": transport, "url": "http://127.0.0.1:1/mcp"}}
    path.write_text(json.dumps({"mcpServers": entries}))
    assert [server.name for server in load_mcp_servers(path)] == ["near", "far"]
    entries["far"]["type"] = "sse"
    path.write_text(json.dumps({"mcpServers": entries}))
    with pytest.raises(InvalidArgument, match="far: type must be http or streamable-http, not 'sse'"):
        load_mcp_servers(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", "sse"),
        ("type", "http"),  # with a command
        ("command", ["python", "-m", "server"]),
        ("args", "-m server"),
        ("args", [8080]),
        ("env", {"PORT": 8080}),
        ("env", ["PORT=8080"]),
        ("cwd", 5),
        ("effects", ["work"]),
        ("trust", "false"),
        ("trust", 0),
    ],
)
def test_a_wrong_value_in_a_file_of_servers_is_named(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"bad": {"command": "x", field: value}}}))
    with pytest.raises(InvalidArgument, match=f"bad: {field} must be "):
        load_mcp_servers(path)
