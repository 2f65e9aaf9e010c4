"""/v1/messages with Anthropic's client: whole messages and streams, tools, thinking, token counts, errors, models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from afterglow.testing.models import constructed, vocabulary
from afterglow.testing.models.attention import Llama
from support.server_process import CYCLE, ServerProcess, run_server

pytestmark = pytest.mark.native

GREEDY = {"temperature": 0}
EPHEMERAL: Any = {"type": "ephemeral"}
PICK: Any = {
    "name": "pick",
    "description": "Pick a letter.",
    "input_schema": {
        "type": "object",
        "properties": {"letter": {"enum": ["a", "b"]}},
        "required": ["letter"],
        "additionalProperties": False,
    },
}
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PROMPT_TOKEN_FIELDS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key and no queue. The template of its model renders the reasoning of every message."""
    path = tmp_path_factory.mktemp("models") / "thinker.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHAT_TEMPLATE", THINKING_TEMPLATE)
        constructed.write_successor_model(path, Llama())
    options = ("--private", "--context", "16384", "--sequences", "1", "--max-queue", "0", "--max-body-bytes", "20000")
    with run_server(f"thinker={path}", *options, "--api-key", "secret") as process:
        yield process


def create(client: anthropic.Anthropic, content: Any = "hello", **fields: Any) -> Message:
    """Return a message, greedy by default."""
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "extra_body": GREEDY, **fields}
    options.setdefault("messages", [{"role": "user", "content": content}])
    message: Message = client.messages.create(**options)
    return message


