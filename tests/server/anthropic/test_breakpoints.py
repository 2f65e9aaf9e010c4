"""`cache_control`: breakpoints are boundaries and checkpoints, pins with expiry, and divide the usage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from support.server_process import ServerProcess

pytestmark = pytest.mark.native

Body: TypeAlias = dict[str, Any]
EPHEMERAL = {"type": "ephemeral"}
FILLER = "the quick brown fox jumps over the lazy dog " * 4


def send(server: ServerProcess, body: Body) -> Body:
    """Return the usage of a message, after checking that its three kinds of prompt tokens add up."""
    fields = {"model": "hybrid", "max_tokens": 4, "temperature": 0, **body}
    response = server.post("/v1/messages", fields)
    assert response.status_code == 200, response.text
    usage: Body = response.json()["usage"]
    counted = server.post("/v1/messages/count_tokens", {name: fields[name] for name in fields if name != "max_tokens"})
    parts = [usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
    assert min(parts) >= 0
    assert sum(parts) == counted.json()["input_tokens"]
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    return usage


def text(content: str, *, is_breakpoint: bool = False) -> Body:
    return {"type": "text", "text": content, **({"cache_control": EPHEMERAL} if is_breakpoint else {})}


def build_tool(name: str, *, is_breakpoint: bool = False) -> Body:
    schema = {"type": "object", "properties": {"value": {"type": "string", "description": FILLER}}}
    return {"name": name, "input_schema": schema, **({"cache_control": EPHEMERAL} if is_breakpoint else {})}


def system_block(head: str, tail: str) -> Body:
    system = [text(head + FILLER, is_breakpoint=True), text(tail + FILLER)]
    return {"system": system, "messages": [{"role": "user", "content": FILLER}]}


def message_block(head: str, tail: str) -> Body:
    blocks = [text(head), text(FILLER, is_breakpoint=True), text(tail + FILLER)]
    return {"system": FILLER, "messages": [{"role": "user", "content": blocks}]}


def last_tool(head: str, tail: str) -> Body:
    tools = [build_tool(f"{head}_first"), build_tool("last", is_breakpoint=True)]
    return {"tools": tools, "messages": [{"role": "user", "content": tail + FILLER}]}


def first_tool(head: str, tail: str) -> Body:
    tools = [build_tool(f"{head}_first", is_breakpoint=True), build_tool(f"{tail}_last")]
    return {"tools": tools, "messages": [{"role": "user", "content": FILLER}]}


def tool_result(head: str, tail: str) -> Body:
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": head}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": FILLER, "cache_control": EPHEMERAL}
    messages = [
        {"role": "user", "content": FILLER},
        {"role": "assistant", "content": [text("let me see"), call]},
        {"role": "user", "content": [result, text(tail + FILLER)]},
    ]
    return {"messages": messages, "tools": [build_tool("look")]}


def near_prefix(head: str, tail: str) -> Body:
    """A breakpoint a few tokens after one that is cached, with the text after it."""
    blocks = [text(head + FILLER, is_breakpoint=True), text("short", is_breakpoint=True), text(tail + FILLER)]
    return {"messages": [{"role": "user", "content": blocks}]}


@pytest.mark.parametrize("build", [system_block, message_block, last_tool, first_tool, tool_result, near_prefix])
@pytest.mark.parametrize("model", ["hybrid", "tiny"])
def test_an_edit_behind_a_breakpoint_recomputes_at_most_one_token_before_it(
    server: ServerProcess, build: Callable[[str, str], Body], model: str
) -> None:
    head = f"{model} {build.__name__} "
    if build in (first_tool, last_tool):
        head = head.replace(" ", "_")
    first = send(server, {"model": model, **build(head, "one")})
    breakpoint = first["cache_read_input_tokens"] + first["cache_creation_input_tokens"]
    assert first["cache_creation_input_tokens"] > 100, "something was computed before the breakpoint"
    assert first["input_tokens"] > 10, "something was computed after the breakpoint"
    second = send(server, {"model": model, **build(head, "two")})
    assert second["cache_creation_input_tokens"] <= 1
    assert second["cache_read_input_tokens"] >= breakpoint - 1


def test_a_breakpoint_on_the_request_is_the_end_of_the_messages(server: ServerProcess) -> None:
    body: Body = {"messages": [{"role": "user", "content": "automatic " + FILLER}], "cache_control": EPHEMERAL}
    first = send(server, body)
    assert first["cache_creation_input_tokens"] > first["input_tokens"]
    body["messages"] += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "and?"}]
    second = send(server, body)
    created = first["cache_read_input_tokens"] + first["cache_creation_input_tokens"]
    assert second["cache_read_input_tokens"] >= created - 1


def test_the_ttl_divides_the_created_tokens(server: ServerProcess) -> None:
    long = {"type": "text", "text": "long " + FILLER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    usage = send(
        server, {"system": [long], "messages": [{"role": "user", "content": [text(FILLER, is_breakpoint=True)]}]}
    )
    created = usage["cache_creation"]
    assert created["ephemeral_1h_input_tokens"] > 100
    assert created["ephemeral_5m_input_tokens"] > 100


def test_a_request_has_at_most_four_breakpoints(server: ServerProcess) -> None:
    blocks = [text(str(number), is_breakpoint=True) for number in range(5)]
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    response = server.post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "at most 4 blocks with `cache_control`, not 5" in response.json()["error"]["message"]


def test_the_three_kinds_of_prompt_tokens_add_up_on_random_turns(server: ServerProcess) -> None:
    """200 turns of conversations that grow, are edited and start again, with breakpoints at random blocks."""
    random_numbers = random.Random(23)
    kinds = set()
    for _ in range(20):
        messages: list[Body] = []
        system = [text(random_numbers.choice(["be kind ", "be brief "]) + FILLER)]
        for turn in range(10):
            parts = [text(f"part {random_numbers.randrange(50)} ") for _ in range(random_numbers.randrange(1, 4))]
            messages.append({"role": "user", "content": parts})
            if turn and random_numbers.random() < 0.2:
                random_numbers.choice(messages)["content"] = [text("edited ")]
            blocks = [*system, *(block for message in messages for block in message["content"])]
            for block in blocks:
                block.pop("cache_control", None)
            for block in random_numbers.sample(blocks, k=min(random_numbers.randrange(5), len(blocks))):
                block["cache_control"] = {"type": "ephemeral", "ttl": random_numbers.choice(["5m", "1h"])}
            model = random_numbers.choice(["tiny", "hybrid"])
            usage = send(server, {"model": model, "system": system, "messages": messages})
            kinds |= {name for name, value in usage.items() if value}
            messages.append({"role": "assistant", "content": [text("abcd")]})
    assert {"input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"} <= kinds


def test_diagnostics_say_which_part_of_the_prompt_changed(server: ServerProcess) -> None:
    def diagnose(**changes: Any) -> Any:
        body = {"model": "tiny", "max_tokens": 2, "diagnostics": {"previous_message_id": "msg_1"}, **base, **changes}
        response = server.post("/v1/messages", body).json()
        assert "diagnostics" in response, response
        return response["diagnostics"] and response["diagnostics"]["cache_miss_reason"]

    base: Body = {"system": "diagnosed " + FILLER, "messages": [{"role": "user", "content": "first " + FILLER}]}
    send(server, {"model": "tiny", **base})
    answer = {"role": "assistant", "content": "abcd"}
    assert diagnose(messages=[*base["messages"], answer, {"role": "user", "content": "and?"}]) is None
    changed = diagnose(messages=[{"role": "user", "content": "other words"}])
    assert changed["type"] == "messages_changed"
    assert changed["cache_missed_input_tokens"] > 100
    assert diagnose(system="diagnosed otherwise " + FILLER)["type"] == "system_changed"
    assert diagnose(diagnostics=None) is None


def test_tokens_are_counted_and_diagnosed_for_the_prompt_without_volatile_spans(server: ServerProcess) -> None:
    def build(checksum: str) -> dict[str, Any]:
        system = f"x-anthropic-billing-header: cc_version=2.1; cch={checksum};\nToday's date is 2026-11-17.\nBe brief."
        return {"model": "tiny", "system": system, "messages": [{"role": "user", "content": "count volatile spans"}]}

    counted = server.post("/v1/messages/count_tokens", build("1a2b3")).json()["input_tokens"]
    fields = {"max_tokens": 2, "diagnostics": {"previous_message_id": "msg_1"}}
    server.post("/v1/messages", {**build("1a2b3"), **fields})
    response = server.post("/v1/messages", {**build("9f8e7"), **fields}).json()
    usage = response["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == counted
    assert response["diagnostics"] is None  # the checksum is not part of the prompt
