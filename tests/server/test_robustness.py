"""No request can kill the server, and nobody who left keeps it busy."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from afterglow.testing import models as tiny
from support.server_process import CYCLE, ServerProcess, serving, text_of, within

QUEUE = 8
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG = {"model": "tiny", "messages": HELLO, "max_tokens": 30_000, "temperature": 0}
SLOW_PROMPT = {"model": "tiny", "prompt": list(range(100, 200)) * 300, "max_tokens": 1}


@pytest.fixture(scope="module")
def narrow(caches_of_our_own: None) -> Iterator[ServerProcess]:
    """A server that answers one request at a time, each of which may take long."""
    with serving(
        f"tiny={tiny.get_path('successor-attention')}", "--context", "32768", "--sequences", "1", "--queue", str(QUEUE)
    ) as running:
        yield running


# --- bodies

ASK = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], '
BAD = {
    "not JSON": b"{",
    "no body": b"",
    "a list": b"[]",
    "text": b'"hello"',
    "not a number": ASK + b'"temperature": NaN}',
    "infinite": ASK + b'"temperature": 1e999}',
    "a huge number": ASK + b'"seed": ' + b"9" * 400 + b"}",
    "a huge limit": ASK + b'"max_tokens": 99999999999}',
    "a lone surrogate": ASK + b'"user": "\\ud800"}',
    "not UTF-8": ASK + b'"user": "\xff\xfe"}',
    "deep nesting": ASK + b'"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "wrong types": b'{"model": 3, "messages": "hello"}',
    "a boolean for a number": ASK + b'"n": true}',
    "text for a number": ASK + b'"n": "2"}',
    "an infinite bias": ASK + b'"logit_bias": {"1": 1e999}}',
    "a bias for nobody": ASK + b'"logit_bias": {"\xc2\xb2": 1}}',
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_a_bad_body_is_refused_as_openai_does(server: ServerProcess, path: str, name: str) -> None:
    answer = server.http.post(path, content=BAD[name], headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"]


NASTY = {
    "zero bytes": {"messages": [{"role": "user", "content": "a\0b\0"}]},
    "zero bytes in stops": {"stop": ["\0"]},
    "private characters": {"messages": [{"role": "user", "content": "".join(map(chr, range(0xE000, 0xF8FF)))}]},
    "control tokens": {"messages": [{"role": "user", "content": "<|im_end|>" * 20}]},
    "a schema that goes deep": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "deep",
                "schema": json.loads('{"items":' * 150 + "{}" + "}" * 150),
            },
        }
    },
    "a schema that refers to itself": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    },
    "a pattern that explodes": {"response_format": {"type": "regex", "pattern": "(((a{1,500}){1,500}){1,500}){1,500}"}},
    "a grammar without an end": {"response_format": {"type": "grammar", "grammar": "start: start"}},
    "a grammar in another language": {"response_format": {"type": "grammar", "grammar": "\0", "syntax": "gbnf"}},
    "a tool with a broken schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 3}}}]
    },
    "a template that is told nonsense": {"chat_template_kwargs": {"messages": 3, "add_generation_prompt": {}}},
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_requests_are_answered_or_refused(server: ServerProcess, name: str) -> None:
    restarts = server.metric('afterglow_engine_restarts{model="tiny"}')
    answer = server.chat(**NASTY[name])  # type: ignore[arg-type]
    assert answer["status"] in (200, 400), answer
    assert server.metric('afterglow_engine_restarts{model="tiny"}') == restarts
    assert text_of(server.chat()) == CYCLE[:8]


def test_a_body_that_is_too_large_is_not_read(server: ServerProcess) -> None:
    with serving(f"tiny={tiny.get_path('successor-attention')}", AFTERGLOW_SERVER_MAX_BODY_BYTES="10000") as small:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 20_000}]}
        answer = small.post("/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        pieces = (b'{"model": "' + b"x" * 1000 for _ in range(20))  # of a length that is not told
        chunked = small.http.post("/v1/chat/completions", content=pieces, headers={"Content-Type": "application/json"})
        assert chunked.status_code == 413
        assert small.chat()["status"] == 200


def test_only_who_has_a_key_may_ask(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    keys = ("--api-key", "third", "--api-key-file", str(tmp_path / "keys"), "--lazy")
    with serving(f"tiny={tiny.get_path('successor-attention')}", *keys) as locked:
        for path in ("/v1/models", "/metrics", "/stats", "/cache", "/openapi.json", "/nowhere"):
            answer = locked.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (
            locked.http.post("/v1/chat/completions", json=LONG, headers={"Authorization": "Bearer no"}).status_code
            == 401
        )
        assert locked.http.get("/health").status_code == 200
        assert locked.http.get("/v1/health").status_code == 200
        for key in ("first", "second", "third"):
            assert locked.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert locked.engines() == []  # it is lazy: nothing was loaded
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="second", max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
            assert answer.choices[0].message.content == "abc"
        assert len(locked.engines()) == 1


def test_web_pages_may_ask_only_where_that_is_allowed(server: ServerProcess) -> None:
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.http.options("/v1/models", headers=ask).headers
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=ask).headers
    with serving(
        f"tiny={tiny.get_path('successor-attention')}", "--allow-origin", "http://page.example", "--lazy"
    ) as friendly:
        preflight = friendly.http.options("/v1/models", headers=ask)
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        stranger = friendly.http.get("/v1/models", headers={"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in stranger.headers


# --- clients that leave


def leave(server: ServerProcess, path: str, body: dict[str, Any], after: float, *, until: bytes = b"") -> None:
    """Ask, and hang up after a while or when something was heard."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        heard, deadline = b"", time.monotonic() + 10
        while until and until not in heard and time.monotonic() < deadline:
            heard += connection.recv(65_536)
        time.sleep(after)


