"""The Python client of Ollama against a server with tiny models and with SmolLM2."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import ollama
import pydantic
import pytest

from afterglow.testing.models import vocabulary
from support.server_process import CYCLE, PICK_TOOL, ServerProcess, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"num_predict": 8, "temperature": 0}


@contextlib.contextmanager
def open_client(server: ServerProcess) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url, timeout=240)
    with client._client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with open_client(server) as client:
        yield client


def pick(letter: str) -> str:
    """Pick a letter.

    Args:
        letter: The letter.
    """
    return letter


@pytest.mark.native
def test_chat(client: ollama.Client) -> None:
    response = client.chat("tiny", MESSAGES, options=GREEDY)
    assert (response.message.role, response.message.content) == ("assistant", CYCLE[:8])
    assert (response.done, response.done_reason, response.eval_count) == (True, "length", 8)
    assert response.total_duration


@pytest.mark.native
def test_a_stream_adds_up_to_the_whole_response(client: ollama.Client) -> None:
    parts = list(client.chat("tiny", MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == CYCLE[:8]
    assert [part.done for part in parts].index(True) == len(parts) - 1
    assert parts[-1].done_reason == "length"


@pytest.mark.native
def test_the_async_client(server: ServerProcess) -> None:
    async def run() -> tuple[str, str]:
        client = ollama.AsyncClient(host=server.url, timeout=240)
        async with client._client:
            whole = await client.generate("tiny", "hello", options=GREEDY)
            stream = await client.chat("tiny", MESSAGES, options=GREEDY, stream=True)
            return whole.response, "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(run()) == (CYCLE[:8], CYCLE[:8])


@pytest.mark.native
def test_generate_continues_its_context(client: ollama.Client) -> None:
    first = client.generate("tiny", "hello", system="be brief", options=GREEDY)
    assert first.context
    second = client.generate("tiny", "again", context=first.context, options=GREEDY)
    assert second.context
    assert list(second.context[: len(first.context)]) == list(first.context)
    assert second.response == CYCLE[:8]
    options = {**GREEDY, "stop_token_ids": [vocabulary.get_byte_token(ord("c"))]}
    assert client.generate("tiny", "again", context=first.context, options=options).response == CYCLE[:3]


@pytest.mark.native
def test_a_call_that_a_limit_cuts_off_is_not_returned_without_its_arguments(server: ServerProcess) -> None:
    limits = range(1, 60)
    calls = []
    for limit in limits:
        options = {"num_predict": limit, "temperature": 0}
        body = {"model": "tiny", "messages": MESSAGES, "tools": [PICK_TOOL], "tool_choice": "required"}
        whole = server.post("/api/chat", {**body, "options": options, "stream": False}).json()
        lines = server.post("/api/chat", {**body, "options": options}).text.splitlines()
        streamed = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
        assert [call["function"] for call in streamed] == [
            call["function"] for call in whole["message"].get("tool_calls", ())
        ]
        calls += streamed
    assert 0 < len(calls) < len(limits)
    assert {call["function"]["arguments"].get("letter") for call in calls} <= {"a", "b"}


@pytest.mark.native
def test_tools_are_accepted_as_functions_and_calls_are_parsed(client: ollama.Client, server: ServerProcess) -> None:
    assert client.chat("tiny", MESSAGES, tools=[pick], options=GREEDY).message.content == CYCLE[:8]
    body = {"model": "tiny", "messages": MESSAGES, "tools": [PICK_TOOL], "tool_choice": "required"}
    lines = server.post("/api/chat", {**body, "options": {"temperature": 0, "num_predict": 200}}).text.splitlines()
    parts = [ollama.ChatResponse(**json.loads(line)) for line in lines]
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("pick", {"letter": "a"})
    assert pick(**call.function.arguments) == "a"
    # The client drops the ids of calls. The conversation goes on without them.
    calling = next(part.message for part in parts if part.message.tool_calls)
    result = {"role": "tool", "content": "a", "tool_name": "pick"}
    assert client.chat("tiny", [*MESSAGES, calling, result], tools=[pick], options=GREEDY).message.content == CYCLE[:8]


@pytest.mark.native
def test_the_tokens_of_an_earlier_response_are_cached(client: ollama.Client, server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "a conversation over the client of Ollama"}]
    first = client.chat("tiny", messages, options=GREEDY)
    body = {
        "model": "tiny",
        "messages": [*messages, dict(first.message.model_dump(exclude_none=True))],
        "stream": False,
    }
    body["messages"].append({"role": "user", "content": "more"})
    second = server.post("/api/chat", {**body, "options": GREEDY}).json()
    assert second["prompt_eval_cached_count"] >= (first.prompt_eval_count or 0) + 8 - 1


@pytest.mark.native
def test_think(client: ollama.Client) -> None:
    response = client.chat("reasoning", MESSAGES, think=True, options=GREEDY)
    assert (response.message.thinking, response.message.content) == (CYCLE[:8], "")
    parts = list(client.generate("reasoning", "hello", think=True, options=GREEDY, stream=True))
    assert "".join(part.thinking or "" for part in parts) == CYCLE[:8]
    assert client.chat("tiny", MESSAGES, think=True, options=GREEDY).message.thinking is None


@pytest.mark.native
def test_logprobs(client: ollama.Client) -> None:
    response = client.chat("tiny", MESSAGES, logprobs=True, top_logprobs=2, options=GREEDY)
    assert [entry.token for entry in response.logprobs or ()] == list(CYCLE[:8])


@pytest.mark.native
def test_embeddings(client: ollama.Client) -> None:
    response = client.embed("vectors", ["hello", "there"], dimensions=8)
    assert [len(vector) for vector in response.embeddings] == [8, 8]
    assert len(client.embeddings("vectors", "hello").embedding) == 64
    assert list(client.embeddings("vectors").embedding) == []


@pytest.mark.native
def test_lists_and_descriptions(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert {"tiny:latest", "hybrid:latest", "vectors:latest", "reasoning:latest"} <= set(names)
    running = {model.model: model for model in client.ps().models}
    assert running["tiny:latest"].context_length == 2048
    tiny, reasoning = client.show("tiny"), client.show("reasoning:latest")
    assert tiny.template
    assert "im_start" in tiny.template
    assert tiny.modelinfo
    assert tiny.modelinfo["general.architecture"] == "llama"
    assert tiny.capabilities == ["completion", "tools"]
    assert reasoning.capabilities == ["completion", "tools", "thinking", "insert"]
    assert client.show("vectors").capabilities == ["embedding"]


@pytest.mark.native
def test_errors_have_the_status_and_the_reason(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no model called 'nothing'") as raised:
        client.chat("nothing", MESSAGES)
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="/api/push"):
        client.push("tiny")
    with pytest.raises(ollama.ResponseError, match="/api/blobs"):
        client.create_blob(__file__)


@pytest.mark.native
def test_a_client_that_leaves_frees_the_engine(server: ServerProcess) -> None:
    with open_client(server) as client:
        stream = client.chat("tiny", MESSAGES, options={"temperature": 0, "num_predict": -1}, stream=True)
        assert next(iter(stream)).message.content == "a"
        stream.close()  # type: ignore[attr-defined]
    assert wait_until(60, lambda: not server.is_busy())


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


@pytest.mark.model
def test_structured_output_of_a_real_model(smollm2_server: ServerProcess) -> None:
    question: list[Any] = [{"role": "user", "content": "It is 20 degrees in Paris. Answer with JSON."}]
    with open_client(smollm2_server) as client:
        response = client.chat(
            "smollm2", question, format=Weather.model_json_schema(), options={"temperature": 0, "num_predict": 200}
        )
    assert Weather.model_validate_json(response.message.content or "").city


@pytest.mark.model
def test_a_real_model_generates_the_same_as_over_the_openai_api(smollm2_server: ServerProcess) -> None:
    with open_client(smollm2_server) as client:
        text = client.generate("smollm2", "What is 2+2?", options={"temperature": 0, "num_predict": 30}).response
    message = {"role": "user", "content": "What is 2+2?"}
    body = {"model": "smollm2", "messages": [message], "temperature": 0, "max_tokens": 30}
    completion = smollm2_server.post("/v1/chat/completions", body).json()
    assert text == completion["choices"][0]["message"]["content"]


@pytest.mark.native
@pytest.mark.model
def test_a_continued_turn_has_its_start_token_even_if_that_is_the_bos_token(smollm2_server: ServerProcess) -> None:
    options = {"temperature": 0, "num_predict": 4}
    with open_client(smollm2_server) as client:
        first = client.generate("smollm2", "Name a colour.", options=options)
        second = client.generate("smollm2", "And another one.", context=first.context, options=options)
    continued = list(second.context or ())[len(first.context or ()) :]
    text = smollm2_server.post("/detokenize", {"tokens": continued}).json()["content"]
    assert text.startswith("<|im_start|>system")
    assert "<|im_start|>user\nAnd another one.<|im_end|>" in text
