"""JSON schemas that can be enforced. llguidance rejects many unsupported keywords and ignores the rest; this module
rejects the rest, so that no keyword is ignored.

The keyword lists come from JSON-Schema-Test-Suite and experiments (tests/chat/constraints/test_json_schema.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from afterglow.errors import InvalidArgument, UnsupportedOption

JsonSchema: TypeAlias = Any  # an object, or True or False
MAX_SCHEMA_DEPTH = 64

SCHEMA_KEYWORDS = frozenset({"items", "additionalItems", "additionalProperties"})  # one schema
SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})  # a list of schemas
SCHEMA_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # schemas by name
ENFORCED_KEYWORDS = (SCHEMA_KEYWORDS | SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS) | {
    *("type", "enum", "const", "$ref", "required", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
}
# Documentation and identification; they constrain nothing.
ANNOTATION_KEYWORDS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$comment", "$schema", "$id", "$anchor"),
    }
)
UNSUPPORTED_KEYWORD_HINTS = {
    "nullable": "write `null` into `type`",
    "x-guidance": "it would change the interpretation of the whole schema",
}

# Control characters need \u escapes, which are not allowed (see grammar.JSON_GRAMMAR_OPTIONS); llguidance drops them.
CONTROL_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
CONTROL_CHARACTER_ESCAPE = re.compile(r"\\(x[01]|x7[fF]|u00[01]|u007[fF]|[xu]\{|[cav0])")

YEAR_PATTERN, LEAP_YEAR_PATTERN = "[0-9]{4}", "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE_PATTERN = (
    f"({YEAR_PATTERN}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|{YEAR_PATTERN}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|{YEAR_PATTERN}-02-(0[1-9]|1[0-9]|2[0-8])|{LEAP_YEAR_PATTERN}-02-29)"
)
TIME_PATTERN = "[0-9]{2}:[0-9]{2}:[0-5]"
# llguidance allows 29 February in every year and a leap second in every minute.
STRICT_FORMAT_PATTERNS = {
    "date": f"^{DATE_PATTERN}$",
    "time": f"^{TIME_PATTERN}",
    "date-time": f"^{DATE_PATTERN}[Tt ]{TIME_PATTERN}",
}


def to_enforceable_schema(schema: JsonSchema, where: str = "json_schema") -> JsonSchema:
    """Return the schema with stricter formats; `UnsupportedOption` for the first keyword that cannot be enforced.

    >>> to_enforceable_schema({"type": "string", "format": "time"})["allOf"]
    [{'pattern': '^[0-9]{2}:[0-9]{2}:[0-5]'}]
    """
    checked: set[int] = set()
    for location, subschema in iter_subschemas(schema, where):
        checked.add(id(subschema))
        _check_keywords(subschema, location)
    for location, subschema in iter_subschemas(schema, where):
        _check_reference(subschema, location, schema, checked)
    return _add_format_patterns(schema)


def iter_subschemas(schema: JsonSchema, where: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every subschema with its location. Values (`const`, `enum`, `default`) are not schemas."""
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidArgument(where, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidArgument(where, f"must be a schema, not {type(schema).__name__}")
    yield where, schema
    for key, value in schema.items():
        if key in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            for name, subschema in value.items():
                yield from iter_subschemas(subschema, f"{where}.{key}.{name}", depth + 1)
        elif key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, subschema in enumerate(value):
                yield from iter_subschemas(subschema, f"{where}.{key}[{index}]", depth + 1)
        elif key in SCHEMA_KEYWORDS:
            yield from iter_subschemas(value, f"{where}.{key}", depth + 1)


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    for key in schema:
        if (
            key in ENFORCED_KEYWORDS
            or key in ANNOTATION_KEYWORDS
            or (key.startswith("x-") and key not in UNSUPPORTED_KEYWORD_HINTS)
        ):
            continue
        raise UnsupportedOption(f"{where}.{key}", UNSUPPORTED_KEYWORD_HINTS.get(key, "this keyword cannot be enforced"))
    _check_characters(schema, where)
    types = schema.get("type", "string")
    if "format" in schema and "string" not in (types if isinstance(types, list) else [types]):
        raise UnsupportedOption(f"{where}.format", f"formats of {types} cannot be enforced; formats of strings can")
    required = schema.get("required", ())
    minimum, enforceable = schema.get("minProperties", 0), max(1, len(required) if isinstance(required, list) else 0)
    if isinstance(minimum, int | float) and minimum > enforceable:
        # The model may repeat a name, which then counts once.
        raise UnsupportedOption(f"{where}.minProperties", f"more than {enforceable} needs as many names in `required`")


def _check_characters(schema: dict[str, Any], where: str) -> None:
    patterns = {"pattern": [schema.get("pattern")], "patternProperties": list(schema.get("patternProperties") or ())}
    for key, values in patterns.items():
        texts = [text for text in values if isinstance(text, str)]
        if any(CONTROL_CHARACTER.search(text) or CONTROL_CHARACTER_ESCAPE.search(text) for text in texts):
            raise UnsupportedOption(f"{where}.{key}", "control characters cannot be generated")
    for key in ("const", "enum"):
        if any(map(CONTROL_CHARACTER.search, _iter_strings(schema.get(key)))):
            raise UnsupportedOption(f"{where}.{key}", "control characters cannot be generated")


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _iter_strings(item)


def _check_reference(schema: dict[str, Any], where: str, root: JsonSchema, checked: set[int]) -> None:
    """Raise `UnsupportedOption` for a reference to a value that was not checked as a schema."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    target = root
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            target = target.get(name) if isinstance(target, dict) else None
    if isinstance(target, dict) and id(target) not in checked:
        raise UnsupportedOption(f"{where}.$ref", f"{reference} does not refer to a schema")


def _add_format_patterns(schema: JsonSchema) -> JsonSchema:
    """Add patterns to the formats that llguidance does not enforce strictly."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            result[key] = {name: _add_format_patterns(subschema) for name, subschema in value.items()}
        elif key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            result[key] = [_add_format_patterns(subschema) for subschema in value]
        else:
            result[key] = _add_format_patterns(value) if key in SCHEMA_KEYWORDS else value
    pattern = STRICT_FORMAT_PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        result["allOf"] = [*result.get("allOf", []), {"pattern": pattern}]
    return result
