"""Output parts become content blocks and their events; silence becomes pings."""

from __future__ import annotations

from afterglow.chat.output.parts import ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.server.anthropic.formatting import BlockBuilder, format_ping
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
