"""Response formats: OpenAI's dictionaries, or Python types whose schema the answer satisfies and which it becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from afterglow.chat.constraints.grammar import GrammarSpec, build_json_schema_spec, build_response_format_spec
from afterglow.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What an answer may be, and what a finished one is turned into."""

    spec: GrammarSpec | None = None
    parse: Callable[[str], Any] | None = None


def parse_response_format(value: Any) -> ResponseFormat:
    """What callers write as `response_format`.

    >>> response_format(list[int]).parse("[1, 2]")
    [1, 2]
    """
    if value is None:
        return ResponseFormat()
    if isinstance(value, Mapping):
        json_kinds = ("json_object", "json_schema")
        return ResponseFormat(
            build_response_format_spec(value), json.loads if value.get("type") in json_kinds else None
        )
    try:
        adapter = pydantic.TypeAdapter(value)
        schema = adapter.json_schema()
    except Exception as error:  # whatever a type's own hooks raise
        raise InvalidArgument("response_format", f"must be a dictionary or a type with a schema: {error}") from None
    return ResponseFormat(build_json_schema_spec(forbid_additional_properties(schema)), adapter.validate_json)


def forbid_additional_properties(schema: Any) -> Any:
    """A type's schema without room for members that the type does not have: it would only ignore them.

    >>> closed({"type": "object", "properties": {}})
    {'type': 'object', 'properties': {}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [forbid_additional_properties(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {
        key: value if key in ("enum", "const", "default", "examples") else forbid_additional_properties(value)
        for key, value in schema.items()
    }
    return {**inside, "additionalProperties": False} if _is_record(schema) else inside


def _is_record(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema
