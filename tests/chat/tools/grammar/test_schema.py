"""Schemas that people's tools have are enforced in the call format of every family."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from afterglow.chat.constraints.grammar import build_json_schema_grammar, quote_literal
from afterglow.chat.output.parts import join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.enforcement import CallGrammarBuilder
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidGrammar, UnsupportedOption
from support.grammar_text import accepts
from support.tool_writers import KEY, NAME, JsonText, write_call

pytestmark = pytest.mark.slow

TEXT = {"type": "string"}
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
SHAPES: dict[str, tuple[Any, list[Any], list[Any]]] = {  # schema, valid and invalid values
    "date": ({**TEXT, "format": "date"}, ["2026-02-28"], ["2026-02-30", "soon"]),
    "time": ({**TEXT, "format": "time"}, ["12:30:00Z"], ["12:30"]),
    "date and time": ({**TEXT, "format": "date-time"}, ["2026-02-28T12:30:00+01:00"], ["2026-02-28"]),
    "duration": ({**TEXT, "format": "duration"}, ["P3D", "PT5M"], ["P", "3D"]),
    "uuid": ({**TEXT, "format": "uuid"}, [UUID], [UUID[1:]]),
    "uuid4": ({**TEXT, "format": "uuid4"}, [UUID], [UUID.replace("-4", "-1")]),
    "email": ({**TEXT, "format": "email"}, ["a.b@example.org"], ["a.b", "a@b@c"]),
    "host": ({**TEXT, "format": "hostname"}, ["a-1.example.org"], ["-a", "a..b"]),
    "ipv4": ({**TEXT, "format": "ipv4"}, ["192.168.0.1"], ["192.168.0.256"]),
    "ipv6": ({**TEXT, "format": "ipv6"}, ["fe80::1", "::"], ["1::2::3", "12345::"]),
    "uri": ({**TEXT, "format": "uri"}, ["https://example.org:80/a?b=c#d", "mailto:a@b"], ["example.org/a", "a b"]),
    "pattern": ({**TEXT, "pattern": "^[A-Z]{3}$"}, ["EUR"], ["EU", "EURO", "EU1"]),
    "pattern without anchors": ({**TEXT, "pattern": "ab|c$"}, ["xaby", "xc"], ["xcy", "a"]),
    "pattern of digits": ({**TEXT, "pattern": r"^[\w-]\d$"}, ["-5", "a5"], ["-\u0665", "é5", "5"]),
    "pattern of zod's e-mail addresses": (
        {**TEXT, "pattern": ZOD_EMAIL},
        ["a.b@example.org"],
        [".a@example.org", "a..b@example.org", "a@example"],
    ),
    "pattern and length": (
        {**TEXT, "pattern": "^a+", "minLength": 2, "maxLength": 3},
        ["aa", "ab"],
        ["a", "aaaa", "ba"],
    ),
    "pattern and values": ({"enum": ["a/b", "c"], "pattern": "/"}, ["a/b"], ["c", "/"]),
    "values and length": ({"enum": ["a", "bcd", "e"], "minLength": 2, "maxLength": 4}, ["bcd"], ["a", "bc"]),
    "pattern and true": ({**TEXT, "pattern": "^a$", "allOf": [True]}, ["a"], ["b"]),
    "nullable date": ({"anyOf": [{**TEXT, "format": "date"}, {"type": "null"}]}, ["2026-02-28", None], ["2026-02-30"]),
    "text or list": ({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}, ["a", ["a", "b"]], []),
    "values of several types": ({"enum": ["a", 1, None, True]}, ["a", 1, None, True], ["b", 2, False]),
    "anything": ({}, ["a", 1, None, True, ["a", 1], {"a": {"b": [1]}}], []),
    "list of dates": ({"type": "array", "items": {**TEXT, "format": "date"}}, [["2026-02-28"], []], [["soon"]]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": 1, "b": 2}, {}], [{"a": "b"}, 1]),
    "map of dates": (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": {"type": "boolean"}},
        [{"2026-02-28": True}],
        [{"2026-02-30": True}, {"2026-02-28": 1}],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [TEXT, {"type": "integer"}], "items": False, "minItems": 2},
        [["a", 1]],
        [["a"], ["a", "b"], ["a", 1, 2]],
    ),
    "tuple and rest": (
        {
            "type": "array",
            "prefixItems": [{"type": "boolean"}],
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 3,
        },
        [[True, 1], [True, 1, 2]],
        [[True], [1, 1], [True, 1, 2, 3]],
    ),
    "set": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        [[1, 2], []],
        [[1, 1]],
    ),
}  # fmt: skip
# In their own notation, these families cannot enforce the shape: they write JSON.
WRITTEN_AS_JSON = {
    ("gemma", "map of dates"), ("gemma", "set"), ("function-gemma", "map of dates"), ("function-gemma", "set"),
    ("minimax-m3", "set"), ("minimax-m3", "anything"),
}  # fmt: skip


def build_tool(schema: Any, *, strict: bool = False) -> Tool:
    parameters = {"type": "object", "properties": {KEY: schema}, "required": [KEY], "additionalProperties": False}
    return Tool(name=NAME, parameters=parameters, strict=strict)


def write(family: str, shape: str, value: Any) -> str:
    is_json = (family, shape) in WRITTEN_AS_JSON and isinstance(value, list | dict)
    return write_call(family, JsonText(json.dumps(value)) if is_json else value)


def read_value(family: str, tool: Tool, text: str) -> Any:
    parser = TOOL_FAMILIES[family].create_parser([tool])
    (call,) = join_parts(parser.feed(text) + parser.finish()).tool_calls
    return json.loads(call.arguments)[KEY]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_enforced_in_json(shape: str) -> None:
    schema, valid, invalid = SHAPES[shape]
    grammar = build_json_schema_grammar(schema)
    assert [value for value in valid if not accepts(grammar, json.dumps(value, ensure_ascii=False))] == []
    assert [value for value in invalid if accepts(grammar, json.dumps(value, ensure_ascii=False))] == []


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_accepts_valid_calls_of_a_shape_and_no_others(shape: str, family: str) -> None:
    schema, valid, invalid = SHAPES[shape]
    builder = CallGrammarBuilder(TOOL_FAMILIES[family], quote_literal)
    for tool in (build_tool(schema), build_tool(schema, strict=True)):
        built = builder.build_calls([tool], False)
        assert built.unenforced == ()
        ((_, grammar),) = built.grammars
        for value in valid:
            text = write(family, shape, value)
            assert accepts(grammar, text), text
            assert read_value(family, tool, text) == value
        for value in invalid:
            assert not accepts(grammar, write(family, shape, value)), value


@pytest.mark.parametrize("family", ["qwen-coder", "glm", "gemma", "minimax-m3"])
def test_a_list_that_cannot_have_its_least_items_is_refused(family: str) -> None:
    tool = build_tool({"type": "array", "prefixItems": [TEXT], "items": False, "minItems": 2}, strict=True)
    with pytest.raises((UnsupportedOption, InvalidGrammar)):
        CallGrammarBuilder(TOOL_FAMILIES[family], quote_literal).build_calls([tool], False)


@pytest.mark.parametrize("family", ["qwen-coder", "glm", "gemma", "minimax-m3"])
def test_anchors_inside_a_pattern_are_refused_by_name(family: str) -> None:
    tool = build_tool({"type": "string", "pattern": "(^a|b)c"}, strict=True)
    with pytest.raises(UnsupportedOption, match=r"tools\.f\.parameters\.x\.pattern"):
        CallGrammarBuilder(TOOL_FAMILIES[family], quote_literal).build_calls([tool], False)
    built = CallGrammarBuilder(TOOL_FAMILIES[family], quote_literal).build_calls([replace(tool, strict=False)], False)
    assert accepts(built.grammars[0][1], write_call(family, "ac"))
    assert built.unenforced


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@pytest.mark.parametrize("schema", [{"allOf": [{"type": "object"}, TEXT]}, {"const": "a", "minLength": 2}], ids=str)
def test_a_property_without_any_value_is_refused_by_name(schema: dict[str, Any], family: str) -> None:
    builder = CallGrammarBuilder(TOOL_FAMILIES[family], quote_literal)
    with pytest.raises((UnsupportedOption, InvalidGrammar)):
        builder.build_calls([build_tool(schema, strict=True)], False)
    assert builder.build_calls([build_tool(schema)], False).unenforced