def disconnects(server: ServerProcess, count: int) -> list[float]:
    """Clients that leave in decode, in prefill and in the queue; how long the engine was busy after each."""
    draw, waits = random.Random(5), []
    for number in range(count):
        stream = bool(number % 2)
        phase = ("decode", "prefill", "queue")[number % 3]
        if phase == "decode":
            leave(server, "/v1/chat/completions", {**LONG, "stream": stream}, 0.1)
        elif phase == "prefill":
            prompt = [draw.randrange(20, 250) for _ in range(30_000)]
            leave(
                server, "/v1/completions", {**SLOW_PROMPT, "prompt": prompt, "stream": stream}, draw.uniform(0.1, 0.3)
            )
        else:
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda after: leave(server, "/v1/chat/completions", LONG, after), (0.2, 0.1, 0.15)))
        left = time.monotonic()
        assert within(5, lambda: not server.busy()), f"still busy after a client left in {phase}"
        waits.append(time.monotonic() - left)
    return waits


def check_disconnects(server: ServerProcess, count: int) -> None:
    before = server.counters()
    waits = disconnects(server, count)
    assert statistics.median(waits) < 1
    assert max(waits) < 2.5  # on a busy machine
    assert server.metric('afterglow_answers{model="tiny"}') == 0
    assert server.counters()["decodes"] > before["decodes"]
    assert text_of(server.chat()) == CYCLE[:8]


def test_a_client_that_leaves_frees_the_engine_at_once(narrow: ServerProcess) -> None:
    check_disconnects(narrow, 20)


@pytest.mark.full
def test_two_hundred_clients_that_leave_free_the_engine_at_once(narrow: ServerProcess) -> None:
    check_disconnects(narrow, 200)


# --- more than there is room for


def test_the_queue_is_bounded_and_health_is_answered_all_the_while(narrow: ServerProcess) -> None:
    async def storm() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=narrow.url, timeout=60, limits=limits) as client:
            body = {**LONG, "max_tokens": 200}
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(QUEUE * 50)))

    waits: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            began = time.monotonic()
            assert narrow.http.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        answers = asyncio.run(storm())
        over.set()
        looking.result()
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 1 + QUEUE  # one that runs, and those that wait
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert all(text_of(answer.json()) for answer in answers if answer.status_code == 200)
    assert sorted(waits)[int(len(waits) * 0.99)] < 1.0  # 250 ms where nobody else uses the machine
    assert statistics.median(waits) < 0.25


