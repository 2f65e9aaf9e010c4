"""Parsers of all tool families on recorded outputs."""

from __future__ import annotations

import json
import re

import pytest

from afterglow.chat.output.parts import ParsedOutput, join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from support.tool_outputs import RECORDED_OUTPUTS
from support.tool_records import TOOLS, RecordedOutput


def parse(recorded: RecordedOutput) -> ParsedOutput:
    parser = TOOL_FAMILIES[recorded.family].create_parser(TOOLS)
    return join_parts(parser.feed(recorded.raw) + parser.finish())


@pytest.mark.parametrize("recorded", RECORDED_OUTPUTS, ids=str)
def test_a_recorded_output_parses_to_the_expected_text_and_calls(recorded: RecordedOutput) -> None:
    output = parse(recorded)
    assert output.text == recorded.text
    assert output.reasoning == recorded.reasoning
    assert tuple((call.name, call.arguments) for call in output.tool_calls) == recorded.calls


@pytest.mark.parametrize(
    "recorded",
    [
        recorded
        for recorded in RECORDED_OUTPUTS
        if "truncated" not in recorded.case and "invalid JSON" not in recorded.case
    ],
    ids=str,
)
def test_the_arguments_of_a_complete_call_are_a_json_object(recorded: RecordedOutput) -> None:
    for call in parse(recorded).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


def test_every_family_has_recorded_outputs() -> None:
    assert {recorded.family for recorded in RECORDED_OUTPUTS} == set(TOOL_FAMILIES)


def test_calls_have_unique_ids() -> None:
    (first, second) = parse(
        next(
            recorded
            for recorded in RECORDED_OUTPUTS
            if recorded.case == "several calls" and recorded.family == "hermes"
        )
    ).tool_calls
    assert first.id != second.id
    assert re.fullmatch(r"call_[0-9a-f]{24}", first.id)


def test_the_caller_can_supply_the_id_factory() -> None:
    parser = TOOL_FAMILIES["hermes"].create_parser(TOOLS, new_id=iter(["a", "b"]).__next__)
    parts = parser.feed('<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>')
    assert [call.id for call in join_parts(parts).tool_calls] == ["a", "b"]


def test_mistral_ids_are_nine_letters_and_digits() -> None:
    for family in ("mistral", "mistral-named", "mistral-ids"):
        parser = TOOL_FAMILIES[family].create_parser(TOOLS)
        (call,) = join_parts(parser.feed('[TOOL_CALLS][{"name": "now", "arguments": {}}]')).tool_calls
        assert re.fullmatch(r"[a-zA-Z0-9]{9}", call.id)


@pytest.mark.parametrize(
    ("family", "raw", "id"),
    [
        ("mistral-ids", "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", "abcdef123"),
        (
            "kimi",
            "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "functions.now:3",
        ),
    ],
)
def test_an_id_written_by_the_model_is_preserved(family: str, raw: str, id: str) -> None:
    parser = TOOL_FAMILIES[family].create_parser(TOOLS)
    (call,) = join_parts(parser.feed(raw) + parser.finish()).tool_calls
    assert (call.name, call.id) == ("now", id)
