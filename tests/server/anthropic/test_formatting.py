"""Output parts become content blocks and their events; silence becomes pings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from afterglow.chat.output.parts import ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.engine.types.request import PrefillProgress, Usage
from afterglow.server.anthropic.formatting import BlockBuilder, MessageFormatter, format_ping
from afterglow.server.sealing import get_sealer

PARTS = [
    ReasoningDelta("h"),
    ReasoningDelta("m"),
    TextDelta("I look"),
    ToolCallDelta(0, '{"at"', id="call_1", name="look"),
    ToolCallDelta(0, ": 1}"),
    ToolCallDelta(1, "", id="call_2", name="see"),
    TextDelta("done"),
]


def test_parts_become_blocks_in_the_order_of_generation() -> None:
    builder = BlockBuilder("tenant", omit_thinking=False)
    events = [event for part in PARTS for event in builder.add_part(part)] + list(builder.finish())
    assert builder.blocks == [
        {"type": "thinking", "thinking": "hm", "signature": get_sealer().sign("hm", "tenant")},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": "call_2", "name": "see", "input": {}},
        {"type": "text", "text": "done"},
    ]
    outline = [(event["type"], event["index"]) for event in events if event["type"] != "content_block_delta"]
    assert outline == [(f"content_block_{kind}", index) for index in range(5) for kind in ("start", "stop")]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    thinking = ["thinking_delta", "thinking_delta", "signature_delta"]
    assert deltas == [*thinking, "text_delta", "input_json_delta", "input_json_delta", "text_delta"]


def test_omitted_thinking_is_only_in_the_signature() -> None:
    builder = BlockBuilder("tenant", omit_thinking=True)
    events = [event for part in PARTS[:2] for event in builder.add_part(part)] + list(builder.finish())
    assert "hm" not in str(events)
    (block,) = builder.blocks
    assert block["thinking"] == ""
    assert get_sealer().decrypt(block["signature"], "tenant") == "hm"


def test_pings_are_events() -> None:
    assert format_ping(None) == b'event: ping\ndata: {"type":"ping"}\n\n'


def stream_events(deltas: Sequence[Delta], usage: Usage) -> list[dict[str, Any]]:
    """Return the events of a generation that its deadline ends after these deltas."""
    response = ChatResponse(
        text="", reasoning="", tool_calls=(), finish_reason="deadline", stop_reason=None, tokens=(), usage=usage
    )
    prompt = SimpleNamespace(request=SimpleNamespace(entries=range(7)), breakpoints=())
    generation: Any = SimpleNamespace(
        model_name="tiny", prompts=[prompt], truncations=[], reasoning_tokens=0, get_responses=lambda: [response]
    )

    async def yield_deltas() -> AsyncIterator[tuple[int, Delta]]:
        for delta in deltas:
            yield 0, delta

    async def collect() -> list[dict[str, Any]]:
        formatter = MessageFormatter(generation, max_tokens=9, salt="tenant")
        return [json.loads(event.partition(b"data: ")[2]) async for event in formatter.stream_events(yield_deltas())]

    return asyncio.run(collect())


def test_a_stream_whose_request_never_left_the_queue_begins_with_message_start() -> None:
    """A request whose deadline passes while it waits has no prefill progress."""
    events = stream_events([Delta(())], Usage(prompt_tokens=7))
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]
    start, end = events[0]["message"], events[2]
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (7, 0)
    assert (end["usage"]["input_tokens"], end["delta"]["stop_reason"]) == (7, "max_tokens")


def test_message_start_comes_once_with_the_usage_of_the_first_progress() -> None:
    progress = PrefillProgress("1", computed_entries=3, prompt_entries=7, prompt_tokens=7, cached_tokens=3)
    deltas = [Delta((), progress=progress), Delta((), progress=progress), Delta((TextDelta("a"),))]
    events = stream_events(deltas, Usage(prompt_tokens=7, cached_tokens=3, generated_tokens=1))
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert [event["type"] for event in events].count("message_start") == 1
