"""MCP servers as child processes: bounded messages, and no process is left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import psutil

from afterglow.errors import ToolServerFailed

MAX_MESSAGE_BYTES = 16 * 1024**2
MAX_INVALID_LINES = 20
MAX_LOG_CHARACTERS = 2_000
EXIT_SECONDS = 2.0  # after the end of the input
MARKER = "MCP_SERVER_OWNER"  # environment variable that names a server and all of its descendants
INHERITED_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER", "SYSTEMROOT")


class ServerProcess:
    """Transport of the official client to a child process, over its standard input and output.

    Beyond the one of the package it bounds the size of a message, and ends descendants that left the process group.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None, directory: str | None
    ) -> None:
        self.name = name
        self.problem = ""  # why the server was ended
        self._command, self._directory = list(command), directory
        self._marker = secrets.token_hex(16)
        inherited = {key: os.environ[key] for key in INHERITED_VARIABLES if key in os.environ}
        self._environment = {**inherited, **(environment or {}), MARKER: self._marker}
        self.has_ended = False  # its output ended
        self._log = ""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Any:
        return await self._stack.enter_async_context(self._connect())

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def describe_end(self) -> str:
        """Return why the server ended, with the end of its log."""
        log = self._log.strip()
        return (self.problem or "the process ended") + (f"; it wrote: {log[-300:]}" if log else "")

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        import anyio

        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                cwd=self._directory,
                limit=MAX_MESSAGE_BYTES,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ToolServerFailed(self.name, f"{self._command[0]} cannot be started: {error}") from None
        received, to_session = anyio.create_memory_object_stream[Any](0)[::-1]
        from_session, sent = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(self._read_messages(process, to_session)),
            asyncio.create_task(self._write_messages(process, sent, to_session)),
            asyncio.create_task(self._read_log(process)),
        ]
        try:
            yield received, from_session
        finally:
            await asyncio.shield(self._end(process, tasks))
            for stream in (received, to_session, from_session, sent):
                stream.close()

    async def _read_messages(self, process: asyncio.subprocess.Process, to_session: Any) -> None:
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        assert process.stdout is not None
        invalid = 0
        try:
            while line := await process.stdout.readline():
                try:
                    message = jsonrpc_message_adapter.validate_json(line)
                except ValueError:
                    invalid += 1
                    if invalid > MAX_INVALID_LINES:
                        self.problem = f"it wrote {invalid} lines that are no messages"
                        break
                    continue
                await to_session.send(SessionMessage(message))
        except ValueError:  # of asyncio's limit
            self.problem = f"it wrote a message of more than {MAX_MESSAGE_BYTES // 1024**2} MiB"
        except Exception as error:  # the session is closed
            self.problem = self.problem or str(error)
        finally:
            self.has_ended = True
            to_session.close()
            if self.problem:
                kill_marked(self._marker)

    async def _write_messages(self, process: asyncio.subprocess.Process, sent: Any, to_session: Any) -> None:
        assert process.stdin is not None
        try:
            async for message in sent:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except (OSError, ConnectionError):
            to_session.close()

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(4096):
            self._log = (self._log + chunk.decode("utf-8", "replace"))[-MAX_LOG_CHARACTERS:]

    async def _end(self, process: asyncio.subprocess.Process, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Close the input, wait briefly, then kill the process and everything that it started."""
        assert process.stdin is not None
        process.stdin.close()
        deadline = asyncio.get_running_loop().time() + EXIT_SECONDS
        while process.returncode is None and asyncio.get_running_loop().time() < deadline and not self.problem:
            await asyncio.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(kill_marked, self._marker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_SECONDS)
        process._transport.close()  # type: ignore[attr-defined]  # pipes that a killed descendant held


def kill_marked(marker: str) -> int:
    """Kill all processes whose environment has the marker, also those that left their parents; return their number."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARKER) == marker:
                process.kill()
                count += 1
    return count
