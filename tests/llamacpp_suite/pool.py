"""Servers that several tests share: a test with the command line of the one before it gets the same process.

A start takes seconds, and most tests of a file start the same server. The launcher forwards the port of a test to the
shared server, whose prefix cache is cleared first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.05


def get_server(command: Sequence[str], environment: Mapping[str, str], directory: Path, api_key: str | None) -> int:
    """Return the port of a server with this command line: the running one, or a new one instead of it."""
    state = directory / "shared_server.json"
    running = json.loads(state.read_text()) if state.exists() else {}
    if running.get("command") == list(command) and clear_cache(running["port"], api_key):
        return int(running["port"])
    stop_server(directory)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    with (directory / "shared_server.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    state.write_text(json.dumps({"command": list(command), "port": port, "pid": process.pid}))
    while not is_healthy(port):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}: {directory / 'shared_server.log'}")
        time.sleep(POLL_SECONDS)
    return port


def is_healthy(port: int) -> bool:
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop_server(directory: Path) -> None:
    """Stop the shared server, if there is one."""
    state = directory / "shared_server.json"
    if state.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(state.read_text())["pid"], signal.SIGTERM)
        state.unlink()


def clear_cache(port: int, api_key: str | None) -> bool:
    """Clear the prefix cache of a server, and return whether it responds."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}/cache/clear", b"{}", headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def forward(host: str, port: int, target: int) -> None:
    """Forward connections to another port of this machine until the process is ended."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data)
                await writer.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        with contextlib.suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", target)
            writers.append(target_writer)
            directions = {
                asyncio.create_task(copy(reader, target_writer)),
                asyncio.create_task(copy(target_reader, writer)),
            }
            _, pending = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        for opened in writers:
            opened.close()

    async def run() -> None:
        server = await asyncio.start_server(handle, host, port)
        async with server:
            await server.serve_forever()

    asyncio.run(run())
