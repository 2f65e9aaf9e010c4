"""A stream has keep-alive pings while its model is loaded or its summary is written, on every API with events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from afterglow.testing import models
from support.server_process import ServerProcess

pytestmark = pytest.mark.native
MESSAGES: list[Any] = [{"role": "user", "content": "abc"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/responses": {"input": "abc", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/completion": {"prompt": "abc", "n_predict": 4},
    "/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def pinging(caches_of_our_own: None) -> Iterator[ServerProcess]:
    """A server that sends keep-alive pings a hundred times a second."""
    process = ServerProcess(
        f"tiny={models.get_path('successor-attention')}", "--context", "1024", AFTERGLOW_SERVER_PING_SECONDS="0.01"
    )
    yield process
    process.stop()


def read_lines(server: ServerProcess, path: str, body: dict[str, Any]) -> list[str]:
    with server.http.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as response:
        assert response.status_code == 200
        return [line for line in response.iter_lines() if line]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_pings_while_its_model_is_loaded(pinging: ServerProcess, path: str) -> None:
    assert pinging.post("/models/unload", {"model": "tiny"}).status_code == 200
    first, *others = read_lines(pinging, path, BODIES[path])
    assert first == ("event: ping" if path == "/v1/messages" else ": ping")
    assert any(line.startswith("data: ") and "error" not in line[:20] for line in others)


def test_a_stream_has_pings_while_its_summary_is_written(pinging: ServerProcess) -> None:
    history = [{"role": role, "content": f"{role} " + "x" * 100} for role in ["user", "assistant"] * 8]
    body = {"messages": [*history, *MESSAGES], "max_tokens": 4, "temperature": 0, "overflow": "compact"}
    lines = read_lines(pinging, "/v1/chat/completions", body)
    assert lines[0] == ": ping"
    assert any('"summaries_written":5' in line for line in lines)


def test_the_clients_of_openai_and_anthropic_read_such_streams(pinging: ServerProcess) -> None:
    pinging.post("/models/unload", {"model": "tiny"})
    with openai.OpenAI(base_url=f"{pinging.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
    pinging.post("/models/unload", {"model": "tiny"})
    with (
        anthropic.Anthropic(base_url=pinging.url, api_key="none", max_retries=0) as other,
        other.messages.stream(model="tiny", messages=MESSAGES, max_tokens=4) as stream,
    ):
        assert stream.get_final_message().usage.output_tokens == 4
