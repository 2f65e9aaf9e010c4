"""The log of the server: one line per request, engines that die, and the end; never a text of a request."""

from __future__ import annotations

import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from afterglow.testing import models
from support.commands import run_command
from support.server_process import COMMAND, ServerProcess, run_server, wait_until

pytestmark = pytest.mark.native

TINY = f"tiny={models.get_path('successor-attention')}"
TIME = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def find_line(server: ServerProcess, pattern: str) -> str:
    """Wait for a line of the log and return it without its time."""
    return re.sub("(?m)" + TIME, "", server.wait_for_log(f"(?m){TIME}.*{pattern}.*$")[0])


def test_a_request_is_one_line_with_model_tokens_seconds_and_finish_reason() -> None:
    with run_server(TINY, "--context", "1024") as server:
        first = server.chat("a secret text", max_tokens=7)
        line = find_line(server, "chat/completions")
        prompt, cached = first["usage"]["prompt_tokens"], first["usage"]["prompt_tokens_details"]["cached_tokens"]
        tokens = f"model=tiny prompt={prompt} cached={cached} generated=7"
        assert re.fullmatch(rf"INFO POST /v1/chat/completions 200 {tokens} seconds=\d+\.\d{{3}} finish=length", line)
        assert "secret" not in server.stderr_text
        second = server.complete(["abc", "abd"], n=2, max_tokens=3)
        usage = second["usage"]
        assert f"prompt={usage['prompt_tokens']} " in find_line(server, "v1/completions 200")
        assert "generated=12 " in find_line(server, "v1/completions 200")


def test_streams_errors_and_disconnects_have_their_finish_reason() -> None:
    with run_server(TINY, "--context", "32768") as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
        server.collect_events("/v1/chat/completions", body)
        assert "generated=5" in find_line(server, "chat/completions 200 .*finish=length")
        server.chat(modle="tiny")
        find_line(server, "INFO POST /v1/chat/completions 400 seconds=.* finish=unknown_parameter")
        for _ in range(2):
            server.chat(id_slot=2)
        assert server.stderr_text.count("INFO /v1/chat/completions: `id_slot` has no effect here") == 1
        server.post("/v1/nothing%0AINFO%20forged", {})
        assert find_line(server, "nothing").startswith("INFO POST /v1/nothing\\nINFO forged 404 ")
        with server.http.stream(
            "POST", "/v1/chat/completions", json={**body, "max_tokens": 30_000, "stream": True}
        ) as stream:
            next(stream.iter_lines())
        line = find_line(server, "finish=cancelled")
        assert re.search(r"200 model=tiny generated=\d+ seconds=", line)
        assert "/health" not in server.stderr_text


def test_the_level_and_the_file_of_the_log_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    environment = {"AFTERGLOW_SERVER_LOG_FILE": str(path)}
    with run_server(TINY, "--log-level", "debug", **environment) as server:
        server.http.get("/health")
        find_line(server, "DEBUG GET /health 200")
        assert wait_until(60, lambda: "DEBUG GET /health 200" in path.read_text())
    with run_server(TINY, "--log-level", "error", **environment) as server:
        server.chat()
        assert server.stop() == 0
    assert "POST" not in server.stderr_text + path.read_text()
    result = run_command("serve", TINY, "--port", "0", "--log-file", str(tmp_path / "missing" / "log"))
    assert result.returncode == 1
    assert "log_file` " in result.stderr
    assert "cannot be written: No such file or directory" in result.stderr


def test_an_engine_that_dies_and_restarts_is_logged() -> None:
    with run_server(TINY) as server:
        server.list_engines()[0].kill()
        assert "SIGKILL" in find_line(server, "ERROR the engine of .*successor-attention.* died: ")
        find_line(server, r"WARNING the engine of .* was restarted \(restart 1\)")
        assert server.chat()["status"] == 200


def test_the_order_to_stop_is_logged() -> None:
    with run_server(TINY, "--context", "32768") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.chat, max_tokens=30_000)
        assert wait_until(60, server.is_busy)
        server.process.send_signal(signal.SIGTERM)
        find_line(server, "INFO SIGTERM: stopping; 1 running requests may take 30 s more")
        server.process.send_signal(signal.SIGINT)
        find_line(server, "INFO SIGINT again: ending 1 running requests")
        running.exception()  # the request ends, with a response or without
        assert server.stop() == 0
    find_line(server, "INFO stopped")


def test_a_pipe_that_nobody_reads_does_not_block_requests() -> None:
    command = [*COMMAND, TINY, "--port", "0", "--threads", "1", "--log-level", "debug"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        text = b""
        while (match := re.search(rb"at (http://\S+)", text)) is None:
            text += process.stderr.readline()
        with httpx.Client(base_url=match[1].decode(), timeout=60) as client:
            for _ in range(700):  # lines of more than 64 KiB
                assert client.get("/v1/models/" + 150 * "x").status_code == 404
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(120) == 0
