"""Converts values that a model wrote as unquoted text or Python literals to JSON of the types in the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from afterglow.chat.tools.tool import Tool

JSON_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ALL_TYPES = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})


def get_parameter_types(tool: Tool | None, name: str) -> frozenset[str]:
    """Return the JSON types that a tool's parameter allows; all types if the schema does not restrict them."""
    schema = tool.parameters.get("properties", {}).get(name, True) if tool else True
    return get_schema_types(schema, tool.parameters if tool else {})


def get_schema_types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """Return the JSON types that a schema allows. `root` is the document that its references point into."""
    if not isinstance(schema, Mapping) or depth == 0:
        return ALL_TYPES
    allowed = ALL_TYPES
    if "type" in schema:
        named = schema["type"]
        allowed = frozenset([named] if isinstance(named, str) else named)
    if "enum" in schema or "const" in schema:
        allowed &= frozenset(map(get_json_type, schema.get("enum", [schema.get("const")])))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            allowed &= frozenset().union(*(get_schema_types(choice, root, depth - 1) for choice in schema[keyword]))
    for choice in schema.get("allOf", ()):
        allowed &= get_schema_types(choice, root, depth - 1)
    if "$ref" in schema:
        allowed &= get_schema_types(resolve_reference(str(schema["$ref"]), root), root, depth - 1)
    return allowed


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference like `#/$defs/Place` points to; True (any value) if it does not exist."""
    target: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        target = target.get(key, True) if isinstance(target, Mapping) else True
    return target


def get_json_type(value: Any) -> str:
    """Return the JSON type of a value."""
    return JSON_TYPE_NAMES.get(type(value), "null")


def text_to_json(text: str, types: frozenset[str]) -> str:
    """Convert unquoted text to JSON. Text that is not a literal of an allowed type becomes a string.

    >>> text_to_json("12", frozenset({"string"})), text_to_json("12", frozenset({"integer"}))
    ('"12"', '12')
    >>> text_to_json("True", ALL_TYPES)
    'true'
    """
    literal = literal_to_json(text.strip())
    if literal is None or "string" not in types:
        return literal or to_json_string(text)
    # If the schema allows strings, only a literal of another allowed type is not a string.
    json_type = get_json_type(json.loads(literal))
    is_allowed = json_type in types or (json_type == "integer" and "number" in types)
    return literal if json_type != "string" and is_allowed else to_json_string(text)


def python_to_json(text: str, types: frozenset[str]) -> str:
    """Convert a Python literal to JSON; an unquoted word becomes a string.

    >>> python_to_json("'a'", ALL_TYPES), python_to_json("[True]", ALL_TYPES)
    ('"a"', '[true]')
    >>> python_to_json("5", frozenset({"string"}))
    '"5"'
    """
    literal = literal_to_json(text.strip())
    if literal is None or (types == {"string"} and not literal.startswith('"')):
        return to_json_string(text.strip())
    return literal


def literal_to_json(text: str) -> str | None:
    """Convert a JSON or Python literal to JSON; None if it is neither. JSON text is returned unchanged."""
    try:
        json.loads(text, parse_constant=_reject_constant)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        # Models write raw newlines inside Python strings.
        value = ast.literal_eval(text.replace("\n", "\\n") if text[:1] in ("'", '"') else text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def to_json_string(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape_json_text(text: str) -> str:
    """Escape text for the inside of a JSON string, so that a string can be streamed in pieces."""
    return to_json_string(text)[1:-1]
