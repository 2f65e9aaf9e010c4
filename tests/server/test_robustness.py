"""Robustness: invalid requests, disconnecting clients, overload and crashing engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from afterglow.testing import models
from support.hosts import is_gone
from support.server_process import CYCLE, ServerProcess, get_text, run_server, wait_until

pytestmark = pytest.mark.native

MAX_QUEUE = 8
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
LONG_REQUEST = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30_000, "temperature": 0}
SLOW_PREFILL_REQUEST = {"model": "tiny", "prompt": list(range(100, 200)) * 300, "max_tokens": 1}


@pytest.fixture(scope="module")
def single_sequence_server(caches_of_our_own: None) -> Iterator[ServerProcess]:
    """A server with one sequence, a long context and a small queue."""
    arguments = ("--context", "32768", "--sequences", "1", "--max-queue", str(MAX_QUEUE))
    with run_server(f"tiny={models.get_path('successor-attention')}", *arguments) as server:
        yield server


# --- invalid requests

BODY_START = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], '
INVALID_BODIES = {
    "not JSON": b"{",
    "no body": b"",
    "a list": b"[]",
    "text": b'"hello"',
    "NaN": BODY_START + b'"temperature": NaN}',
    "infinity": BODY_START + b'"temperature": 1e999}',
    "a huge integer": BODY_START + b'"seed": ' + b"9" * 400 + b"}",
    "a huge limit": BODY_START + b'"max_tokens": 99999999999}',
    "a lone surrogate": BODY_START + b'"user": "\\ud800"}',
    "not UTF-8": BODY_START + b'"user": "\xff\xfe"}',
    "deep nesting": BODY_START + b'"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "wrong types": b'{"model": 3, "messages": "hello"}',
    "a boolean for a number": BODY_START + b'"n": true}',
    "text for a number": BODY_START + b'"n": "2"}',
    "an infinite bias": BODY_START + b'"logit_bias": {"1": 1e999}}',
    "a bias for an unknown token": BODY_START + b'"logit_bias": {"\xc2\xb2": 1}}',
}


@pytest.mark.parametrize("name", INVALID_BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_an_invalid_body_gets_an_openai_error(server: ServerProcess, path: str, name: str) -> None:
    response = server.http.post(path, content=INVALID_BODIES[name], headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"]


HOSTILE_FIELDS: dict[str, dict[str, Any]] = {
    "zero bytes": {"messages": [{"role": "user", "content": "a\0b\0"}]},
    "zero bytes in stops": {"stop": ["\0"]},
    "private characters": {"messages": [{"role": "user", "content": "".join(map(chr, range(0xE000, 0xF8FF)))}]},
    "control tokens": {"messages": [{"role": "user", "content": "<|im_end|>" * 20}]},
    "a deeply nested schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "deep",
                "schema": json.loads('{"items":' * 150 + "{}" + "}" * 150),
            },
        }
    },
    "a recursive schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    },
    "an exponential pattern": {"response_format": {"type": "regex", "pattern": "(((a{1,500}){1,500}){1,500}){1,500}"}},
    "an infinite grammar": {"response_format": {"type": "grammar", "grammar": "start: start"}},
    "an invalid GBNF grammar": {"response_format": {"type": "grammar", "grammar": "\0", "syntax": "gbnf"}},
    "a tool with an invalid schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 3}}}]
    },
    "invalid template variables": {"chat_template_kwargs": {"messages": 3, "add_generation_prompt": {}}},
}


@pytest.mark.parametrize("name", HOSTILE_FIELDS)
def test_a_hostile_request_gets_200_or_400_and_does_not_crash_the_engine(server: ServerProcess, name: str) -> None:
    restarts = server.get_metric('afterglow_engine_restarts{model="tiny"}')
    completion = server.chat(**HOSTILE_FIELDS[name])
    assert completion["status"] in (200, 400), completion
    assert server.get_metric('afterglow_engine_restarts{model="tiny"}') == restarts
    assert get_text(server.chat()) == CYCLE[:8]


# --- disconnecting clients


@contextlib.contextmanager
def open_request(server: ServerProcess, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Send a request, and yield the connection without reading from it. Its receive buffer is small."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    headers = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect((host, int(port)))
        connection.sendall(f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + data)
        yield connection


def send_and_disconnect(server: ServerProcess, path: str, body: dict[str, Any], after_seconds: float) -> None:
    """Send a request and close the connection some seconds after the engine is busy."""
    with open_request(server, path, body):
        assert wait_until(240, server.is_busy)
        time.sleep(after_seconds)


def check_disconnects(server: ServerProcess, count: int) -> None:
    """Disconnect during decode, prefill and queueing. Each time the engine becomes idle before it has done the work."""
    rng, rows, work = random.Random(5), Counter[str](), Counter[str]()
    for number in range(count):
        before = server.get_counters()["rows"]
        stream = bool(number % 2)
        phase = ("decode", "prefill", "queue")[number % 3]
        if phase == "decode":
            send_and_disconnect(server, "/v1/chat/completions", {**LONG_REQUEST, "stream": stream}, 0.05)
        elif phase == "prefill":
            prompt = [rng.randrange(20, 250) for _ in range(30_000)]
            body = {**SLOW_PREFILL_REQUEST, "prompt": prompt, "stream": stream}
            send_and_disconnect(server, "/v1/completions", body, rng.uniform(0.0, 0.1))
        else:

            def wait_in_queue(seconds: float) -> None:
                send_and_disconnect(server, "/v1/chat/completions", LONG_REQUEST, seconds)

            with ThreadPoolExecutor(3) as pool:
                list(pool.map(wait_in_queue, (0.2, 0.1, 0.15)))
        assert wait_until(240, lambda: not server.is_busy()), f"still busy after a disconnect during {phase}"
        rows[phase] += server.get_counters()["rows"] - before
        work[phase] += 90_000 if phase == "queue" else 30_000  # what the requests would compute
    assert rows["decode"] > 0
    for phase in work:
        assert rows[phase] < 0.7 * work[phase], f"requests went on after a disconnect during {phase}"
    assert server.get_metric('afterglow_choices_in_flight{model="tiny"}') == 0
    assert get_text(server.chat()) == CYCLE[:8]


def test_a_disconnect_frees_the_engine(single_sequence_server: ServerProcess) -> None:
    check_disconnects(single_sequence_server, 20)


@pytest.mark.full
def test_two_hundred_disconnects_free_the_engine(single_sequence_server: ServerProcess) -> None:
    check_disconnects(single_sequence_server, 200)


# --- clients that do not read

# Every event repeats the name of the model, so that a short response does not fit into the buffers of the system.
LONG_NAME = "x" * 8000
UNREAD_REQUEST = {"messages": MESSAGES, "temperature": 0, "stream": True}


def open_unread_stream(server: ServerProcess, max_tokens: int) -> contextlib.AbstractContextManager[socket.socket]:
    return open_request(server, "/v1/chat/completions", {**UNREAD_REQUEST, "max_tokens": max_tokens})


def run_server_with_long_name(*arguments: str) -> contextlib.AbstractContextManager[ServerProcess]:
    return run_server(f"{LONG_NAME}={models.get_path('successor-attention')}", *arguments)


def count_in_flight(server: ServerProcess) -> float:
    return server.get_metric(f'afterglow_choices_in_flight{{model="{LONG_NAME}"}}')


def read_to_end(connection: socket.socket, slow_reads: int = 0) -> bytes:
    """Read until the connection or the response ends, the first `slow_reads` times slowly."""
    received = b""
    while not received.endswith(b"0\r\n\r\n") and (data := connection.recv(1 << 15)):
        received += data
        slow_reads -= 1
        time.sleep(0.03 if slow_reads > 0 else 0)
    return received


def test_the_tickets_of_unread_streams_are_free_once_generation_ends() -> None:
    arguments = ("--context", "2048", "--sequences", "2", "--max-queue", "3", "--stall-seconds", "600")
    with run_server_with_long_name(*arguments) as server, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(open_unread_stream(server, max_tokens=500)) for _ in range(5)]
        assert wait_until(60, lambda: count_in_flight(server) == 5)
        assert server.chat(model=None)["status"] == 429
        assert wait_until(60, lambda: count_in_flight(server) == 0)
        assert get_text(server.chat(model=None)) == CYCLE[:8]
        assert server.get_metric("afterglow_stalled_connections_total") == 0
        assert b"[DONE]" in read_to_end(connections[0])  # the rest of the response was not lost


def test_a_stream_without_progress_is_ended_and_what_waits_for_it_is_bounded() -> None:
    arguments = ("--context", "8192", "--sequences", "2", "--stall-seconds", "1", "--max-buffered-tokens", "1000")
    with run_server_with_long_name(*arguments) as server, contextlib.ExitStack() as stack:
        slow = stack.enter_context(open_unread_stream(server, max_tokens=600))
        assert b"[DONE]" in read_to_end(slow, slow_reads=60)  # progress, although it takes longer than a second
        assert server.get_metric("afterglow_stalled_connections_total") == 0
        connections = [stack.enter_context(open_unread_stream(server, max_tokens=8000)) for _ in range(2)]
        assert wait_until(120, lambda: server.get_metric("afterglow_stalled_connections_total") == 2)
        assert wait_until(60, lambda: count_in_flight(server) == 0)
        assert server.get_counters(LONG_NAME)["decodes"] < 6000  # not 8,000: the requests were cancelled
        for connection in connections:
            with pytest.raises(ConnectionError):
                read_to_end(connection)
        assert get_text(server.chat(model=None)) == CYCLE[:8]


def test_a_stream_whose_client_reads_too_slowly_ends_long_before_it_stalls() -> None:
    arguments = ("--context", "8192", "--sequences", "2", "--stall-seconds", "600", "--max-buffered-tokens", "500")
    with run_server_with_long_name(*arguments) as server, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(open_unread_stream(server, max_tokens=8000)) for _ in range(2)]
        assert wait_until(60, lambda: count_in_flight(server) == 2)
        assert wait_until(60, lambda: count_in_flight(server) == 0)
        assert server.get_counters(LONG_NAME)["decodes"] < 4000
        assert server.get_metric("afterglow_stalled_connections_total") == 0
        assert get_text(server.chat(model=None)) == CYCLE[:8]
        for connection in connections:
            assert b"too slowly" in read_to_end(connection)


# --- overload


def test_the_queue_is_bounded_and_health_responds_under_overload(single_sequence_server: ServerProcess) -> None:
    async def send_requests() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=single_sequence_server.url, timeout=240, limits=limits) as client:
            body = {**LONG_REQUEST, "max_tokens": 200}
            requests = (client.post("/v1/chat/completions", json=body) for _ in range(MAX_QUEUE * 50))
            return await asyncio.gather(*requests)

    waits: list[float] = []
    finished = threading.Event()
    began = time.monotonic()

    def poll_health() -> None:
        while not finished.is_set():
            started = time.monotonic()
            assert single_sequence_server.http.get("/health").status_code == 200
            waits.append(time.monotonic() - started)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll_health)
        responses = asyncio.run(send_requests())
        finished.set()
        polling.result()
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 1 + MAX_QUEUE  # one runs, the others wait
    rejected = next(response for response in responses if response.status_code == 429)
    assert int(rejected.headers["Retry-After"]) >= 1
    assert rejected.json()["error"]["code"] == "queue_full"
    assert all(get_text(response.json()) for response in responses if response.status_code == 200)
    assert statistics.median(waits) < (time.monotonic() - began) / 4  # no response waits for the end of the requests


def test_concurrent_requests_share_decodes(server: ServerProcess) -> None:
    def complete_in_thread(number: int) -> str | None:
        with server.client() as client:
            messages: list[Any] = [{"role": "user", "content": f"thread {number}"}]
            completion = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, temperature=0)
            return completion.choices[0].message.content

    async def complete_in_tasks() -> list[str]:
        async with server.async_client() as client:

            async def complete(number: int) -> str:
                messages: list[Any] = [{"role": "user", "content": f"task {number}"}]
                stream = await client.chat.completions.create(
                    model="hybrid", messages=messages, max_tokens=200, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(complete(number) for number in range(12)))

    with ThreadPoolExecutor(9) as pool:
        threads = [pool.submit(complete_in_thread, number) for number in range(8)]
        streamed = pool.submit(lambda: asyncio.run(complete_in_tasks()))
        assert {thread.result() for thread in threads} == {(CYCLE * 2)[:30]}
        assert set(streamed.result()) == {(CYCLE * 9)[:200]}  # long enough to meet each other on a busy machine
    assert server.get_counters("hybrid")["max_batch_jobs"] > 1


# --- crashing engines


def test_a_killed_engine_ends_its_own_streams_only_and_is_restarted() -> None:
    arguments = [f"tiny={models.get_path('successor-attention')}", f"other={models.get_path('successor-hybrid')}"]
    with run_server(*arguments, "--context", "32768", "--sequences", "8") as server:
        received: list[str] = [""] * 8
        all_started = threading.Barrier(9)

        def read_stream(number: int) -> None:
            url, body = f"{server.url}/v1/chat/completions", {**LONG_REQUEST, "stream": True}
            with httpx.stream("POST", url, json=body, timeout=240) as stream:
                for index, line in enumerate(stream.iter_lines()):
                    received[number] += line + "\n"
                    if index == 10:
                        all_started.wait()

        def complete_with_other_model() -> str:
            body = {**LONG_REQUEST, "model": "other", "max_tokens": 1500}
            return get_text(server.post("/v1/chat/completions", body).json())

        with ThreadPoolExecutor(9) as pool:
            streams = [pool.submit(read_stream, number) for number in range(8)]
            all_started.wait()
            other = pool.submit(complete_with_other_model)
            victim = next(engine for engine in server.list_engines() if _maps_file(engine.pid, "successor-attention"))
            os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            for stream in streams:
                stream.result(240)
            assert get_text(server.chat()) == CYCLE[:8]
            assert time.monotonic() - killed < 240
            for number in range(2):  # requests sent right after a death wait for the next engine
                victim = next(one for one in server.list_engines() if _maps_file(one.pid, "successor-attention"))
                os.kill(victim.pid, signal.SIGKILL)
                assert get_text(server.chat(f"after death {number}")) == CYCLE[:8]
            assert other.result() == (CYCLE * 60)[:1500]
        for text in received:
            last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
            assert last["error"]["code"] == "engine_crashed"
            assert "[DONE]" not in text
        assert server.get_metric('afterglow_engine_restarts{model="tiny"}') == 3
        assert server.get_metric('afterglow_engine_restarts{model="other"}') == 0


def _maps_file(pid: int, name: str) -> bool:
    with open(f"/proc/{pid}/maps") as maps:
        return name in maps.read()


def test_the_openai_client_raises_if_the_engine_crashes_during_a_stream() -> None:
    model = f"tiny={models.get_path('successor-attention')}"
    with run_server(model, "--context", "32768") as server, server.client() as client:
        stream = client.chat.completions.create(**LONG_REQUEST, stream=True)  # type: ignore[call-overload]
        next(iter(stream))
        os.kill(server.list_engines()[0].pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine crashed"):
            list(stream)


# --- template processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_dead_template_process_is_replaced_without_an_error(server: ServerProcess, number: signal.Signals) -> None:
    processes = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if any("sandbox_child" in argument for argument in child.cmdline())
    ]
    assert processes
    for process in processes:
        process.send_signal(number)
    assert wait_until(60, lambda: all(is_gone(process.pid) for process in processes))
    for name in ("tiny", "hybrid", "reasoning"):
        response = server.http.post("/v1/chat/completions", json={"model": name, "messages": MESSAGES, "max_tokens": 3})
        assert response.status_code == 200, response.text
