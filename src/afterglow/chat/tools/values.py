"""Values that a model wrote as bare text or as Python, turned into JSON as the tool's schema asks."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from afterglow.chat.tools.tool import Tool

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
ANY = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})


def parameter_types(tool: Tool | None, name: str) -> frozenset[str]:
    """The JSON types that a tool's parameter may have; all where nothing is said."""
    schema = tool.parameters.get("properties", {}).get(name, True) if tool else True
    return types_of(schema, tool.parameters if tool else {})


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema allows. `root` is where its references begin."""
    if not isinstance(schema, Mapping) or depth == 0:
        return ANY
    allowed = ANY
    if "type" in schema:
        named = schema["type"]
        allowed = frozenset([named] if isinstance(named, str) else named)
    if "enum" in schema or "const" in schema:
        allowed &= frozenset(map(type_of, schema.get("enum", [schema.get("const")])))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            allowed &= frozenset().union(*(types_of(choice, root, depth - 1) for choice in schema[keyword]))
    for choice in schema.get("allOf", ()):
        allowed &= types_of(choice, root, depth - 1)
    if "$ref" in schema:
        allowed &= types_of(referred(str(schema["$ref"]), root), root, depth - 1)
    return allowed


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference like `#/$defs/Place` means; anything where it leads nowhere."""
    found: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key, True) if isinstance(found, Mapping) else True
    return found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return TYPES.get(type(value), "null")


def from_text(text: str, types: frozenset[str]) -> str:
    """Bare text as JSON. Text stays text where that may be; what cannot be read otherwise becomes text too.

    >>> from_text("12", frozenset({"string"})), from_text("12", frozenset({"integer"})), from_text("True", ANY)
    ('"12"', '12', 'true')
    """
    found = literal(text.strip())
    if found is None or "string" not in types:
        return found or quoted(text)
    # Where text is allowed, only a value of another allowed type is not text.
    kind = type_of(json.loads(found))
    return found if kind != "string" and (kind in types or (kind == "integer" and "number" in types)) else quoted(text)


def from_python(text: str, types: frozenset[str]) -> str:
    """A Python literal as JSON, a bare word as text.

    >>> from_python("'a'", ANY), from_python("[True]", ANY), from_python("5", frozenset({"string"}))
    ('"a"', '[true]', '"5"')
    """
    found = literal(text.strip())
    if found is None or (types == {"string"} and not found.startswith('"')):
        return quoted(text.strip())
    return found


def literal(text: str) -> str | None:
    """A JSON or Python literal as JSON; None if it is neither. JSON stays as it was written."""
    try:
        json.loads(text, parse_constant=_refused)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        # A newline inside a Python string is an error that models make.
        found = ast.literal_eval(text.replace("\n", "\\n") if text[:1] in ("'", '"') else text)
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refused(name: str) -> None:
    raise ValueError(name)


def quoted(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string, so that a long one can be given piece by piece."""
    return quoted(text)[1:-1]
