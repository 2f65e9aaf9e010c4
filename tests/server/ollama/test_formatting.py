"""Tool calls in lines of JSON: whole, with their arguments as objects."""

from __future__ import annotations

from afterglow.chat.messages import ToolCall
from afterglow.chat.output.parts import TextDelta, ToolCallDelta
from afterglow.server.ollama.formatting import CallCollector, build_calls


def test_a_call_is_complete_when_the_next_one_starts_or_at_the_end() -> None:
    collector = CallCollector()
    assert collector.add([TextDelta("Hm"), ToolCallDelta(0, '{"a"', id="1", name="add")]) == []
    assert collector.add([ToolCallDelta(0, ": 1}")]) == []
    assert collector.add([ToolCallDelta(1, "", id="2", name="subtract")]) == [
        ToolCall(id="1", name="add", arguments='{"a": 1}')
    ]
    assert collector.add([ToolCallDelta(1, "{}")]) == []
    assert collector.finish() == [ToolCall(id="2", name="subtract", arguments="{}")]
    assert collector.finish() == []


def test_arguments_are_objects() -> None:
    calls = build_calls(
        [ToolCall(id="1", name="add", arguments='{"a": 1}'), ToolCall(id="2", name="now", arguments="")]
    )
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {}]


def test_a_call_that_was_cut_off_is_left_out() -> None:
    assert build_calls([ToolCall(id="1", name="add", arguments='{"a": ')]) == []