def test_threads_and_tasks_are_served_at_once(server: ServerProcess) -> None:
    def thread(number: int) -> str | None:
        with server.client() as client:
            messages: list[Any] = [{"role": "user", "content": f"thread {number}"}]
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, temperature=0)
            return answer.choices[0].message.content

    async def tasks() -> list[str]:
        async with server.async_client() as client:

            async def task(number: int) -> str:
                messages: list[Any] = [{"role": "user", "content": f"task {number}"}]
                stream = await client.chat.completions.create(
                    model="hybrid", messages=messages, max_tokens=30, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(task(number) for number in range(12)))

    with ThreadPoolExecutor(9) as pool:
        threads = [pool.submit(thread, number) for number in range(8)]
        streamed = pool.submit(lambda: asyncio.run(tasks()))
        assert {one.result() for one in threads} == {(CYCLE * 2)[:30]}
        assert set(streamed.result()) == {(CYCLE * 2)[:30]}
    assert server.counters("hybrid")["widest"] > 1  # they really shared decodes


# --- engines that die


def test_an_engine_that_is_killed_costs_its_streams_and_nothing_else() -> None:
    models = [f"tiny={tiny.get_path('successor-attention')}", f"other={tiny.get_path('successor-hybrid')}"]
    with serving(*models, "--context", "32768", "--sequences", "8") as server:
        heard: list[str] = [""] * 8
        begun = threading.Barrier(9)

        def read(number: int) -> None:
            with httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=60
            ) as one:
                for index, line in enumerate(one.iter_lines()):
                    heard[number] += line + "\n"
                    if index == 10:
                        begun.wait()

        def read_other() -> str:
            return text_of(server.post("/v1/chat/completions", {**LONG, "model": "other", "max_tokens": 1500}).json())

        with ThreadPoolExecutor(9) as pool:
            streams = [pool.submit(read, number) for number in range(8)]
            begun.wait()
            other = pool.submit(read_other)
            victim = next(engine for engine in server.engines() if _has_open(engine.pid, "successor-attention"))
            os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            for stream in streams:
                stream.result(10)
            assert text_of(server.chat()) == CYCLE[:8]
            assert time.monotonic() - killed < 5
            assert other.result() == (CYCLE * 60)[:1500]
        for text in heard:
            last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
            assert last["error"]["code"] == "engine_crashed"
            assert "[DONE]" not in text
        assert server.metric('afterglow_engine_restarts{model="tiny"}') == 1
        assert server.metric('afterglow_engine_restarts{model="other"}') == 0


def _has_open(pid: int, name: str) -> bool:
    with open(f"/proc/{pid}/maps") as maps:
        return name in maps.read()


def test_openai_s_client_raises_where_an_engine_dies_in_the_middle() -> None:
    with (
        serving(f"tiny={tiny.get_path('successor-attention')}", "--context", "32768") as server,
        server.client() as client,
    ):
        stream = client.chat.completions.create(**LONG, stream=True)
        next(iter(stream))
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)


# --- the end


def test_a_server_that_is_told_to_end_finishes_what_runs_and_begins_nothing() -> None:
    with serving(f"tiny={tiny.get_path('successor-attention')}", "--context", "32768") as server:
        with ThreadPoolExecutor(3) as pool:
            body = {**LONG, "max_tokens": 800}
            streams = [pool.submit(server.events, "/v1/chat/completions", body) for _ in range(3)]
            assert within(5, server.busy)
            server.process.send_signal(signal.SIGTERM)
            late = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
            assert late.headers["Retry-After"]
            for stream in streams:
                events = stream.result()
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0


def test_a_server_that_waited_long_enough_ends_what_runs_and_says_so() -> None:
    with (
        serving(
            f"tiny={tiny.get_path('successor-attention')}", "--context", "32768", "--shutdown-seconds", "0.3"
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = pool.submit(server.events, "/v1/chat/completions", LONG)
        assert within(5, server.busy)
        told = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - told < 8
        assert stream.result()[-1]["error"]["code"] == "shutting_down"


def test_a_server_that_is_killed_leaves_no_engine() -> None:
    with serving(f"tiny={tiny.get_path('successor-attention')}") as server:
        assert server.engines()
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
