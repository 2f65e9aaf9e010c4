"""/v1/chat/completions with OpenAI's own client: what it says, as a whole and as it streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from afterglow.engine.types.request import Usage
from afterglow.server.generation import build_prediction_details
from support.openai_schemas import ChatCompletion, ChatCompletionChunk, valid
from support.server_process import CYCLE, PICK, ServerProcess, text_of

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_an_answer_is_what_openai_s_type_says(server: ServerProcess) -> None:
    answer = server.chat(max_tokens=5, logprobs=True, top_logprobs=2)
    read = valid(ChatCompletion, {key: value for key, value in answer.items() if key != "status"})
    assert read.choices[0].message.content == "abcde"
    assert read.choices[0].finish_reason == "length"
    assert read.usage is not None
    assert (read.usage.completion_tokens, read.usage.total_tokens) == (5, read.usage.prompt_tokens + 5)
    assert read.system_fingerprint
    assert read.system_fingerprint.startswith("afterglow-")


def test_a_stream_says_the_same_as_the_whole_answer(server: ServerProcess) -> None:
    with server.client() as client:
        whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, temperature=0)
        stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, temperature=0, stream=True)
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]


def test_every_chunk_is_what_openai_s_type_says(server: ServerProcess) -> None:
    body = {
        "model": "thinker",
        "messages": HELLO,
        "max_tokens": 40,
        "reasoning_budget": 3,
        "logprobs": True,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    chunks = [valid(ChatCompletionChunk, one) for one in server.events("/v1/chat/completions", body)]
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 80
    assert not chunks[-1].choices


def test_a_prompt_that_was_computed_is_reported_as_cached(server: ServerProcess) -> None:
    first = server.chat("a question that nobody asked before")
    again = server.chat("a question that nobody asked before")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < first["usage"]["prompt_tokens"] // 2
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_what_was_guessed_before_it_was_drawn_is_told(server: ServerProcess) -> None:
    first = Usage(generated_tokens=9, draft_tokens=5, accepted_tokens=3, draft_steps=2, speculation_seconds_saved=0.5)
    assert build_prediction_details(
        [first, Usage(generated_tokens=4, draft_tokens=2, draft_steps=1), Usage(generated_tokens=1)]
    ) == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 4,
        "mean_prediction_length": 2.33,
        "prediction_seconds_saved": 0.5,
    }
    details = server.chat(max_tokens=40)["usage"]["completion_tokens_details"]
    assert min(details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) >= 0


def test_a_thought_comes_apart_from_the_answer_and_is_counted(server: ServerProcess) -> None:
    answer = server.chat(model="thinker", reasoning_budget=4, max_tokens=24)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "abcd"
    assert message["content"].startswith("abc")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    body = {"model": "thinker", "messages": HELLO, "reasoning_budget": 4, "max_tokens": 24, "temperature": 0}
    deltas = [chunk["choices"][0]["delta"] for chunk in server.events("/v1/chat/completions", body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "abcd"
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_a_call_of_a_tool_comes_as_one_and_fits_its_schema(server: ServerProcess) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [PICK], "tool_choice": "required"}
        whole = client.chat.completions.create(**options, parallel_tool_calls=False, seed=1)
        (call,) = whole.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "pick"
        assert json.loads(call.function.arguments)["letter"] in ("a", "b")
        assert whole.choices[0].finish_reason == "tool_calls"
        chunks = list(client.chat.completions.create(**options, parallel_tool_calls=False, seed=1, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].function is not None
    assert pieces[0].id
    assert pieces[0].function.name == "pick"
    written = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert json.loads(written)["letter"] in ("a", "b")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_what_a_tool_returned_is_read(server: ServerProcess) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "pick", "arguments": '{"letter": "a"}'}}]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "picked"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": [PICK]}
    shown = server.post("/apply-template", body).json()["prompt"]
    assert "picked" in shown
    assert '"letter": "a"' in shown


def test_openai_s_client_parses_an_answer_with_a_schema(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = server.chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": {**schema, "additionalProperties": False}, "strict": True},
        },
        max_tokens=60,
    )
    assert json.loads(text_of(answer))["ok"] in (True, False)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_an_unknown_model_is_not_found(server: ServerProcess) -> None:
    with server.client() as client, pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert error.value.code == "model_not_found"
    assert "tiny" in error.value.message


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(server: ServerProcess) -> None:
    answer = server.chat("x" * 3000)
    assert answer["status"] == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "2,048" in answer["error"]["message"]
    assert "3,0" in answer["error"]["message"]


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_a_long_conversation_is_cut_only_where_that_is_asked_for_and_says_so(
    server: ServerProcess, policy: str
) -> None:
    turns: list[Any] = [{"role": "system", "content": "be brief"}]
    for number in range(20):
        turns.append({"role": "user", "content": f"{number} " + "x" * 150})
        turns.append({"role": "assistant", "content": "y" * 20})
    turns.append({"role": "user", "content": "the newest question"})
    body = {"model": "tiny", "messages": turns, "max_tokens": 8, "temperature": 0}
    assert server.post("/v1/chat/completions", body).status_code == 400
    answer = server.post("/v1/chat/completions", {**body, "overflow": policy}).json()
    assert text_of(answer) == CYCLE[:8]
    assert answer["overflow"]["policy"] == policy
    assert answer["overflow"]["dropped_messages"] >= 10
    assert answer["overflow"]["dropped_tokens"] > 1000
    assert answer["usage"]["prompt_tokens"] <= 2048 - 8
    streamed = server.events("/v1/chat/completions", {**body, "overflow": policy})
    assert streamed[0]["overflow"]["dropped_messages"] == answer["overflow"]["dropped_messages"]


def test_a_deadline_ends_an_answer_with_what_there_is(server: ServerProcess) -> None:
    answer = server.chat(max_tokens=2000, deadline=0.05)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["stop_reason"] == "deadline"
    assert answer["usage"]["completion_tokens"] < 2000
