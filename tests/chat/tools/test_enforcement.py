"""Grammars of calls: cached by their tools, linear in their number, and what they do not enforce is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from afterglow.chat.constraints import json_schema
from afterglow.chat.constraints.grammar import quote_literal
from afterglow.chat.tools import enforcement, family
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.enforcement import CallGrammarBuilder, find_violation
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidGrammar, UnsupportedOption

NAME = {"type": "string", "maxLength": 9}
LOOK_AHEAD = {"type": "string", "pattern": "^(?!x).*$"}  # no grammar enforces it


def build_tool(name: str, **properties: Any) -> Tool:
    return Tool(name=name, parameters={"type": "object", "properties": properties, "additionalProperties": False})


@pytest.mark.parametrize("name", ["hermes", "qwen-coder", "gemma", "functionary", "pythonic", "kimi"])
def test_a_tool_that_cannot_be_enforced_is_relaxed_and_the_others_are_not(name: str) -> None:
    tools = [build_tool("first", city=NAME), build_tool("second", city=LOOK_AHEAD, count={"type": "integer"})]
    builder = CallGrammarBuilder(TOOL_FAMILIES[name], quote_literal)
    built = builder.build_calls(tools, True)
    assert [tool.name for tool in built.unenforced] == ["second"]
    ((_, grammar),) = built.grammars
    assert "(?!" not in grammar
    assert "second" in grammar
    alone = builder.build_calls(tools[:1], True)
    assert alone.unenforced == ()


def test_a_strict_tool_that_cannot_be_enforced_is_refused() -> None:
    builder = CallGrammarBuilder(TOOL_FAMILIES["hermes"], quote_literal)
    failing, other = build_tool("f", city=LOOK_AHEAD), build_tool("g", city=NAME)
    with pytest.raises((UnsupportedOption, InvalidGrammar)):
        builder.build_triggered([replace(failing, strict=True), other])
    built = builder.build_triggered([failing, replace(other, strict=True)])  # the strict one is enforced
    assert built.unenforced == (failing,)


@pytest.mark.parametrize("name", ["hermes", "functionary"])
def test_schemas_are_rewritten_once_for_a_set_of_tools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten: list[str] = []

    def rewrite(schema: Any, where: str = "json_schema") -> Any:
        rewritten.append(where)
        return json_schema.to_enforceable_schema(schema, where)

    monkeypatch.setattr(family, "to_enforceable_schema", rewrite)
    tools = [build_tool(f"tool_{number}", city=NAME) for number in range(50)]
    builder = CallGrammarBuilder(TOOL_FAMILIES[name], quote_literal)
    first = builder.build_triggered(tools)
    assert len(rewritten) == 50
    assert builder.build_triggered(list(tools)) is first
    assert len(rewritten) == 50
    assert builder.build_triggered([*tools[1:], build_tool("tool_0", city=LOOK_AHEAD)]) is not first


def test_the_cache_is_bounded() -> None:
    builder = CallGrammarBuilder(TOOL_FAMILIES["hermes"], quote_literal)
    for number in range(enforcement.MAX_CACHED_TOOL_SETS + 5):
        builder.build_triggered([build_tool(f"tool_{number}", city=NAME)])
    assert len(builder._cache) == enforcement.MAX_CACHED_TOOL_SETS


@pytest.mark.parametrize(
    ("schema", "arguments", "violation"),
    [
        ({"a": {"type": "integer"}}, {"a": 1}, None),
        ({"a": {"type": "number"}}, {"a": 1}, None),
        ({"a": {"type": "integer"}}, {"a": "1"}, "`a` must be of the type integer, not string"),
        ({"a": {"enum": ["x", "y"]}}, {"a": "z"}, '`a` must be one of ["x", "y"]'),
        ({"a": {"items": {"type": "string"}}}, {"a": ["x", 1]}, "`a[1]` must be of the type string, not integer"),
        ({"a": {"type": "string", "maxLength": 2}}, {"a": "xyz"}, "`a` must have at most 2 length"),
        ({"a": {"minimum": 2}}, {"a": 1}, "`a` must be at least 2"),
        ({"a": {"anyOf": [{"type": "string"}]}}, {"a": 1}, "`a` matches 0 of the alternatives of anyOf"),
        ({"a": {"oneOf": [{}, {"type": "integer"}]}}, {"a": 1}, "`a` matches 2 of the alternatives of oneOf"),
        ({"a": {"type": "object", "required": ["b"]}}, {"a": {}}, "`a.b` is required"),
        ({"a": {}}, {"b": 1}, "`b` must not be set"),
        ({"a": {"$ref": "#/properties/b"}, "b": {"const": 3}}, {"a": 4}, "`a` must be one of [3]"),
        ({"a": {"type": "string", "nullable": True}}, {"a": None}, None),
    ],
)  # fmt: skip
def test_a_violation_of_the_schema_is_found(schema: Any, arguments: Any, violation: str | None) -> None:
    assert find_violation(build_tool("f", **schema), json.dumps(arguments)) == violation


def test_arguments_must_be_a_json_object() -> None:
    assert find_violation(build_tool("f"), "") is None
    assert find_violation(build_tool("f"), "[]") == "the arguments must be of the type object, not array"
    assert "not JSON" in str(find_violation(build_tool("f"), "{"))
