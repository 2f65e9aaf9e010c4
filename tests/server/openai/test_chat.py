"""/v1/chat/completions with OpenAI's client: whole completions and streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from afterglow.testing.models import vocabulary
from support.media_files import encode_data_uri, encode_image, gradient
from support.openai_schemas import ChatCompletion, ChatCompletionChunk, validate
from support.server_process import CYCLE, PICK_TOOL, ServerProcess, get_text

pytestmark = pytest.mark.native

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def test_a_completion_matches_the_openai_type(server: ServerProcess) -> None:
    body = server.chat(max_tokens=5, logprobs=True, top_logprobs=2)
    completion = validate(ChatCompletion, {key: value for key, value in body.items() if key != "status"})
    assert completion.choices[0].message.content == "abcde"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.completion_tokens, completion.usage.total_tokens) == (
        5,
        completion.usage.prompt_tokens + 5,
    )
    assert completion.system_fingerprint
    assert completion.system_fingerprint.startswith("afterglow-")


def test_a_stream_has_the_same_text_as_the_whole_completion(server: ServerProcess) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    with server.client() as client:
        completion = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == completion.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]


def test_chunks_match_the_openai_type(server: ServerProcess) -> None:
    body = {
        "model": "reasoning",
        "messages": MESSAGES,
        "max_tokens": 40,
        "reasoning_budget": 3,
        "logprobs": True,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    events = server.collect_events("/v1/chat/completions", body)
    chunks = [validate(ChatCompletionChunk, event) for event in events]
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 80
    assert not chunks[-1].choices


def test_usage_reports_cached_tokens(server: ServerProcess) -> None:
    first = server.chat("a question that no other test asks")
    second = server.chat("a question that no other test asks")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < first["usage"]["prompt_tokens"] // 2
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"]


def test_usage_reports_draft_tokens(server: ServerProcess) -> None:
    details = server.chat(max_tokens=40)["usage"]["completion_tokens_details"]
    assert min(details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) >= 0


def test_reasoning_is_separate_from_the_text_and_counted(server: ServerProcess) -> None:
    completion = server.chat(model="reasoning", reasoning_budget=4, max_tokens=24)
    message = completion["choices"][0]["message"]
    assert message["reasoning_content"] == "abcd"
    assert message["content"].startswith("abc")
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    body = {"model": "reasoning", "messages": MESSAGES, "reasoning_budget": 4, "max_tokens": 24, "temperature": 0}
    deltas = [chunk["choices"][0]["delta"] for chunk in server.collect_events("/v1/chat/completions", body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "abcd"
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_a_required_tool_call_conforms_to_its_schema(server: ServerProcess) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [PICK_TOOL], "tool_choice": "required"}
    options |= {"parallel_tool_calls": False, "seed": 1}
    with server.client() as client:
        completion = client.chat.completions.create(**options)
        (call,) = completion.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "pick"
        assert json.loads(call.function.arguments)["letter"] in ("a", "b")
        assert completion.choices[0].finish_reason == "tool_calls"
        chunks = list(client.chat.completions.create(**options, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function is not None
    assert deltas[0].id
    assert deltas[0].function.name == "pick"
    arguments = "".join(delta.function.arguments or "" for delta in deltas if delta.function)
    assert json.loads(arguments)["letter"] in ("a", "b")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("type", [[], {}, [None], {"type": "function"}, 1, None])
def test_a_tool_whose_type_is_no_text_is_refused_with_its_position(server: ServerProcess, type: Any) -> None:
    body = server.chat(tools=[PICK_TOOL, {**PICK_TOOL, "type": type}])
    assert (body["status"], body["error"]["param"]) == (400, "tools[1]")


def test_tool_results_are_part_of_the_prompt(server: ServerProcess) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "pick", "arguments": '{"letter": "a"}'}}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "picked"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": [PICK_TOOL]}
    prompt = server.post("/apply-template", body).json()["prompt"]
    assert "picked" in prompt
    assert '"letter": "a"' in prompt


def test_the_output_conforms_to_a_json_schema(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    completion = server.chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": {**schema, "additionalProperties": False}, "strict": True},
        },
        max_tokens=60,
    )
    assert json.loads(get_text(completion))["ok"] in (True, False)
    assert completion["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_inside_a_json_object(server: ServerProcess, stream: bool) -> None:
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "stop": ["{", ":"], "max_tokens": 60}
    if stream:
        events = server.collect_events("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, **fields})
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        completion = server.chat(**fields)
        assert (completion["status"], completion["choices"][0]["finish_reason"]) == (200, "stop")


def test_a_trailing_assistant_message_is_continued(server: ServerProcess) -> None:
    """The tiny model writes the alphabet from the letter that it reads last."""
    messages = [*MESSAGES, {"role": "assistant", "content": "xyz and abc"}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    with server.client() as client:
        completion = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
    assert completion.choices[0].message.content == "defg"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "defg"


def test_an_unknown_model_gets_404(server: ServerProcess) -> None:
    with server.client() as client, pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert error.value.code == "model_not_found"
    assert "tiny" in error.value.message


def test_a_prompt_over_the_context_length_gets_400_with_both_lengths(server: ServerProcess) -> None:
    completion = server.chat("x" * 3000)
    assert completion["status"] == 400
    assert completion["error"]["code"] == "context_length_exceeded"
    assert "2,048" in completion["error"]["message"]
    assert "3,0" in completion["error"]["message"]


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_a_long_conversation_is_truncated_only_on_request_and_reported(server: ServerProcess, policy: str) -> None:
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    for number in range(20):
        messages.append({"role": "user", "content": f"{number} " + "x" * 150})
        messages.append({"role": "assistant", "content": "y" * 20})
    messages.append({"role": "user", "content": "the newest question"})
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    assert server.post("/v1/chat/completions", body).status_code == 400
    completion = server.post("/v1/chat/completions", {**body, "overflow": policy}).json()
    assert get_text(completion) == CYCLE[:8]
    assert completion["overflow"]["policy"] == policy
    assert completion["overflow"]["dropped_messages"] >= 10
    assert completion["overflow"]["dropped_tokens"] > 1000
    assert completion["usage"]["prompt_tokens"] <= 2048 - 8
    chunks = server.collect_events("/v1/chat/completions", {**body, "overflow": policy})
    assert chunks[0]["overflow"]["dropped_messages"] == completion["overflow"]["dropped_messages"]


def test_a_deadline_returns_what_has_been_generated(server: ServerProcess) -> None:
    completion = server.chat(max_tokens=2000, deadline=0.05)
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["choices"][0]["stop_reason"] == "deadline"
    assert completion["usage"]["completion_tokens"] < 2000


@pytest.mark.native
def test_messages_may_have_what_clients_add(server: ServerProcess) -> None:
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "pick", "arguments": {"letter": "a"}}}
    cached = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [cached], "name": None},
        {"role": "user", "content": "pick", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "audio": None, "function_call": None},
        {"role": "tool", "content": "picked", "tool_call_id": "c1", "name": "pick"},
        {"role": "assistant", "content": "b", "annotations": [], "refusal": None, "tool_calls": []},
        {"role": "user", "content": "again", "provider_specific_fields": {"a": 1}},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200
    ignored = "messages.content.cache_control, messages.provider_specific_fields"
    assert response.headers["x-afterglow-ignored"] == ignored


@pytest.mark.native
def test_reasoning_of_a_message_has_three_names(server: ServerProcess) -> None:
    def render(**fields: Any) -> str:
        answer = {"role": "assistant", "content": "b", **fields}
        messages = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "c"}]
        return str(server.post("/cache/explain", {"model": "reasoning", "messages": messages}).json()["prompt_tokens"])

    expected = render(reasoning_content="a thought")
    assert render(reasoning="a thought") == render(thinking="a thought") == expected


@pytest.mark.native
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_every_body_is_json(server: ServerProcess, content_type: str | None) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    headers = {} if content_type is None else {"content-type": content_type}
    content = json.dumps(body).encode()
    response = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 200
    broken = server.http.post("/v1/chat/completions", content=b"messages=a", headers=headers).json()["error"]
    assert broken["code"] == "invalid_json"


@pytest.mark.native
def test_a_call_that_is_not_enforced_is_named_and_checked(server: ServerProcess) -> None:
    properties = {"city": {"type": "string", "pattern": "^(?!x).*$"}, "count": {"type": "integer"}}
    function = {"name": "find", "parameters": {"type": "object", "properties": properties}}
    call = '<tool_call>{"name": "find", "arguments": {"count": %s}}</tool_call>'
    for count, violation in (("3", None), ('"x"', "`count` must be of the type integer, not string")):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [PICK_TOOL, {"type": "function", "function": function}],
            "response_format": {"type": "choice", "choices": [call % count]},
            "logit_bias": {str(vocabulary.get_byte_token(ord("<"))): 90},
            "max_tokens": 100,
            "temperature": 0,
        }
        response = server.post("/v1/chat/completions", body)
        assert response.headers["x-afterglow-unenforced"] == "find"
        choice = response.json()["choices"][0]
        ((call_id, name),) = [(item["id"], item["function"]["name"]) for item in choice["message"]["tool_calls"]]
        expected = None if violation is None else [{"id": call_id, "message": violation}]
        assert (name, choice.get("invalid_tool_calls")) == ("find", expected)
        last = server.collect_events("/v1/chat/completions", body)[-1]["choices"][0]
        assert ("invalid_tool_calls" in last) == (violation is not None)
    strict = {"type": "function", "function": {**function, "strict": True}}
    assert server.chat(tools=[strict])["status"] == 400
    enforced = server.post("/v1/chat/completions", {**body, "tools": [PICK_TOOL]})
    assert "x-afterglow-unenforced" not in enforced.headers


def test_the_client_raises_for_media_of_a_text_model(server: ServerProcess) -> None:
    image = encode_data_uri(encode_image(gradient()))
    messages: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_image", "image_url": image, "detail": "auto"}]},
    ]
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="only text"):
            client.chat.completions.create(model="tiny", messages=messages)
        with pytest.raises(openai.BadRequestError, match="only text"):
            client.responses.create(model="tiny", input=items)
