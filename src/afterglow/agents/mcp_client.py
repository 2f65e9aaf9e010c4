"""Tools of MCP servers, with the official `mcp` package: child processes, HTTP, and servers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afterglow.agents.execution import MAX_RESULT_CHARACTERS, clean_text, describe_failure
from afterglow.agents.mcp_process import ServerProcess
from afterglow.agents.permissions import EFFECTS, Effect
from afterglow.agents.toolbox import AgentTool
from afterglow.chat.tools.tool import build_tool
from afterglow.errors import InvalidArgument, ToolServerFailed, UnsupportedOperation

logger = logging.getLogger("afterglow.agents")
START_SECONDS = 30.0
ANSWER_SECONDS = 2.0  # to a short request, after a call that did not end
MAX_TOOLS = 500
MAX_NAME_CHARACTERS = 64
MAX_DESCRIPTION_CHARACTERS = 4_000
# Values of `type`, by the field that such a server has. Clients spell streamable HTTP in several ways.
FILE_TRANSPORTS = {"command": ("stdio",), "url": ("http", "streamable-http", "streamableHttp", "streamable_http")}
FILE_FIELDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("command", "cwd", "url", "type"), (str, "text")),
    "args": (list, "a list of texts"),
    **dict.fromkeys(("env", "headers", "effects"), (dict, "an object whose values are texts")),
    "trust": (bool, "true or false"),
}


def mcp(
    server: Sequence[str] | str | object,
    *,
    name: str,
    effects: Mapping[str, Effect] | None = None,
    trust: bool = False,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> McpServer:
    """Return the tools of an MCP server for an agent. Their names are `NAME.tool`.

    Args:
        server: A command with its arguments, the URL of a server, or a server object of the `mcp` package.
        name: Prefix of the tools.
        effects: Effects of tools, by name or pattern, without the prefix. All others are `external`.
        trust: Believe the annotations of the server. They are claims, so this is off by default.
        environment: Further environment variables of the process. It inherits only a few, e.g. `PATH`.
        directory: Working directory of the process.
        headers: Headers of HTTP requests.
        start_seconds: Time limit of the start.

    >>> mcp(["python", "-m", "git_server"], name="git", effects={"log": "read"}).name
    'git'
    """
    for pattern, kind in (effects or {}).items():
        if kind not in EFFECTS:
            raise InvalidArgument(f"effects[{pattern!r}]", f"must be one of {', '.join(EFFECTS)}, not {kind!r}")
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,32}", name):
        raise InvalidArgument("name", f"must be 1 to 32 of the characters a-z A-Z 0-9 _ -, not {name!r}")
    if not isinstance(server, str) and isinstance(server, Sequence) and not server:
        raise InvalidArgument("server", "must have a command")
    return McpServer(
        server, name, dict(effects or {}), trust, environment, directory, dict(headers or {}), start_seconds
    )


def load_mcp_servers(path: str | os.PathLike[str]) -> list[McpServer]:
    """Return the servers of a JSON file with `mcpServers`, the format that most agents read.

    Beside `command`, `args`, `env` and `cwd`, or `url` and `headers`, a server may have `effects` and `trust`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "mcp.json"
    >>> _ = path.write_text('{"mcpServers": {"git": {"command": "git-server"}}}')
    >>> [server.name for server in load_mcp_servers(path)]
    ['git']
    """
    try:
        document: Any = json.loads(Path(path).read_text("utf-8"))
        servers = document["mcpServers"]
        entries = [(str(name), dict(entry)) for name, entry in servers.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument("mcp", f"{path} is not a file of MCP servers: {error!r}") from None
    return [_build_from_file(name, entry, f"{path}: {name}") for name, entry in entries]


def _build_from_file(name: str, entry: Mapping[str, Any], where: str) -> McpServer:
    if unknown := sorted(entry.keys() - FILE_FIELDS.keys()):
        raise InvalidArgument(
            "mcp", f"{where}: {unknown[0]} is not a field; there are {', '.join(sorted(FILE_FIELDS))}"
        )
    entry = {field: value for field, value in entry.items() if value is not None}
    for field, value in entry.items():
        kind, text = FILE_FIELDS[field]
        parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
            raise InvalidArgument("mcp", f"{where}: {field} must be {text}")  # the value may be a secret
    if ("url" in entry) == ("command" in entry):
        raise InvalidArgument("mcp", f"{where} must have either a command or a url")
    transports = FILE_TRANSPORTS["url" if "url" in entry else "command"]
    if (transport := entry.get("type", transports[0])) not in transports:
        raise InvalidArgument("mcp", f"{where}: type must be {' or '.join(transports[:2])}, not {transport!r}")
    server = entry["url"] if "url" in entry else [entry["command"], *entry.get("args", ())]
    return mcp(
        server,
        name=name,
        effects=entry.get("effects"),
        trust=bool(entry.get("trust", False)),
        environment=entry.get("env"),
        directory=entry.get("cwd"),
        headers=entry.get("headers"),
    )


class McpServer:
    """An MCP server, and the task that owns its connection. A server that ended is started again by the next call."""

    def __init__(
        self,
        server: Any,
        name: str,
        effects: Mapping[str, Effect],
        trust: bool,
        environment: Mapping[str, str] | None,
        directory: str | os.PathLike[str] | None,
        headers: Mapping[str, str],
        start_seconds: float,
    ) -> None:
        self.name = name
        self._server, self._effects, self._trust = server, effects, trust
        self._environment = environment
        self._directory = None if directory is None else os.fspath(directory)
        self._headers = headers
        self._start_seconds = start_seconds
        self._process: ServerProcess | None = None
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None
        self._may_hang = False  # a call did not end
        self._lock = asyncio.Lock()

    async def open(self) -> list[AgentTool]:
        """Start the server and return its tools."""
        client = await self._get_client()
        found: list[Any] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._start_seconds):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None or len(found) > MAX_TOOLS:
                        break
        except Exception as error:
            await self.close()
            raise ToolServerFailed(self.name, f"its tools cannot be listed: {self._describe(error)}") from None
        if len(found) > MAX_TOOLS:
            raise ToolServerFailed(self.name, f"it has more than {MAX_TOOLS} tools")
        tools: dict[str, AgentTool] = {}
        for tool in filter(None, map(self._build_tool, found)):
            if tool.tool.name in tools:
                logger.warning("a second tool %s of the MCP server %s is left out", tool.tool.name, self.name)
            tools.setdefault(tool.tool.name, tool)
        return list(tools.values())

    async def close(self) -> None:
        """End the connection and the process with everything that it started."""
        task, self._task, self._client, self._lock = self._task, None, None, asyncio.Lock()
        if task is not None:
            assert self._stop is not None
            self._stop.set()
            await asyncio.gather(task, return_exceptions=True)

    async def call(self, tool: str, arguments: str) -> str:
        """Call a tool and return its text. Raises if the server says that the call failed, or ended."""
        client = await self._get_client()
        ended = self._task
        assert ended is not None
        call = asyncio.create_task(client.call_tool(tool, json.loads(arguments or "{}")))
        try:
            await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ToolServerFailed(self.name, self._describe(None))
            result = call.result()
        except Exception as error:
            raise ToolServerFailed(self.name, self._describe(error)) from None
        except asyncio.CancelledError:
            self._may_hang = True
            raise
        finally:
            call.cancel()
        text = format_content(result)
        if result.is_error:
            raise RuntimeError(text or "the call failed")
        return text

    async def _get_client(self) -> Any:
        """Return the connected client; start the server if it does not run."""
        async with self._lock:
            if self._task is not None and self._task.done():
                self._task = self._client = None
            if self._task is not None and self._may_hang and not await self._is_alive():
                await self._abandon()
            self._may_hang = False
            if self._task is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._stop = asyncio.Event()
                self._task = asyncio.create_task(self._serve(ready, self._stop))
                try:
                    self._client = await asyncio.wait_for(ready, self._start_seconds)
                except TimeoutError:
                    await self._abandon()
                    reason = f"it did not start within {self._start_seconds:g} seconds"
                    raise ToolServerFailed(self.name, reason) from None
                except Exception as error:
                    await self._abandon()
                    raise ToolServerFailed(self.name, self._describe(error)) from None
                except asyncio.CancelledError:  # also by the time limit of a call, which may be shorter
                    await self._abandon()
                    raise
            return self._client

    async def _is_alive(self) -> bool:
        """Return whether the server answers a short request. New versions of the protocol have no ping."""
        try:
            await asyncio.wait_for(self._client.list_tools(cache_mode="refresh"), ANSWER_SECONDS)
        except TimeoutError:
            return False
        except Exception as error:
            logger.debug("the MCP server %s answered with an error: %s", self.name, error)
        return True

    async def _abandon(self) -> None:
        task, self._task, self._client = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _serve(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Own the connection: the client must be opened and closed by one task."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._create_client(stack))
                if not ready.done():
                    ready.set_result(client)
                await self._wait_for_end(stop)
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            logger.info("the MCP server %s ended: %s", self.name, error)

    async def _wait_for_end(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if self._process is not None and self._process.has_ended:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)

    async def _create_client(self, stack: contextlib.AsyncExitStack) -> Any:
        try:
            from mcp import Client
        except ImportError:
            raise UnsupportedOperation("MCP", "install it with `pip install afterglow-llm[agents]`") from None

        if isinstance(self._server, str):
            if not self._headers:
                return Client(self._server)
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(self._headers)))
            return Client(streamable_http_client(self._server, http_client=http))
        if isinstance(self._server, Sequence):
            self._process = ServerProcess(self.name, self._server, self._environment, self._directory)
            return Client(self._process)
        return Client(self._server)

    def _build_tool(self, description: Any) -> AgentTool | None:
        """Build a tool from the description of the server. One that is malformed is left out."""
        original = str(description.name)
        name = re.sub(r"[^a-zA-Z0-9_.-]", "_", f"{self.name}.{original}")[:MAX_NAME_CHARACTERS]
        text = clean_text(description.description or "", MAX_DESCRIPTION_CHARACTERS)
        try:
            tool = build_tool(name, text, description.input_schema, False, where=f"{self.name}.{original}")
        except InvalidArgument as error:
            logger.warning("a tool of the MCP server %s is left out: %s", self.name, error)
            return None
        return AgentTool(tool, self._find_effect(original, description), lambda values: self.call(original, values))

    def _find_effect(self, tool: str, description: Any) -> Effect:
        for pattern, effect in self._effects.items():
            if fnmatch.fnmatchcase(tool, pattern):
                return effect
        claims = description.annotations
        if not self._trust or claims is None or claims.open_world_hint is not False:
            return "external"
        return "read" if claims.read_only_hint else "write"

    def _describe(self, error: BaseException | None) -> str:
        inner = error
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        if isinstance(inner, ToolServerFailed):
            return inner.reason
        if self._process is not None and self._process.has_ended:
            return self._process.describe_end()
        return describe_failure(inner) if inner is not None else "the connection ended"


def format_content(result: Any) -> str:
    """Return the content of a result as text. Images and audio are only named."""
    pieces = []
    for part in result.content:
        if part.type == "text":
            pieces.append(str(part.text))
        elif part.type == "resource" and getattr(part.resource, "text", None) is not None:
            pieces.append(str(part.resource.text))
        else:
            pieces.append(f"[{part.type} left out]")
    if not pieces and result.structured_content is not None:
        pieces.append(json.dumps(result.structured_content, ensure_ascii=False))
    return clean_text("\n".join(pieces), MAX_RESULT_CHARACTERS)
