"""Listening and shutdown of the server."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn

from afterglow.errors import InvalidArgument
from afterglow.server.serve import RESET_ON_CLOSE, Connection, bind
from afterglow.server.settings import ServerSettings
from afterglow.testing import models
from support.server_process import run_server, wait_until

pytestmark = pytest.mark.native

LONG_REQUEST = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 30_000,
    "temperature": 0,
}


def test_after_a_signal_running_requests_finish_and_new_ones_get_503() -> None:
    arguments = ("--context", "32768", "--shutdown-seconds", "240")
    with run_server(f"tiny={models.get_path('successor-attention')}", *arguments) as server:
        with ThreadPoolExecutor(3) as pool:
            body = {**LONG_REQUEST, "max_tokens": 1000}
            streams = [pool.submit(server.collect_events, "/v1/chat/completions", body) for _ in range(3)]
            assert wait_until(60, server.is_busy)
            server.process.send_signal(signal.SIGTERM)
            late = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
            assert late.headers["Retry-After"]
            for stream in streams:
                events = stream.result()
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0


def test_running_requests_end_with_an_error_after_shutdown_seconds() -> None:
    model = f"tiny={models.get_path('successor-attention')}"
    with (
        run_server(model, "--context", "32768", "--shutdown-seconds", "0.3") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = pool.submit(server.collect_events, "/v1/chat/completions", LONG_REQUEST)
        assert wait_until(60, server.is_busy)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 60
        assert stream.result()[-1]["error"]["code"] == "shutting_down"


def test_an_address_that_cannot_be_used_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind(ServerSettings(port=0)) as listener, pytest.raises(InvalidArgument, match="cannot listen on"):
        bind(ServerSettings(port=listener.getsockname()[1]))

    def refuse(*_: object) -> None:
        raise OSError("no more sockets")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(InvalidArgument, match="no more sockets"):
        bind(ServerSettings(port=0))


def test_an_idle_connection_that_its_client_resets_leaves_no_timer() -> None:
    errors: list[dict[str, Any]] = []

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def reset_after_response() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        config = uvicorn.Config(respond, lifespan="off", log_config=None, timeout_keep_alive=1)
        config.load()
        options = {"config": config, "server_state": uvicorn.server.ServerState(), "app_state": {}}
        server = await loop.create_server(
            lambda: Connection(stall_seconds=60, on_stall=lambda: None, **options), "127.0.0.1", 0
        )
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in await loop.sock_recv(client, 1000)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        await asyncio.sleep(1.5)  # the timer ends after a second
        server.close()

    asyncio.run(reset_after_response())
    assert not errors


def test_a_killed_server_leaves_no_engine_process() -> None:
    with run_server(f"tiny={models.get_path('successor-attention')}") as server:
        assert server.list_engines()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
