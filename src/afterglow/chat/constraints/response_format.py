"""The option `response_format`: an OpenAI dictionary, its name, or a Python type to which the answer is parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ForwardRef, Literal, get_args, get_origin

import pydantic

from afterglow.chat.constraints.grammar import GrammarSpec, build_json_schema_spec, build_response_format_spec
from afterglow.chat.constraints.json_schema import SCHEMA_MAP_KEYWORDS, VALUE_KEYWORDS
from afterglow.chat.constraints.schema_analysis import IN_PLACE_KEYWORDS
from afterglow.errors import InvalidArgument

FORMAT_NAMES = ("text", "json_object")  # formats without fields of their own
# Keywords of JSON schemas with schemas by name: a property may be called `enum`.
NAMED_SCHEMA_KEYWORDS = SCHEMA_MAP_KEYWORDS | {"dependentSchemas"}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Grammar of the answer, and the function that parses a complete answer."""

    spec: GrammarSpec | None = None
    parse: Callable[[str], Any] | None = None


def parse_response_format(value: Any) -> ResponseFormat:
    """Parse `response_format`.

    >>> parse_response_format(list[int]).parse("[1, 2]")
    [1, 2]
    """
    if value is None:
        return ResponseFormat()
    if isinstance(value, str):
        if value not in FORMAT_NAMES:
            raise InvalidArgument(
                "response_format", f"is {value!r}, which is not a format; the names are {' and '.join(FORMAT_NAMES)}"
            )
        value = {"type": value}
    if isinstance(value, Mapping):
        is_json = value.get("type") in ("json_object", "json_schema")
        return ResponseFormat(build_response_format_spec(value), json.loads if is_json else None)
    if has_forward_reference(value):
        raise InvalidArgument("response_format", f"must be a type without text in it, not {value!r}")
    try:
        adapter = pydantic.TypeAdapter(value)
        schema = adapter.json_schema()
    except Exception as error:  # hooks of the type may raise anything
        raise InvalidArgument("response_format", f"must be a dictionary or a type with a schema: {error}") from None
    return ResponseFormat(build_json_schema_spec(forbid_additional_properties(schema)), adapter.validate_json)


def has_forward_reference(value: Any) -> bool:
    """Return whether a type contains text, which pydantic would evaluate as Python.

    >>> has_forward_reference(list["int"]), has_forward_reference(dict[str, int])
    (True, False)
    """
    if isinstance(value, str | ForwardRef):
        return True
    return get_origin(value) is not Literal and any(map(has_forward_reference, get_args(value)))


def forbid_additional_properties(schema: Any, *, is_shared: bool = False) -> Any:
    """Set `additionalProperties: false` on every record of a schema that does not say which others it has.

    An object that several parts of a schema describe stays open (`is_shared`): each part would forbid what the others
    name.

    >>> forbid_additional_properties({"properties": {"a": {}}})
    {'properties': {'a': {}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [forbid_additional_properties(item, is_shared=is_shared) for item in schema]
    if not isinstance(schema, dict):
        return schema
    all_of = schema.get("allOf")
    parts = [key for key in ("properties", "$ref", "anyOf", "oneOf") if key in schema]
    parts += all_of if isinstance(all_of, list) else []
    is_shared = is_shared or len(parts) > 1

    def close(key: str, value: Any) -> Any:
        if key in VALUE_KEYWORDS:
            return value
        if key in NAMED_SCHEMA_KEYWORDS and isinstance(value, dict):
            return {name: forbid_additional_properties(item) for name, item in value.items()}
        return forbid_additional_properties(value, is_shared=is_shared and key in IN_PLACE_KEYWORDS)

    closed = {key: close(key, value) for key, value in schema.items()}
    types = schema.get("type", "object")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    is_record = is_object and "properties" in schema and "additionalProperties" not in schema
    return {**closed, "additionalProperties": False} if is_record and not is_shared else closed
