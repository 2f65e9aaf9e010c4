"""Listening and shutdown of the server."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from afterglow.errors import InvalidArgument
from afterglow.server.serve import bind
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


def test_a_killed_server_leaves_no_engine_process() -> None:
    with run_server(f"tiny={models.get_path('successor-attention')}") as server:
        assert server.list_engines()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
