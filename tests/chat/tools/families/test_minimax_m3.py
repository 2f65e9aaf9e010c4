"""MiniMax-M3's elements are read as the types that the schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afterglow.chat.constraints.grammar import quote_literal
from afterglow.chat.output.parts import join_parts
from afterglow.chat.tools.families.minimax_m3 import MINIMAX_M3
from afterglow.chat.tools.tool import Tool
from support.grammar_text import accepts
from support.tool_outputs_text import element, minimax_m3_block, minimax_m3_call

TEXT, COUNT = {"type": "string"}, {"type": "integer"}
PLACE = {"type": "object", "properties": {"city": TEXT, "days": COUNT}, "required": ["city"]}
TEXTS = {"type": "array", "items": TEXT}
TWO_ITEMS = element("item", "a") + element("item", "5")


def write_call(written: str) -> str:
    return minimax_m3_block(minimax_m3_call("f", element("x", written)))


def read_arguments(tool: Tool, pieces: list[str]) -> Any:
    parser = MINIMAX_M3.create_parser([tool])
    parts = [part for piece in pieces for part in parser.feed(piece)]
    output = join_parts(parts + parser.finish())
    assert output.text == ""
    (call,) = output.tool_calls
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [TEXT, TEXTS]}, TWO_ITEMS, ["a", "5"]),
        ({"anyOf": [TEXT, TEXTS]}, "a", "a"),
        ({"anyOf": [TEXT, TEXTS]}, "", ""),
        ({"anyOf": [TEXT, PLACE]}, element("city", "Rome") + element("days", "2"), {"city": "Rome", "days": 2}),
        ({"anyOf": [TEXT, PLACE]}, "Rome < Bern", "Rome < Bern"),
        ({"anyOf": [TEXTS, PLACE]}, element("city", "5"), {"city": "5"}),
        ({"anyOf": [TEXTS, PLACE]}, TWO_ITEMS, ["a", "5"]),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "five", "five"),
        ({"anyOf": [TEXT, {"type": "null"}]}, "null", None),
        ({"anyOf": [TEXT, {"type": "null"}]}, " nothing\n", " nothing\n"),
        ({"enum": ["a", 1, None, True]}, "a", "a"),
        ({"enum": ["a", 1, None, True]}, "1", 1),
        ({"enum": ["a", 1, None, True]}, "true", True),
        ({"type": "array", "items": {"type": ["string", "integer"]}}, TWO_ITEMS, ["a", 5]),
        ({"type": "array", "prefixItems": [TEXT, TEXT]}, TWO_ITEMS, ["a", "5"]),
        ({"type": "array", "prefixItems": [TEXT], "items": COUNT}, TWO_ITEMS, ["a", 5]),
        (TEXTS, "", []),
        (PLACE | {"required": []}, "", {}),
        (TEXT, "null", "null"),
    ],
)
def test_a_value_has_a_type_that_its_schema_allows(schema: Any, written: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    tool = Tool(name="f", parameters=parameters)
    text = write_call(written)
    assert accepts(MINIMAX_M3.build_calls_grammar([tool], False, quote_literal), text)
    assert read_arguments(tool, [text]) == read_arguments(tool, list(text)) == {"x": value}


def test_an_empty_element_is_null_if_the_schema_allows_it() -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"x": {"type": ["integer", "null"]}}})
    assert read_arguments(tool, [write_call("")]) == {"x": None}
