"""Converts values that a model wrote as unquoted text or Python literals to JSON of the types in the tool's schema."""

from __future__ import annotations

import ast
import json

from afterglow.chat.constraints.schema_analysis import ALL_TYPES, build_resolver, get_type, get_types
from afterglow.chat.tools.tool import Tool

ANY_TYPE = frozenset(ALL_TYPES)
MAX_NESTED_SCHEMAS = 8  # subschemas in place that are followed


def get_parameter_types(tool: Tool | None, name: str) -> frozenset[str]:
    """Return the JSON types that a tool's parameter allows; all types if the schema does not restrict them."""
    if tool is None:
        return ANY_TYPE
    schema = tool.parameters.get("properties", {}).get(name, True)
    return get_types(schema, build_resolver(tool.parameters), MAX_NESTED_SCHEMAS)


def text_to_json(text: str, types: frozenset[str]) -> str:
    """Convert unquoted text to JSON. Text that is not a literal of an allowed type becomes a string.

    >>> text_to_json("12", frozenset({"string"})), text_to_json("12", frozenset({"integer"}))
    ('"12"', '12')
    >>> text_to_json("True", ANY_TYPE)
    'true'
    """
    literal = literal_to_json(text.strip())
    if literal is None or "string" not in types:
        return literal or to_json_string(text)
    # If the schema allows strings, only a literal of another allowed type is not a string.
    json_type = get_type(json.loads(literal))
    return literal if json_type != "string" and json_type in types else to_json_string(text)


def python_to_json(text: str, types: frozenset[str]) -> str:
    """Convert a Python literal to JSON; an unquoted word becomes a string.

    >>> python_to_json("'a'", ANY_TYPE), python_to_json("[True]", ANY_TYPE)
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
        return repair_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def repair_surrogates(text: str) -> str:
    """Return text without surrogates: pairs, which escapes of JSON and Python may be, become their character, and
    unpaired ones U+FFFD.

    >>> repair_surrogates("\\ud83d\\ude00"), repair_surrogates("\\ud83d")
    ('😀', '�')
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_json_string(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape_json_text(text: str) -> str:
    """Escape text for the inside of a JSON string, so that a string can be streamed in pieces."""
    return to_json_string(text)[1:-1]