def read_events(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream. The name of each is its type."""
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}], **GREEDY, **fields}
    lines = server.post("/v1/messages?beta=true", {**body, "stream": True}).text.split("\n\n")
    events = []
    for line in filter(None, lines):
        name, data = line.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def count_prompt_tokens(usage: Any) -> int:
    """Return the sum of the three kinds of prompt tokens."""
    usage = usage if isinstance(usage, dict) else usage.model_dump()
    return sum(usage[name] for name in PROMPT_TOKEN_FIELDS)


# --- whole messages and streams


def test_a_message_has_text_a_stop_reason_and_the_usage(client: anthropic.Anthropic) -> None:
    message = create(client, max_tokens=5)
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "abcde"}]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("max_tokens", None, "assistant")
    assert message.usage.output_tokens == 5
    assert message.id.startswith("msg_")
    assert message._request_id is not None
    assert message._request_id.startswith("req_")


def test_a_stop_sequence_ends_a_message_and_is_reported(client: anthropic.Anthropic) -> None:
    message = create(client, max_tokens=50, stop_sequences=["zz", "ef"])
    assert message.content[0].model_dump()["text"] == "abcd"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "ef")


def test_max_tokens_is_a_maximum_and_not_a_reservation(client: anthropic.Anthropic) -> None:
    message = create(client, max_tokens=32_000, stop_sequences=["ef"])
    assert message.stop_reason == "stop_sequence"


def test_max_tokens_zero_computes_the_prompt_only(client: anthropic.Anthropic) -> None:
    text = "a prompt that is computed before it is needed"
    message = create(client, text, max_tokens=0)
    assert (message.content, message.usage.output_tokens) == ([], 0)
    again = create(client, text)
    assert again.usage.cache_read_input_tokens == count_prompt_tokens(again.usage)


def test_a_message_that_fills_the_context_says_so(client: anthropic.Anthropic) -> None:
    message = create(client, max_tokens=32_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert count_prompt_tokens(message.usage) + message.usage.output_tokens == 2048 + 1


def test_the_events_of_a_stream_are_in_order_and_match_anthropics_types(server: ServerProcess) -> None:
    events = read_events(server, max_tokens=5)
    types = [event["type"] for event in events]
    assert types[:3] == ["message_start", "ping", "content_block_start"]
    assert types[3:-3] == ["content_block_delta"] * 5
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        if event["type"] != "ping":
            adapter.validate_python(event)
    start, delta = events[0]["message"], events[-2]
    assert start["usage"]["output_tokens"] == 0
    assert {name: start["usage"][name] for name in PROMPT_TOKEN_FIELDS} == {
        name: delta["usage"][name] for name in PROMPT_TOKEN_FIELDS
    }
    assert delta["usage"]["output_tokens"] == 5
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_a_stream_of_the_client_is_the_same_message(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "stream this"}]}
    with client.messages.stream(**options, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    whole = create(client, "stream this", max_tokens=20)
    assert text == whole.content[0].model_dump()["text"] == CYCLE[:20]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == 20
    assert whole.usage.cache_read_input_tokens == count_prompt_tokens(streamed.usage)


def test_the_asynchronous_client_streams_and_counts(server: ServerProcess) -> None:
    async def run() -> tuple[str, int, int]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, timeout=240) as client:
            options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "asynchronous"}]}
            count = await client.messages.count_tokens(**options)
            async with client.messages.stream(**options, max_tokens=6, extra_body=GREEDY) as stream:
                text = "".join([text async for text in stream.text_stream])
                usage = (await stream.get_final_message()).usage
        return text, count.input_tokens, count_prompt_tokens(usage)

    text, counted, prompt_tokens = asyncio.run(run())
    assert (text, counted) == ("abcdef", prompt_tokens)


def test_a_trailing_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "abcd"}]
    assert create(client, messages=messages, max_tokens=4).content[0].model_dump()["text"] == "efgh"


def test_output_format_constrains_the_text(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    output_config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    message = create(client, max_tokens=100, output_config=output_config)
    assert json.loads(message.content[0].model_dump()["text"]) == {"a": 1}


def test_a_request_as_coding_agents_send_it_is_accepted(client: anthropic.Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "Be careful.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ]
    response = client.beta.messages.with_raw_response.create(
        model="hybrid",
        max_tokens=32_000,
        system=system,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": EPHEMERAL}]}],
        tools=[PICK],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "somebody"},
        betas=["interleaved-thinking-2025-05-14"],
        stop_sequences=["e"],
        extra_body=GREEDY,
    )
    message = response.parse()
    assert (message.content[0].model_dump()["text"], message.stop_reason) == ("abcd", "stop_sequence")
    ignored = "context_management, cache_control.scope, metadata, thinking, output_config.effort"
    assert sorted(response.headers["x-afterglow-ignored"].split(", ")) == sorted(ignored.split(", "))


# --- tools


def test_a_tool_call_is_a_block_with_its_input(client: anthropic.Anthropic) -> None:
    message = create(client, max_tokens=200, tools=[PICK], tool_choice={"type": "tool", "name": "pick"})
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert block.input["letter"] in ("a", "b")


def test_a_streamed_tool_call_has_the_input_as_json_deltas(client: anthropic.Anthropic, server: ServerProcess) -> None:
    options: Any = {"max_tokens": 200, "tools": [PICK], "tool_choice": {"type": "any"}}
    events = read_events(server, **options)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    (start,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert (start["type"], start["name"], start["input"]) == ("tool_use", "pick", {})
    whole = create(client, **options)
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == whole.content[0].model_dump()["input"]


def test_disable_parallel_tool_use_ends_after_one_call(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = create(client, max_tokens=400, tools=[PICK], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


def test_tool_choice_none_calls_no_tool(client: anthropic.Anthropic) -> None:
    message = create(client, tools=[PICK], tool_choice={"type": "none"})
    assert message.content[0].model_dump()["text"] == "abcdefgh"


def test_the_next_turn_reuses_a_tool_call_and_its_result(client: anthropic.Anthropic) -> None:
    options: Any = {"max_tokens": 200, "tools": [PICK]}
    first = create(client, tool_choice={"type": "any"}, **options)
    (call,) = first.content
    result = {
        "type": "tool_result",
        "tool_use_id": call.model_dump()["id"],
        "content": [{"type": "text", "text": "ok"}],
    }
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    second = create(client, messages=messages, max_tokens=4, tools=[PICK])
    known = count_prompt_tokens(first.usage) + first.usage.output_tokens
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens >= known - 1


def test_tools_that_anthropic_defines_are_dropped_and_reported(client: anthropic.Anthropic) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    options: Any = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    response = client.messages.with_raw_response.create(**options, tools=[search, PICK])
    assert response.headers["x-afterglow-ignored"] == "tools.web_search_20250305"
    with pytest.raises(anthropic.BadRequestError, match="no tool of type 'web_search_20250305'"):
        client.messages.create(**options, tools=[search])


# --- thinking


def think(client: anthropic.Anthropic, **fields: Any) -> Message:
    """Return a message of a model that reasons, with three tokens of reasoning by default."""
    thinking = fields.pop("thinking", {"type": "enabled", "budget_tokens": 3})
    return create(client, model="reasoning", max_tokens=40, thinking=thinking, **fields)


def send_back(client: anthropic.Anthropic, blocks: list[dict[str, Any]]) -> Message:
    """Return the next turn after an assistant message with these blocks."""
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "and now?"},
    ]
    return think(client, messages=messages)


def test_thinking_that_is_sent_back_is_replayed_exactly(small_server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=small_server.url, api_key="secret", max_retries=0, timeout=240) as client:
        options: Any = {"model": "thinker", "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 5}}
        question: Any = {"role": "user", "content": "hello"}
        for display in (None, "omitted"):
            options["thinking"]["display"] = display
            first = client.messages.create(**options, messages=[question], extra_body=GREEDY)
            assert [block.type for block in first.content] == ["thinking", "text"]
            answer: Any = {"role": "assistant", "content": first.content}
            second = client.messages.create(**options, messages=[question, answer, question])
            known = count_prompt_tokens(first.usage) + first.usage.output_tokens
            assert second.usage.cache_read_input_tokens is not None
            assert second.usage.cache_read_input_tokens >= known - 1


def test_a_thinking_block_of_others_is_refused(client: anthropic.Anthropic) -> None:
    first = think(client)
    assert [block.type for block in first.content] == ["thinking", "text"]
    thinking = first.content[0].model_dump()
    assert thinking["thinking"].startswith("abc")
    assert thinking["signature"]
    assert first.usage.output_tokens_details is not None
    assert first.usage.output_tokens_details.thinking_tokens >= 3
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    assert send_back(client, blocks).usage.output_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="Invalid `signature` in `thinking` block"):
        send_back(client, [{**blocks[0], "thinking": "something else"}, *blocks[1:]])
    with pytest.raises(anthropic.BadRequestError, match="Invalid `data` in `redacted_thinking` block"):
        send_back(client, [{"type": "redacted_thinking", "data": "AAAA"}, *blocks[1:]])


def test_omitted_thinking_is_carried_by_its_signature(client: anthropic.Anthropic) -> None:
    options: Any = {"type": "enabled", "budget_tokens": 3, "display": "omitted"}
    shown, omitted = think(client), think(client, thinking=options)
    block = omitted.content[0].model_dump()
    assert (block["type"], block["thinking"]) == ("thinking", "")
    text = [block.model_dump(exclude_none=True) for block in omitted.content[1:]]
    assert text == [block.model_dump(exclude_none=True) for block in shown.content[1:]]
    shown_turn = send_back(client, [block.model_dump(exclude_none=True) for block in shown.content])
    omitted_turn = send_back(client, [block, *text])
    redacted_turn = send_back(client, [{"type": "redacted_thinking", "data": block["signature"]}, *text])
    counts = [count_prompt_tokens(turn.usage) for turn in (shown_turn, omitted_turn, redacted_turn)]
    assert counts == counts[:1] * 3
    assert redacted_turn.usage.cache_read_input_tokens == counts[0]


def test_streamed_thinking_ends_with_its_signature(server: ServerProcess) -> None:
    thinking = {"type": "enabled", "budget_tokens": 3}
    events = read_events(server, model="reasoning", max_tokens=40, thinking=thinking)
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert blocks == ["thinking", "text"]
    deltas = [event["delta"]["type"] for event in events if event.get("index") == 0 and "delta" in event]
    assert deltas == ["thinking_delta"] * (len(deltas) - 1) + ["signature_delta"]


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_thinking_is_off_or_left_to_the_model(client: anthropic.Anthropic, thinking: Any) -> None:
    message = think(client, thinking=thinking)
    assert message.content[0].type == ("text" if thinking["type"] == "disabled" else "thinking")


def test_thinking_has_no_effect_on_a_model_without_it(client: anthropic.Anthropic) -> None:
    response = client.messages.with_raw_response.create(
        model="tiny",
        max_tokens=4,
        messages=[{"role": "user", "content": "hello"}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
    )
    assert response.headers["x-afterglow-ignored"] == "output_config.effort, thinking"
    assert response.parse().content[0].type == "text"


# --- counts, models, errors


def test_a_count_is_the_prompt_tokens_of_the_message(client: anthropic.Anthropic) -> None:
    options: Any = {
        "model": "tiny",
        "system": [{"type": "text", "text": "be kind"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        "tools": [PICK],
        "tool_choice": {"type": "auto"},
    }
    count = client.messages.count_tokens(**options).input_tokens
    assert count == count_prompt_tokens(client.messages.create(**options, max_tokens=1).usage)
    assert count == client.beta.messages.count_tokens(**options).input_tokens


def test_models_have_anthropics_shape_for_its_clients(client: anthropic.Anthropic, server: ServerProcess) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == ["tiny", "hybrid", "vectors", "reasoning"]
    assert client.models.retrieve("tiny") == listed[0]
    assert listed[0].max_input_tokens == 2048
    with pytest.raises(anthropic.NotFoundError, match="no model called 'huge'"):
        client.models.retrieve("huge")
    assert server.http.get("/v1/models").json()["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "status", "error_type", "message"),
    [
        ({"model": "huge"}, 404, "not_found_error", "no model called 'huge'"),
        ({"max_tokens": None}, 400, "invalid_request_error", "`max_tokens`"),
        ({"messages": []}, 400, "invalid_request_error", "`messages`"),
        ({"temprature": 0}, 400, "invalid_request_error", "`temprature` is not a field"),
        ({"container": "one"}, 400, "invalid_request_error", "the server runs no code"),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "a" * 3000}]},
            400,
            "invalid_request_error",
            "tokens",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "no `tools`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            400,
            "invalid_request_error",
            "a tool_use block cannot be in a message of the user",
        ),
    ],
)
def test_an_error_has_anthropics_body(
    server: ServerProcess, fields: dict[str, Any], status: int, error_type: str, message: str
) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}], **fields}
    response = server.post("/v1/messages", body)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == error_type
    assert message in response.json()["error"]["message"]
    assert response.json()["request_id"] == response.headers["request-id"]


def test_a_key_is_required_and_a_full_queue_is_overloaded(small_server: ServerProcess) -> None:
    options: Any = {"max_retries": 0, "base_url": small_server.url, "timeout": 240}
    request: Any = {"model": "thinker", "messages": [{"role": "user", "content": "hello"}]}
    with (
        anthropic.Anthropic(api_key="wrong", **options) as wrong,
        anthropic.Anthropic(api_key="secret", **options) as right,
        anthropic.Anthropic(auth_token="secret", **options) as bearer,
    ):
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            wrong.messages.create(**request, max_tokens=1)
        assert bearer.messages.create(**request, max_tokens=1).usage.output_tokens == 1
        with pytest.raises(anthropic.RequestTooLargeError, match="request_too_large"):
            right.messages.create(**{**request, "system": "a" * 30_000}, max_tokens=1)
        with right.messages.stream(**request, max_tokens=100_000) as stream:
            assert next(iter(stream)).type == "message_start"
            with pytest.raises(anthropic.OverloadedError) as overloaded:
                right.messages.create(**request, max_tokens=1)
            assert overloaded.value.status_code == 529
            assert right.messages.count_tokens(**request).input_tokens > 0, "needs no place in the queue"
