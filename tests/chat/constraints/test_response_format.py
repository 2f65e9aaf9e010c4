"""Response formats: objects have only the properties that they name, and invalid fields are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from afterglow.chat.constraints.response_format import forbid_additional_properties, parse_response_format
from afterglow.errors import InvalidArgument

A, B = {"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}
CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize("types", [{}, {"type": "object"}, {"type": ["object", "null"]}])
def test_an_object_is_closed(types: dict[str, Any]) -> None:
    assert forbid_additional_properties({**types, **A}) == {**types, **A, **CLOSED}
    nested = {"$defs": {"x": A}, "anyOf": [{"items": A}, {"$ref": "#/$defs/x"}]}
    assert forbid_additional_properties(nested) == {
        "$defs": {"x": {**A, **CLOSED}},
        "anyOf": [{"items": {**A, **CLOSED}}, {"$ref": "#/$defs/x"}],
    }


@pytest.mark.parametrize("others", [True, {"type": "string"}])
def test_a_schema_that_says_which_other_properties_it_has_keeps_them(others: Any) -> None:
    schema = {**A, "additionalProperties": others}
    assert forbid_additional_properties(schema) == schema


@pytest.mark.parametrize("schema", [{"allOf": [A, B]}, {**A, "anyOf": [B, {"required": ["a"]}]}, {"const": A}])
def test_parts_of_one_object_stay_open(schema: dict[str, Any]) -> None:
    assert forbid_additional_properties(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "enum": A}}
    assert forbid_additional_properties(schema) == {
        "properties": {"properties": {"type": "string"}, "enum": {**A, **CLOSED}},
        **CLOSED,
    }


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"type": ["text"]}, "response_format.type"),
        ({"type": {}}, "response_format.type"),
        ({"type": "text", "pattern": "a", 5: 1}, "response_format.5"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "x": 1, 5: 1}}, "response_format.json_schema.5"),
    ],
)
def test_an_invalid_field_is_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_response_format(value)
    assert caught.value.name == name
