"""Tools from OpenAI dictionaries: validation and calling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field

from afterglow.chat.tools.tool import Tool, parse_tools
from afterglow.errors import InvalidArgument, UnsupportedOperation


def build_definition(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def test_an_openai_dictionary_becomes_a_tool() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (tool,) = parse_tools([build_definition(description="Do it.", parameters=schema, strict=True)])
    assert tool == Tool(name="f", description="Do it.", parameters=schema, strict=True)
    assert tool.definition == build_definition(description="Do it.", parameters=schema, strict=True)


def test_missing_parameters_become_an_empty_object_schema() -> None:
    assert parse_tools([build_definition()])[0].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("f", "tools"),
        ([1], "tools[0]"),
        ([build_definition(), {"type": "web"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{**build_definition(), "extra": 1}], "tools[0].extra"),
        ([build_definition(extra=1)], "tools[0].function.extra"),
        ([build_definition(name=None)], "tools[0].function.name"),
        ([build_definition(name="no spaces")], "tools[0].function.name"),
        ([build_definition(name="x" * 65)], "tools[0].function.name"),
        ([build_definition(name="x\n")], "tools[0].function.name"),
        ([build_definition(), build_definition()], "tools[1].function.name"),
        ([build_definition(description=1)], "tools[0].function.description"),
        ([build_definition(parameters=[])], "tools[0].function.parameters"),
        ([build_definition(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([build_definition(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([build_definition(parameters={"required": [1]})], "tools[0].function.parameters.required"),
        ([build_definition(parameters={"properties": {"a": object}})], "tools[0].function.parameters"),
        ([build_definition(strict="yes")], "tools[0].function.strict"),
    ],
)
def test_an_invalid_definition_is_reported_with_its_path(value: Any, where: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_tools(value)
    assert error.value.name == where


@pytest.mark.parametrize("function", [max, dict, int])
def test_a_function_without_a_signature_is_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgument, match="has no signature") as error:
        parse_tools([function])
    assert error.value.name == f"tools[0].{function.__name__}"


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        ("Nowhere", "tools[0].look"),
        ("list[", "tools[0].look"),
        ("int.b", "tools[0].look"),
        ("1+'a'", "tools[0].look"),
        (Annotated[str, Field(pattern="(")], "tools[0].look.value"),
    ],
)
def test_an_invalid_hint_is_refused_by_name(hint: Any, name: str) -> None:
    def look(value: Any) -> None: ...

    look.__annotations__["value"] = hint
    with pytest.raises(InvalidArgument) as error:
        parse_tools([look])
    assert error.value.name == name


def test_a_tool_without_a_function_cannot_be_called() -> None:
    with pytest.raises(UnsupportedOperation, match="has no function"):
        parse_tools([build_definition()])[0].call("{}")


def test_a_directly_constructed_tool_can_be_called() -> None:
    tool = Tool(
        name="f", parameters={"type": "object", "properties": {"a": {}}}, function=lambda **arguments: arguments
    )
    assert tool.call('{"a": [1]}') == {"a": [1]}
