"""Values that a model wrote as bare text or as Python, turned into JSON as the tool's schema asks."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from afterglow.chat.tools.tool import Tool

JSON_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ALL_TYPES = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})


def get_parameter_types(tool: Tool | None, name: str) -> frozenset[str]:
    """The JSON types that a tool's parameter may have; all where nothing is said."""
    schema = tool.parameters.get("properties", {}).get(name, True) if tool else True
    return get_schema_types(schema, tool.parameters if tool else {})


def get_schema_types(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema allows. `root` is where its references begin."""
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
    """What a reference like `#/$defs/Place` means; anything where it leads nowhere."""
    found: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key, True) if isinstance(found, Mapping) else True
    return found


def get_json_type(value: Any) -> str:
    """The JSON type of a value."""
    return JSON_TYPE_NAMES.get(type(value), "null")


def text_to_json(text: str, types: frozenset[str]) -> str:
    """Bare text as JSON. Text stays text where that may be; what cannot be read otherwise becomes text too.

    >>> from_text("12", frozenset({"string"})), from_text("12", frozenset({"integer"})), from_text("True", ANY)
    ('"12"', '12', 'true')
    """
    found = literal_to_json(text.strip())
    if found is None or "string" not in types:
        return found or to_json_string(text)
    # Where text is allowed, only a value of another allowed type is not text.
    kind = get_json_type(json.loads(found))
    return (
        found
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types))
        else to_json_string(text)
    )


def python_to_json(text: str, types: frozenset[str]) -> str:
    """A Python literal as JSON, a bare word as text.

    >>> from_python("'a'", ANY), from_python("[True]", ANY), from_python("5", frozenset({"string"}))
    ('"a"', '[true]', '"5"')
    """
    found = literal_to_json(text.strip())
    if found is None or (types == {"string"} and not found.startswith('"')):
        return to_json_string(text.strip())
    return found


def literal_to_json(text: str) -> str | None:
    """A JSON or Python literal as JSON; None if it is neither. JSON stays as it was written."""
    try:
        json.loads(text, parse_constant=_reject_constant)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        # A newline inside a Python string is an error that models make.
        found = ast.literal_eval(text.replace("\n", "\\n") if text[:1] in ("'", '"') else text)
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def to_json_string(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape_json_text(text: str) -> str:
    """Text as it stands inside a JSON string, so that a long one can be given piece by piece."""
    return to_json_string(text)[1:-1]
