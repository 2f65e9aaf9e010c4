"""Items of /v1/responses as a coding agent sends them back: calls, outputs and encrypted reasoning, nothing stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from afterglow.testing import models
from afterglow.testing.models import vocabulary
from support.openai_schemas import validate_event
from support.patches import PATCH_GRAMMAR, parse_patch
from support.server_process import ServerProcess

pytestmark = pytest.mark.native

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}"""
SHORT_PATCH_GRAMMAR = PATCH_GRAMMAR.replace(r"[^\n\r]*", "[a-z]{0,4}").replace(r"[^\n\r]+", "[a-z]{1,4}")
LOOK = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Run a command.", "parameters": LOOK, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "mcp__notes",
        "description": "Notes of the user.",
        "tools": [
            {"type": "function", "name": "look", "parameters": LOOK, "strict": False},
            {
                "type": "custom",
                "name": "write",
                "format": {"type": "grammar", "syntax": "regex", "definition": "[a-f]{3,9}"},
            },
        ],
    },
    {"type": "web_search", "external_web_access": False},
]
TOOLS[1]["format"] = {"type": "grammar", "syntax": "lark", "definition": SHORT_PATCH_GRAMMAR}
AGENT_FIELDS: dict[str, Any] = {
    "model": "agent",
    "instructions": "You edit code.",
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "reasoning": {"effort": "minimal", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-installation-id": "1"},
    "store": False,
    "temperature": 1,
    "max_output_tokens": 4000,
}
QUESTION = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Edit the file."}]}
APPLY_PATCH = {"type": "custom", "name": "apply_patch"}


@pytest.fixture(scope="module")
def agent_server(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose template renders reasoning and calls of earlier turns."""
    template = tmp_path_factory.mktemp("templates") / "agent.jinja"
    template.write_text(TEMPLATE)
    path = models.get_path("successor-attention")
    process = ServerProcess(f"agent={path}", "--chat-template", str(template), "--context", "16384", "--sequences", "4")
    yield process
    process.stop()


def send(server: ServerProcess, items: list[Any], choice: Any, **fields: Any) -> dict[str, Any]:
    body = server.respond(items, **{**AGENT_FIELDS, "tool_choice": choice, "seed": 1, **fields})
    assert body["http_status"] == 200, body
    assert body["status"] == "completed", body
    return body


def return_items(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return output items as an agent sends them back: without ids and visible reasoning, and with outputs of calls."""
    hidden = ("id", "status", "content")
    items = [
        {key: value for key, value in item.items() if item["type"] == "message" or key not in hidden} for item in output
    ]
    calls = [item for item in output if item["type"].endswith("_call")]
    return items + [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "done"} for call in calls]


def test_no_token_of_an_agents_history_is_computed_again(agent_server: ServerProcess) -> None:
    items: list[dict[str, Any]] = [QUESTION]
    choices = [
        APPLY_PATCH,
        {"type": "function", "name": "look", "namespace": "mcp__notes"},
        {"type": "custom", "name": "write", "namespace": "mcp__notes"},
        {"type": "function", "name": "shell"},
        APPLY_PATCH,
    ]
    known, names = 0, []
    for choice in choices:
        body = send(agent_server, items, choice)
        usage = body["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= known - 1, body["usage"]
        known = usage["input_tokens"] + usage["output_tokens"] - 1  # the end token is not computed
        reasoning, call = body["output"]
        assert reasoning["encrypted_content"] not in (None, "")
        assert reasoning["summary"] == [{"type": "summary_text", "text": reasoning["content"][0]["text"]}]
        names.append((call["type"], call.get("namespace"), call["name"]))
        items += return_items(body["output"])
    assert names == [
        ("custom_tool_call", None, "apply_patch"),
        ("function_call", "mcp__notes", "look"),
        ("custom_tool_call", "mcp__notes", "write"),
        ("function_call", None, "shell"),
        ("custom_tool_call", None, "apply_patch"),
    ]


def test_events_of_a_custom_call_and_a_summary_are_in_order(agent_server: ServerProcess) -> None:
    body = {**AGENT_FIELDS, "input": [QUESTION], "tool_choice": APPLY_PATCH, "seed": 3}
    events = [validate_event(event) for event in agent_server.collect_events("/v1/responses", body)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_summary_part.added"),
        *("reasoning_text.delta", "reasoning_summary_text.delta", "reasoning_text.done", "content_part.done"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("custom_tool_call_input.delta", "custom_tool_call_input.done", "completed"),
    ]
    reasoning, call = events[-1].response.output
    deltas = {kind: "" for kind in kinds}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.type.removeprefix("response.")] += event.delta
    assert deltas["custom_tool_call_input.delta"] == call.input
    assert deltas["reasoning_summary_text.delta"] == reasoning.summary[0].text
    parse_patch(call.input)


def test_server_side_tools_are_dropped_and_reported_if_others_remain(agent_server: ServerProcess) -> None:
    body = {**AGENT_FIELDS, "input": [QUESTION], "tool_choice": APPLY_PATCH, "seed": 1}
    response = agent_server.post("/v1/responses", body)
    assert "tools[3] (web_search)" in response.headers["x-afterglow-ignored"]
    assert "client_metadata" in response.headers["x-afterglow-ignored"]
    assert [tool["type"] for tool in response.json()["tools"]] == ["function", "custom", "namespace"]
    for fields in ({"tools": [{"type": "web_search"}]}, {"tool_choice": {"type": "web_search"}}):
        error = agent_server.respond([QUESTION], **{**AGENT_FIELDS, **fields})["error"]
        assert "web_search" in error["message"]
        assert error["param"] in ("tools[0]", "tool_choice")


def test_foreign_encrypted_content_is_refused(agent_server: ServerProcess) -> None:
    for content in ("gAAAAABm", "", "é"):
        item = {"type": "reasoning", "summary": [], "encrypted_content": content}
        body = agent_server.respond([QUESTION, item], **AGENT_FIELDS)
        assert (body["http_status"], body["error"]["param"]) == (400, "input[1].encrypted_content")
        assert body["error"]["code"] == "invalid_encrypted_content"


def test_a_grammar_that_cannot_be_enforced_is_refused(agent_server: ServerProcess) -> None:
    tool = {"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark", "definition": "start: y"}}
    for choice in ("auto", "required"):
        body = agent_server.respond([QUESTION], **{**AGENT_FIELDS, "tools": [tool], "tool_choice": choice})
        assert (body["http_status"], body["error"]["param"]) == (400, "tools.x.format.definition")


def test_stored_items_are_listed_and_referred_to(agent_server: ServerProcess) -> None:
    first = send(agent_server, [QUESTION], APPLY_PATCH, store=True)
    call = first["output"][1]
    output = {
        "type": "custom_tool_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "ok"}],
    }
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    second = send(agent_server, [QUESTION, *references, output], APPLY_PATCH, store=True)
    known = first["usage"]["total_tokens"] - 1
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= known - 1
    third = send(agent_server, [QUESTION], APPLY_PATCH, store=True, previous_response_id=first["id"])
    with agent_server.client() as client:
        listed = client.responses.input_items.list(second["id"], order="asc")
        kinds = [item.type for item in listed]
        assert kinds == ["message", "reasoning", "custom_tool_call", "custom_tool_call_output"]
        assert next(iter(client.responses.input_items.list(second["id"], limit=1))).type == "custom_tool_call_output"
        after = client.responses.input_items.list(second["id"], order="asc", after=listed.data[1].id, limit=1)
        assert [item.type for item in after.data] == ["custom_tool_call"]
        assert after.has_more
        assert [item.type for item in client.responses.input_items.list(third["id"], order="asc")] == [
            *("message", "reasoning", "custom_tool_call", "message"),
        ]
    unknown = agent_server.respond([QUESTION, {"type": "item_reference", "id": "msg_1"}], **AGENT_FIELDS)
    assert unknown["error"]["code"] == "item_not_found"


def test_the_openai_clients_read_custom_calls(agent_server: ServerProcess) -> None:
    fields: dict[str, Any] = {**AGENT_FIELDS, "input": [QUESTION], "tool_choice": APPLY_PATCH}
    fields["extra_body"] = {"seed": 5, "client_metadata": fields.pop("client_metadata")}
    with agent_server.client() as client:
        response = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            inputs = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]

    async def create() -> Any:
        async with agent_server.async_client() as async_client:
            return await async_client.responses.create(**fields)

    for answer in (response, asyncio.run(create())):
        reasoning, call = answer.output
        assert (reasoning.type, call.type, call.name) == ("reasoning", "custom_tool_call", "apply_patch")
        assert call.input == "".join(inputs)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_patches_at_a_high_temperature_all_parse(agent_server: ServerProcess, count: int) -> None:
    # These are about as likely as the next letter, so that lines end and the escapes of JSON occur.
    bias = {
        str(vocabulary.get_byte_token(ord(char))): value for char, value in (("\\", 23), ("n", 25), ('"', 23), ("*", 4))
    }
    tool = {**TOOLS[1], "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}}
    samplers = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "logit_bias": bias}
    fields = {"reasoning": {"effort": "none"}, "tools": [tool], **samplers}

    def create(seed: int) -> str:
        (call,) = send(agent_server, [QUESTION], APPLY_PATCH, **{**fields, "seed": seed})["output"]
        return str(call["input"])

    with ThreadPoolExecutor(4) as pool:
        inputs = list(pool.map(create, range(count)))
    for text in inputs:
        parse_patch(text)
    assert len(set(inputs)) > count * 0.9
    assert any('"' in text and "\\" in text for text in inputs)


def test_more_output_tokens_than_the_context_are_a_maximum(agent_server: ServerProcess) -> None:
    assert send(agent_server, [QUESTION], APPLY_PATCH, max_output_tokens=1_000_000)["max_output_tokens"] == 1_000_000
