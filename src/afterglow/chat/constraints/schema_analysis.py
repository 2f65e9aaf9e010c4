"""What a JSON schema allows, as far as its keywords say it directly: types, listed values, and overlap of two schemas.

The answers are safe: more types than possible, no list of values, or "not disjoint" if it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

JsonSchema: TypeAlias = Any  # an object, or True or False
Resolver: TypeAlias = Callable[[dict[str, Any]], JsonSchema]  # returns the target of a schema's `$ref`

ALL_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
IN_PLACE_KEYWORDS = ("allOf", "anyOf", "oneOf")  # lists of schemas that apply to the same instance
MAX_NESTED_SCHEMAS = 16  # references and subschemas in place that are followed
ARRAY_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # in a JSON pointer


def resolve_pointer(document: Any, pointer: str) -> Any:
    """Return the part of a document that a JSON pointer names; None if there is none."""
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list) and ARRAY_INDEX.fullmatch(name) and int(name) < len(document):
            document = document[int(name)]
        else:
            document = document.get(name) if isinstance(document, dict) else None
    return document


def build_resolver(root: JsonSchema) -> Resolver:
    """Return a resolver of references like `#/$defs/Place` in one document."""
    return lambda schema: resolve_pointer(root, str(schema["$ref"]).removeprefix("#"))


def list_conjuncts(schema: JsonSchema, resolve: Resolver, depth: int = MAX_NESTED_SCHEMAS) -> list[JsonSchema]:
    """Return schemas of which an instance matches all: the schema, what it refers to, and `allOf`."""
    if not isinstance(schema, dict) or depth == 0:
        return [schema] if isinstance(schema, bool) else []
    members = [resolve(schema)] if "$ref" in schema else []
    members += schema.get("allOf", [])
    return [schema, *(conjunct for member in members for conjunct in list_conjuncts(member, resolve, depth - 1))]


def iter_in_place(
    schema: JsonSchema, resolve: Resolver, keywords: Iterable[str] = IN_PLACE_KEYWORDS
) -> Iterator[dict[str, Any]]:
    """Yield the schemas that apply to the same instance: the schema, references, and subschemas in place.

    With the keyword `allOf` alone, these are schemas of which an instance matches all.
    """
    pending, visited = [schema], set()
    while pending:
        part = pending.pop(0)
        if isinstance(part, dict) and id(part) not in visited:
            visited.add(id(part))
            yield part
            pending += [resolve(part)] if "$ref" in part else []
            pending += [choice for keyword in keywords for choice in part.get(keyword, ())]


def get_types(schema: JsonSchema, resolve: Resolver, depth: int = MAX_NESTED_SCHEMAS) -> frozenset[str]:
    """Return the types that instances may have. "number" comes with "integer".

    >>> sorted(get_types({"anyOf": [{"const": "a"}, {"type": "number"}]}, lambda schema: True))
    ['integer', 'number', 'string']
    """
    types = frozenset(ALL_TYPES)
    for conjunct in list_conjuncts(schema, resolve, depth):
        if conjunct is False:
            return frozenset()
        if conjunct is True:
            continue
        declared = conjunct.get("type", list(ALL_TYPES))
        declared = [declared] if isinstance(declared, str) else declared
        nullable = ["null"] if conjunct.get("nullable") is True else []
        types &= _expand_types([*declared, *nullable])
        if (values := _get_listed_values(conjunct)) is not None:
            types &= _expand_types([*map(get_type, values), *nullable])
        for keyword in ("anyOf", "oneOf"):
            if keyword in conjunct and depth > 0:
                types &= frozenset().union(*(get_types(choice, resolve, depth - 1) for choice in conjunct[keyword]))
    return types


def list_values(schema: JsonSchema, resolve: Resolver, depth: int = MAX_NESTED_SCHEMAS) -> list[Any] | None:
    """Return all values of a schema with few values, each once; None if there are more than the keywords list.

    >>> list_values({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, lambda schema: True)
    ['a', 'b', None]
    """
    found: list[list[Any]] = []
    for conjunct in list_conjuncts(schema, resolve, depth):
        if conjunct is False:
            return []
        if conjunct is True:
            continue
        if (values := _get_listed_values(conjunct)) is not None:
            found.append([*values, None] if conjunct.get("nullable") is True else values)
        elif conjunct.get("type") in ("boolean", "null"):
            found.append([False, True] if conjunct["type"] == "boolean" else [None])
        for keyword in ("anyOf", "oneOf"):
            choices = [list_values(choice, resolve, depth - 1) for choice in conjunct.get(keyword, ())] if depth else []
            if choices and None not in choices:
                found.append([value for choice in choices if choice is not None for value in choice])
    if not found:
        return None
    first, *others = found
    common = [value for value in first if all(any(is_equal(value, v) for v in other) for other in others)]
    return [value for index, value in enumerate(common) if not any(is_equal(value, v) for v in common[:index])]


def are_disjoint(one: JsonSchema, other: JsonSchema, resolve: Resolver, depth: int = MAX_NESTED_SCHEMAS) -> bool:
    """Return whether certainly no instance matches both schemas."""
    common = get_types(one, resolve, depth) & get_types(other, resolve, depth)
    if not common:
        return True
    if depth == 0:
        return False
    values, other_values = list_values(one, resolve, depth), list_values(other, resolve, depth)
    if values is not None and other_values is not None:
        return not any(is_equal(value, other_value) for value in values for other_value in other_values)
    for schema, partner in ((one, other), (other, one)):
        for conjunct in list_conjuncts(schema, resolve, depth):
            choices = conjunct.get("anyOf", conjunct.get("oneOf")) if isinstance(conjunct, dict) else None
            if choices and all(are_disjoint(choice, partner, resolve, depth - 1) for choice in choices):
                return True
    if common != {"object"}:
        return False
    conjuncts = [[c for c in list_conjuncts(schema, resolve, depth) if isinstance(c, dict)] for schema in (one, other)]
    required = {name for group in conjuncts for conjunct in group for name in conjunct.get("required", ())}
    return any(
        are_disjoint(_get_property(conjunct, name), _get_property(partner, name), resolve, depth - 1)
        for name in sorted(required)
        for conjunct in conjuncts[0]
        for partner in conjuncts[1]
    )


def get_type(value: Any) -> str:
    """Return the JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. Python's True is 1; JSON's is not."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _get_listed_values(schema: dict[str, Any]) -> list[Any] | None:
    values = schema.get("enum")
    values = values if isinstance(values, list) else None
    if "const" not in schema:
        return values
    constant = schema["const"]
    return [constant] if values is None or any(is_equal(constant, value) for value in values) else []


def _get_property(schema: dict[str, Any], name: str) -> JsonSchema:
    """Return the schema of a property; True if it depends on patterns."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _expand_types(types: Iterable[str]) -> frozenset[str]:
    names = frozenset(types)
    return names | {"integer"} if "number" in names else names
