"""Schemas that pydantic, zod and OpenAPI generators write are accepted and enforced.

Each row has an instance that the grammar allows and one that it does not; `jsonschema` must agree with both.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pydantic
import pytest
from pydantic import Field, TypeAdapter

from afterglow.chat.constraints.grammar import build_grammar, build_json_schema_grammar
from afterglow.chat.constraints.json_schema import to_enforceable_schema
from afterglow.chat.constraints.response_format import parse_response_format
from afterglow.chat.constraints.tool_choice import parse_tool_choice
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.tool import parse_tools
from afterglow.errors import InvalidArgument, InvalidGrammar, RequestError, UnsupportedOption
from afterglow.server.openai.responses import build_response_format
from afterglow.server.openai.schema.responses import ResponseRequest
from support.grammar_text import accepts, generate

UUID4 = "9b2f1c3a-5d4e-4f6a-8b7c-0d1e2f3a4b5c"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tags: set[str] = set()


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Point(NamedTuple):
    x: int
    name: str = "origin"


class Order(pydantic.BaseModel):
    """What an application writes: several of the shapes in one model."""

    id: pydantic.UUID4
    path: pathlib.Path
    colors: frozenset[Color]
    counts: dict[Literal["small", "large"], Annotated[int, Field(ge=0)]]
    note: str | None = None


PYDANTIC: list[tuple[Any, Any, Any]] = [
    # (type, allowed instance, forbidden instance)
    (set[str], ["a", "b"], ["a", "a"]),
    (frozenset[int], [1, 2, 12], [1, 2, 1]),
    (set[float], [1.5, 1], [1, 1.0]),
    (set[Color], ["blue", "red"], ["red", "red"]),
    (set[Literal["a", "b"]], [], ["a", "b", "a"]),
    (set[bool | None], [True, None, False], [True, None, True]),
    (set[tuple[int, str]], [[1, "a"], [1, "b"]], [[1, "a"], [1, "a"]]),
    (set[datetime.date], ["2024-02-29", "2024-02-28"], ["2024-02-29", "2024-02-29"]),
    (set, ["a", 1, True], ["a", "a"]),
    (list[set[int]], [[1], [1, 2]], [[1], [2, 2]]),
    (dict[str, set[str]], {"a": ["x"], "b": ["x", "y"]}, {"a": ["x"], "b": ["y", "y"]}),
    (pydantic.conset(int, min_length=1, max_length=2), [3, 4], [3, 4, 5]),
    (dict[Literal["a", "b"], int], {"a": 1, "b": 2}, {"c": 1}),
    (dict[Color, int], {"red": 1}, {"green": 1}),
    (dict[uuid.UUID, int], {UUID4: 1}, {UUID4: "x"}),
    (dict[Annotated[str, Field(min_length=1, max_length=3)], int], {"ab": 1}, {"abcd": 1}),
    (dict[Annotated[str, Field(pattern="^a")], int], {"ab": 1}, {"ab": "x"}),
    (dict[int, str], {"1": "x"}, {"1": 1}),
    (Annotated[float, Field(json_schema_extra={"unit": "kg"})], 1.5, "1.5"),
    (dict[datetime.date, int], {"2024-02-29": 1}, {"2024-02-29": "x"}),
    (dict[ipaddress.IPv4Address, int], {"10.0.0.1": 1}, {"10.0.0.1": "x"}),
    (dict[pydantic.AnyUrl, int], {"https://example.org": 1}, {"https://example.org": "x"}),
    (dict[datetime.timedelta, int], {"P1DT2H": 1}, {"P1DT2H": "x"}),
    (pathlib.Path, "/tmp/x", 5),
    (pydantic.FilePath, "x.txt", None),
    (bytes, "abc", ["abc"]),
    (pydantic.SecretStr, "hush", 1),
    (pydantic.UUID4, UUID4, 4),
    (uuid.UUID, UUID4, {}),
    (pydantic.Base64Bytes, "aGk=", 0),
    (pydantic.Base64UrlStr, "aGk=", 0),
    (re.Pattern, "a+", False),
    (ipaddress.IPv4Network, "10.0.0.0/8", 10),
    (ipaddress.IPv6Interface, "::1/128", 10),
    (pydantic.IPvAnyAddress, "10.0.0.1", 10),
    (pydantic.Json, "[1]", [1]),
    (pydantic.Json[list[int]], "[1]", [1]),
    (decimal.Decimal, 1.25, [1.25]),
    (datetime.datetime, "2024-02-29T23:59:59Z", 5),
    (datetime.time, "23:59:59Z", 5),
    (datetime.timedelta, "P1DT2H", 5),
    (pydantic.HttpUrl, "https://example.org/a?b=c", ""),
    (pydantic.ByteSize, "12 MB", "x"),
    (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "dog", "tags": ["a"]}, {"kind": "cow"}),
    (Tree, {"value": 1, "children": [{"value": 2}]}, {"value": 1, "children": [{}]}),
    (Point, [1, "a"], [1, 2]),
    (tuple[int, str], [1, "a"], [1]),
    (pydantic.conlist(int, min_length=1, max_length=2), [1, 2], []),
    (pydantic.confloat(ge=0, multiple_of=0.5), 2.5, 2.25),
    (Annotated[str, Field(pattern=r"^\d+$", max_length=3)], "123", "1234"),
    (Literal["a", 1, None, True], 1, 2),
    (int | None, None, "x"),
    (Any, {"a": [1, None]}, None),
    (
        Order,
        {"id": UUID4, "path": "x", "colors": ["blue"], "counts": {"small": 1}, "note": None},
        {"id": UUID4, "path": "x", "colors": ["blue", "blue"], "counts": {"small": 1}},
    ),
]

# Patterns and shapes as zod 4 (z.toJSONSchema) and zod-to-json-schema write them.
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
SAFE_INTEGER = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
STRING, NUMBER = {"type": "string"}, {"type": "number"}

ZOD: dict[str, tuple[Any, Any, Any]] = {
    "record": ({"type": "object", "propertyNames": STRING, "additionalProperties": NUMBER}, {"a": 1}, {"a": "1"}),
    "record of enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": NUMBER,
            "required": ["a", "b"],
        },
        {"a": 1, "b": 2},
        {"a": 1},
    ),
    "record of pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^k[0-9]$"}, "additionalProperties": NUMBER},
        {"k1": 1},
        {"x": 1},
    ),
    "record of uuid": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{8}-[0-9a-f-]{27}$"},
            "additionalProperties": NUMBER,
        },
        {UUID4: 1},
        {"x": 1},
    ),
    "record of never": ({"type": "object", "additionalProperties": {"not": {}}}, {}, {"a": 1}),
    "never": ({"anyOf": [{"not": {}}, STRING]}, "a", 1),
    "optional of never": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": NUMBER}, "required": ["b"]},
        {"b": 1},
        {"a": 1, "b": 1},
    ),
    "undefined": ({"type": "array", "items": {"anyOf": [{"not": {}}, NUMBER]}}, [1], ["a"]),
    "set": ({"type": "array", "uniqueItems": True, "items": STRING}, ["a", "aa"], ["a", "aa", "a"]),
    "set of objects": (
        {
            "type": "array",
            "uniqueItems": True,
            "items": {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False},
        },
        [{"a": 1}, {"a": 2}],
        [{"a": 1}, {"a": 1.0}],
    ),
    "map": (
        {
            "type": "array",
            "maxItems": 125,
            "items": {"type": "array", "items": [STRING, NUMBER], "minItems": 2, "maxItems": 2},
            **DRAFT_7,
        },
        [["a", 1]],
        [["a", "b"]],
    ),
    "tuple with rest": (
        {"type": "array", "minItems": 1, "items": [STRING], "additionalItems": NUMBER, **DRAFT_7},
        ["a", 1, 2],
        ["a", "b"],
    ),
    "tuple": ({"type": "array", "prefixItems": [STRING, NUMBER], "items": False}, ["a", 1], ["a", 1, 2]),
    "int": (SAFE_INTEGER, 5, 2**53),
    "positive": ({**SAFE_INTEGER, "exclusiveMinimum": 0}, 1, 0),
    "bigint": ({"type": "integer", "format": "int64"}, -5, 1.5),
    "float32": ({**NUMBER, "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, 1.5, "x"),
    "multiple": ({**NUMBER, "multipleOf": 0.01}, 1.25, 1.255),
    "email": ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, "a.b@example.org", "a..b@example.org"),
    "email with dot": ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, "a@example.org", ".a@example.org"),
    "duration": ({"type": "string", "format": "duration", "pattern": ZOD_DURATION}, "P1DT2H", "PT"),
    "hostname": (
        {"type": "string", "pattern": r"^(?=.{1,9}\.?$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9]+)*\.?$"},
        "a.org",
        "abcdefghij.org",
    ),
    "base64": ({"type": "string", "format": "base64", "contentEncoding": "base64"}, "aGk=", 1),
    "file": ({"type": "string", "format": "binary", "contentEncoding": "binary", "minLength": 1}, "x", ""),
    "emoji": (
        {"type": "string", "pattern": r"^[😀-😂]+$", "format": "emoji", "errorMessage": {"pattern": "no"}},
        "😀",
        "a",
    ),
    "nullable": ({"anyOf": [STRING, {"type": "null"}]}, None, 1),
    "literals": ({"type": ["string", "number"], "enum": ["a", 1]}, 1, 2),
    "discriminated union": (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": t}, t: NUMBER}, "required": ["t"]} for t in ("a", "b")
            ]
        },
        {"t": "b", "b": 1},
        {"t": "c"},
    ),
    "lazy": (
        {
            "type": "object",
            "properties": {"value": NUMBER, "children": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["value", "children"],
            "additionalProperties": False,
            **DRAFT_7,
        },
        {"value": 1, "children": [{"value": 2, "children": []}]},
        {"value": 1, "children": [{}]},
    ),
    "seen before": (
        {
            "type": "object",
            "properties": {
                "home": {"type": "object", "properties": {"a/b": STRING}, "required": ["a/b"]},
                "city": {"$ref": "#/properties/home/properties/a~1b"},
            },
            "required": ["city"],
        },
        {"city": "x"},
        {"city": 1},
    ),
    "intersection": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
                {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]},
            ]
        },
        {"a": "x", "b": 1},
        {"a": "x"},
    ),
    "registered schema": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/U"}},
            "required": ["a"],
            "$defs": {"U": {"id": "U", "type": "string", "placeholder": "x"}},
        },
        {"a": "x"},
        {"a": 1},
    ),
    "described reference": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/definitions/A", "description": "x", "maxLength": 0}},
            "required": ["a"],
            "definitions": {"A": STRING},
            **DRAFT_7,
        },
        {"a": "ignored in draft 7"},
        {"a": 1},
    ),
}

OPENAPI: dict[str, tuple[Any, Any, Any]] = {
    "components": (
        {
            "$ref": "#/components/schemas/Person",
            "components": {
                "schemas": {
                    "Person": {
                        "type": "object",
                        "properties": {"tags": {"$ref": "#/components/schemas/Tags"}},
                        "required": ["tags"],
                    },
                    "Tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
                }
            },
        },
        {"tags": [1, 2]},
        {"tags": [1, 1]},
    ),
    "int32": ({"type": "integer", "format": "int32"}, 2**31 - 1, 1.5),
    "int64": ({"type": "integer", "format": "int64"}, 2**53, "1"),
    "float": ({"type": "number", "format": "float"}, 1.5, "1"),
    "double": ({"type": "number", "format": "double", "example": 1}, -1.5, None),
    "decimal count": ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, "ab", "abc"),
    "decimal count of items": ({"type": "array", "maxItems": 1.0, "items": {}}, [1], [1, 2]),
    "password": ({"type": "string", "format": "password"}, "x", 1),
    "byte": ({"type": "string", "format": "byte", "contentMediaType": "image/png"}, "aGk=", 1),
    "exclusive bounds": ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, 1, 0),
    "inclusive bounds": ({"type": "integer", "maximum": 5, "exclusiveMaximum": False}, 5, 6),
    "all of one reference": (
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": STRING}, "readOnly": True},
        "x",
        1,
    ),
    "not null": ({"not": {"type": "null"}}, 1, None),
    "not a number": ({"type": ["string", "number"], "not": {"type": "number"}}, "1", 1),
    "closed object": ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
    "free form": ({"type": "object", "xml": {"name": "x"}, "externalDocs": {"url": "x"}}, {"a": {"b": []}}, []),
    "extension": ({"type": "string", "x-order": 1}, "x", 1),
    "vocabulary": ({"$vocabulary": {"https://example.org/v": True}, "type": "string"}, "x", 1),
    "dynamic anchor": ({"$dynamicAnchor": "a", "type": ["array", "null"], "items": {"$ref": "#a"}}, [[None]], [1]),
    "recursive anchor": ({"$recursiveAnchor": True, "type": "array", "items": {"$ref": "#"}}, [[]], [1]),
    "every integer": ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, 2**62, 0.5),
}

BOOLEANS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2}
STRINGS = {"type": "array", "items": STRING}
OBJECTS = {"type": "array", "items": {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}}
UNIQUE = {"uniqueItems": True}

# `uniqueItems` apart from the `items` that it applies to.
UNIQUE_ITEMS: dict[str, tuple[Any, Any, Any]] = {
    "in another member": ({"allOf": [UNIQUE, BOOLEANS]}, [True, False], [True, True]),
    "beside a reference": ({"$ref": "#/$defs/L", **UNIQUE, "$defs": {"L": STRINGS}}, ["a", "b"], ["a", "a"]),
    "beside a reference to objects": (
        {"$ref": "#/$defs/L", **UNIQUE, "$defs": {"L": OBJECTS}},
        [{"a": 1}, {"a": 2}],
        [{"a": 1}, {"a": 1}],
    ),
    "beside a chain of references": (
        {"$ref": "#/$defs/K", **UNIQUE, "$defs": {"K": {"allOf": [{"$ref": "#/$defs/L"}]}, "L": STRINGS}},
        ["a", "b"],
        ["a", "a"],
    ),
    "in what is referred to": (
        {"$ref": "#/$defs/U", "items": STRING, "$defs": {"U": {"type": "array", **UNIQUE}}},
        ["a", "b"],
        ["a", "a"],
    ),
    "beside alternatives": (
        {"type": "array", **UNIQUE, "anyOf": [{"items": STRING}, {"items": NUMBER}]},
        [1, 2],
        [1, 1],
    ),
    "beside an alternative without items": (
        {"type": "array", **UNIQUE, "anyOf": [{"items": STRING}, {"maxItems": 3}]},
        [1, {"a": 1}],
        [1, 1],
    ),
    "beside exclusive alternatives": (
        {"type": "array", **UNIQUE, "oneOf": [BOOLEANS, {"type": "null"}]},
        [True, False],
        [False, False],
    ),
    "beside items and items of a member": (
        {"type": "array", **UNIQUE, "items": STRING, "allOf": [{"items": {"maxLength": 1}}]},
        ["a", "b"],
        ["a", "a"],
    ),
    "beside free items and items of a member": (
        {"type": "array", **UNIQUE, "items": {}, "allOf": [OBJECTS]},
        [{"a": 1}],
        [{"a": 1}, {"a": 1}],
    ),
    "beside first items of a member": (
        {"type": "array", **UNIQUE, "items": STRING, "allOf": [{"prefixItems": [{"maxLength": 1}]}]},
        ["a", "bc"],
        ["a", "a"],
    ),
    "of a property": (
        {
            "type": "object",
            "properties": {"a": {"allOf": [{"$ref": "#/$defs/L"}], **UNIQUE}, "b": {"$ref": "#/$defs/L"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"L": STRINGS},
        },
        {"a": ["x", "y"], "b": ["x", "x"]},
        {"a": ["x", "x"], "b": ["x"]},
    ),
    "of items that may be anything": (
        {"type": "array", **UNIQUE, "items": {"$ref": "#/$defs/any"}, "$defs": {"any": {"description": "x"}}},
        [1, "a"],
        [1, 1],
    ),
    "of items with an alternative that is anything": (
        {"type": "array", **UNIQUE, "items": {"anyOf": [{"title": "x"}, STRING]}},
        [1, "a"],
        [1, 1],
    ),
    "of items with a member that is anything": ({"type": "array", **UNIQUE, "items": {"allOf": [{}]}}, [1], [1, 1]),
    "of a first item that may be anything": ({"type": "array", **UNIQUE, "prefixItems": [True]}, [1, "a"], [1, 1]),
    "of one alternative": ({"anyOf": [{**STRINGS, **UNIQUE}, {"type": "null"}]}, ["a"], ["a", "a"]),
    "of an alternative that is referred to": (
        {
            "anyOf": [{"$ref": "#/$defs/U"}, {"type": "null"}],
            "$defs": {"U": {"allOf": [{"$ref": "#/$defs/L"}], **UNIQUE}, "L": STRINGS},
        },
        ["a"],
        ["a", "a"],
    ),
}

ROWS = [
    *(pytest.param(TypeAdapter(type).json_schema(), *rest, id=f"pydantic {type}"[:60]) for type, *rest in PYDANTIC),
    *(pytest.param(*row, id=f"zod {name}") for name, row in ZOD.items()),
    *(pytest.param(*row, id=f"openapi {name}") for name, row in OPENAPI.items()),
    *(pytest.param(*row, id=f"unique items {name}") for name, row in UNIQUE_ITEMS.items()),
]


def is_valid(instance: Any, schema: Any) -> bool:
    draft_4 = any(isinstance(schema.get(key), bool) for key in ("exclusiveMinimum", "exclusiveMaximum"))
    default = jsonschema.Draft4Validator if draft_4 else jsonschema.Draft202012Validator
    return jsonschema.validators.validator_for(schema, default)(schema).is_valid(instance)


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), ROWS)
def test_a_shape_is_accepted_and_enforced(schema: Any, allowed: Any, forbidden: Any) -> None:
    grammar = build_json_schema_grammar(schema)
    for separators in ((", ", ": "), (",", ":")):
        assert accepts(grammar, json.dumps(allowed, separators=separators, ensure_ascii=False))
    assert is_valid(allowed, schema)
    if schema != {}:  # everything is an instance
        assert not accepts(grammar, json.dumps(forbidden))
        assert not is_valid(forbidden, schema)


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), ROWS)
def test_a_rewritten_shape_is_a_schema_with_the_same_verdicts(schema: Any, allowed: Any, forbidden: Any) -> None:
    rewritten = to_enforceable_schema(schema)
    jsonschema.Draft202012Validator.check_schema(rewritten)
    assert jsonschema.Draft202012Validator(rewritten).is_valid(allowed)
    assert schema == {} or not jsonschema.Draft202012Validator(rewritten).is_valid(forbidden)
    assert to_enforceable_schema(rewritten) == rewritten


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        # OpenAPI 3.0; JSON Schema knows no `nullable`
        ({"type": "string", "nullable": True}, "null", True),
        ({"type": "string", "nullable": False}, "null", False),
        ({"type": "string", "enum": ["a"], "nullable": True}, "null", True),
        ({"type": "string", "enum": ["a"], "nullable": True}, '"b"', False),
        ({"allOf": [{"$ref": "#/$defs/a"}], "nullable": True, "$defs": {"a": NUMBER}}, "null", True),
        # formats are annotations of the standard; these are enforced nevertheless
        ({"type": "string", "format": "uuid4"}, json.dumps(UUID4), True),
        ({"type": "string", "format": "uuid4"}, json.dumps(UUID4.replace("-4f", "-1f")), False),
        ({"type": "integer", "format": "int32"}, str(2**31), False),
        ({"type": "integer", "format": "uint8"}, "-1", False),
        ({"type": "string", "format": "uuid4"}, json.dumps(UUID4.replace("-8b", "-cb")), False),
        ({"type": "string", "format": "uuid7"}, json.dumps(UUID4.replace("-4f", "-7f").replace("-8b", "-BB")), True),
        ({"type": "integer", "format": "int32", "maximum": 5}, "6", False),
        ({"type": "integer", "format": "int32", "maximum": 5, "exclusiveMaximum": True}, "5", False),
        ({"type": "integer", "format": "int64"}, str(2**62), True),
        ({"type": "integer", "format": "uint64", "minimum": -5}, "-1", False),
        ({"type": "object", "propertyNames": {"format": "date"}}, '{"2023-02-29": 1}', False),
        ({"type": "object", "propertyNames": {"format": "time"}}, '{"23:59:59.5+01:00": 1}', True),
        ({"type": "object", "propertyNames": {"format": "time"}}, '{"23:59:59": 1}', False),
        ({"type": "object", "propertyNames": {"format": "time"}}, '{"24:00:00Z": 1}', False),
        ({"type": "object", "propertyNames": {"format": "date-time"}}, '{"2024-02-29T23:59:59Z": 1}', True),
        ({"type": "object", "propertyNames": {"format": "date-time"}}, '{"2024-02-29T99:99:59Z": 1}', False),
        ({"type": "object", "propertyNames": {"format": "date-time"}}, '{"2024-02-29T23:59:5": 1}', False),
        ({"type": "object", "propertyNames": {"format": "date-time"}}, '{"2024-02-29T23:59:59+1:00": 1}', False),
        ({"type": "object", "propertyNames": {"format": "uuid4"}}, json.dumps({UUID4.replace("-8b", "-7b"): 1}), False),
        # beyond the exact integers of a float
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53), False),
        ({"type": "integer", "exclusiveMaximum": 2**53}, str(2**53), False),
    ],
)
def test_what_the_standard_leaves_open_is_enforced(schema: Any, text: str, allowed: bool) -> None:
    assert accepts(build_json_schema_grammar(schema), text) is allowed


@pytest.mark.parametrize("version", [1, 3, 4, 5, 6, 7, 8])
def test_pydantic_accepts_every_uuid_of_a_version(version: int) -> None:
    adapter = TypeAdapter(getattr(pydantic, f"UUID{version}"))
    grammar = build_json_schema_grammar(adapter.json_schema())
    for seed in range(20):
        text = generate(grammar, Random(seed))
        assert text is not None
        assert adapter.validate_json(text).version == version


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "json_schema.oneOf"),
        ({"not": {"const": 1}}, "json_schema.not"),
        ({"type": "number", "not": {"type": "integer"}}, "json_schema.not"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "json_schema.propertyNames.not"),
        ({"$ref": "https://example.org/schema.json"}, "json_schema.$ref"),
        ({"const": 2**53 + 1}, "json_schema.const"),
        ({"propertyNames": {"enum": ["a"], "maxLength": 0}}, "json_schema.propertyNames.maxLength"),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "array", "uniqueItems": True, "items": STRING}},
            "json_schema.uniqueItems",
        ),
        (
            {"type": "array", "uniqueItems": True, "prefixItems": [{"type": "array", "uniqueItems": True}]},
            "json_schema.uniqueItems",
        ),
        (
            {"anyOf": [{**STRINGS, **UNIQUE}, {"type": "array", "items": {**STRINGS, **UNIQUE}}]},
            "json_schema.anyOf[0].uniqueItems",
        ),
        ({**STRINGS, "anyOf": [UNIQUE, {"maxItems": 2}]}, "json_schema.anyOf[0].uniqueItems"),
        (
            {"allOf": [STRINGS, {"$ref": "#/$defs/A"}], "$defs": {"A": {"anyOf": [UNIQUE, {"maxItems": 2}]}}},
            "json_schema.$defs.A.anyOf[0].uniqueItems",
        ),
        (
            {"oneOf": [BOOLEANS, {"type": "null"}], "anyOf": [UNIQUE, {"maxItems": 2}]},
            "json_schema.anyOf[0].uniqueItems",
        ),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "json_schema.unevaluatedProperties"),
    ],
)
def test_what_would_change_the_answer_is_rejected_by_name(schema: Any, name: str) -> None:
    with pytest.raises(UnsupportedOption) as caught:
        build_json_schema_grammar(schema)
    assert caught.value.name == name


def test_properties_of_members_keep_their_order() -> None:
    member = {"properties": {"a": NUMBER}, "required": ["a"]}
    schema = {"allOf": [member], "type": "object", "properties": {"b": NUMBER}, "required": ["b"]}
    assert accepts(build_json_schema_grammar(schema), '{"a": 1, "b": 1}')


def test_alternatives_that_refer_to_each_other_many_times_are_rejected_soon() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/A"}] * 10}
    schema = {"$defs": {"A": many}, "oneOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}
    with pytest.raises(UnsupportedOption, match="references"):
        build_json_schema_grammar(schema)


def test_a_long_chain_of_references_is_accepted() -> None:
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(500)}
    build_json_schema_grammar({"$defs": chain | {"d500": {"type": "null"}}, "$ref": "#/$defs/d0"})


def test_alternatives_that_are_both_nullable_overlap() -> None:
    members = [{"type": "string", "nullable": True}, {"type": "integer", "nullable": True}]
    with pytest.raises(UnsupportedOption, match="oneOf"):
        build_json_schema_grammar({"oneOf": members})


ZOD_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "time", "pattern": ZOD_TIME},
        {"format": "time", "allOf": [{"pattern": ZOD_TIME}, {"pattern": "[0-9]$"}]},
        {"format": "time", "$ref": "#/$defs/T", "$defs": {"T": {"type": "string", "pattern": ZOD_TIME}}},
        {"type": "string", "format": "uuid4", "pattern": ZOD_TIME},
        {"type": "string", "format": "email", "pattern": ZOD_TIME},
    ],
)
@pytest.mark.parametrize("types", [[], ["null"]])
def test_a_pattern_that_no_text_of_the_format_matches_is_enforced_alone(schema: Any, types: list[str]) -> None:
    schema = {**schema, "type": ["string", *types]} if "type" in schema else schema
    grammar = build_json_schema_grammar(schema)
    for text in ("10:30", "23:59:59.5"):
        assert is_valid(text, schema)
        assert accepts(grammar, json.dumps(text))
    assert not is_valid("24:00", schema)
    assert not accepts(grammar, '"24:00"')


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"format": "date", "pattern": "^2024"}, "2024-02-29", "2024-02-30"),
        ({"format": "date", "pattern": "^(?=2)"}, "2024-02-29", "2024-02-30"),
        ({"format": "uuid4", "pattern": "^9"}, UUID4, UUID4.replace("-4f", "-1f")),
        ({"format": "time", "pattern": "Z$"}, "10:30:00Z", "10:30Z"),
    ],
)
def test_a_format_beside_a_pattern_that_narrows_it_is_enforced(schema: Any, allowed: str, forbidden: str) -> None:
    grammar = build_json_schema_grammar({"type": "string", **schema})
    assert accepts(grammar, json.dumps(allowed))
    assert not accepts(grammar, json.dumps(forbidden))


@pytest.mark.parametrize("schema", [{"pattern": "^a$", "allOf": [{"pattern": "^b$"}]}, {"enum": [], "format": "date"}])
def test_a_schema_without_instances_is_rejected(schema: Any) -> None:
    with pytest.raises(InvalidGrammar, match="Unsatisfiable"):
        build_json_schema_grammar({"type": "string", "format": "time", **schema})


NAME_FORMATS = {
    # (allowed names, forbidden names)
    "ipv4": (["10.0.0.1", "255.249.100.0"], ["10.0.0.256", "10.0.0", "10.0.0.01"]),
    "ipv6": (
        ["::", "::1", "1::", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8"],
        ["1::2::3", ":1", "12345::", "::1%eth1"],
    ),
    "duration": (["P1D", "PT36H", "P1Y2M3DT4H5M6S", "P2W"], ["P", "PT", "1D", "P1D2W", "P1DT"]),
    "email": (["a@example.org", "a.b+c@x"], ["a", "a..b@example.org", ".a@example.org", "a@-b"]),
    "hostname": (["example.org", "x", "a-b.c"], ["-a", "a-", "a..b", f"{'a' * 64}.org", ""]),
    "uri": (
        ["https://example.org/a?b=c#d", "urn:a:b", "http://u@[::1]:80/", "a:"],
        ["example.org", "http://a b", ":a", "a:<"],
    ),
    "uuid": ([UUID4], [UUID4[:-1], f"{UUID4}0"]),
}


@pytest.mark.parametrize("name", NAME_FORMATS)
def test_a_format_of_names_is_enforced(name: str) -> None:
    schema = {"propertyNames": {"type": "string", "format": name}, "type": "object", "additionalProperties": NUMBER}
    grammar, allowed, forbidden = build_json_schema_grammar(schema), *NAME_FORMATS[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in allowed:
        assert accepts(grammar, json.dumps({text: 1}))
        assert validator.is_valid({text: 1})
    for text in forbidden:
        assert not accepts(grammar, json.dumps({text: 1}))
    for seed in range(10):
        generated = generate(grammar, Random(seed), max_tokens=300)
        assert generated is None or validator.is_valid(json.loads(generated)), generated


@pytest.mark.parametrize("type", [ipaddress.IPv4Address, ipaddress.IPv6Address, uuid.UUID])
def test_pydantic_accepts_the_generated_keys_of_a_dictionary(type: Any) -> None:
    adapter = TypeAdapter(dict[type, bool])
    grammar = build_json_schema_grammar(adapter.json_schema())
    for seed in range(8):
        text = generate(grammar, Random(seed), max_tokens=300)
        assert text is None or adapter.validate_json(text) is not None


def test_a_complete_pattern_beside_a_format_of_names_is_enforced_alone() -> None:
    """Generators write both; no grammar intersects patterns of names."""
    for name, pattern, allowed in (("email", ZOD_EMAIL, "a.b@example.org"), ("ipv4", "^[0-9.]+$", "10.0.0.1")):
        names = {"type": "string", "format": name, "pattern": pattern}
        grammar = build_json_schema_grammar({"type": "object", "propertyNames": names})
        assert accepts(grammar, json.dumps({allowed: 1}))
        assert not accepts(grammar, json.dumps({"..": 1} if name == "email" else {"a": 1}))


@pytest.mark.parametrize(
    "names",
    [
        {"format": "date", "pattern": "^2"},
        {"format": "uuid4", "pattern": "0"},
        {"pattern": "^a", "allOf": [{"pattern": "b$"}]},
        {"pattern": "^a.*b$", "maxLength": 5},
        {"pattern": "^[a-z]{3}$", "maxLength": 2},
    ],
)
def test_names_with_several_patterns_are_rejected(names: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption) as caught:
        build_json_schema_grammar({"type": "object", "propertyNames": {"type": "string", **names}})
    assert caught.value.name == "json_schema.propertyNames"


NAME_SCHEMAS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # (schema of names, allowed names, forbidden names)
    ({"anyOf": [{"enum": ["a"]}, STRING]}, ["a", "bc", ""], []),
    ({"anyOf": [STRING, NUMBER]}, ["a", "1"], []),
    ({"oneOf": [STRING, {"type": "null"}]}, ["a"], []),
    ({"not": NUMBER}, ["a", "1"], []),
    ({"not": STRING}, [], ["a"]),
    ({"not": {"minimum": 5, "type": "integer"}, "minimum": 3, "items": False, "required": ["a"]}, ["a"], []),
    ({"type": ["string", "null"], "maxLength": 1}, ["", "ü"], ["ab"]),
    (
        {"anyOf": [{"enum": ["a", "b.c"]}, {"pattern": "^x"}, {"type": "integer"}]},
        ["a", "b.c", "x1"],
        ["ab", "bxc", ""],
    ),
    ({"anyOf": [{"maxLength": 1}, {"pattern": "^[0-9]+$", "minLength": 3}]}, ["a", "123"], ["ab", "12"]),
    ({"oneOf": [{"const": "a", "description": "x"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"anyOf": [{"const": "a"}, {"const": 1}]}, ["a"], ["1"]),
    ({"anyOf": [{"enum": [1, None]}, {"pattern": "^a"}]}, ["a"], ["", "1"]),
    ({"anyOf": [{"enum": ["b"], "const": "c"}, {"pattern": "^a"}]}, ["a"], ["", "b", "c"]),
    ({"pattern": "^[a-z]*$", "minLength": 2}, ["ab", "abc"], ["a", "A1"]),
    ({"pattern": r"^\d{2,}$", "minLength": 1, "maxLength": 3}, ["12", "123"], ["1", "1234", "ab"]),
    ({"pattern": "^x-.*", "minLength": 1}, ["x-", "x-a"], ["", "a"]),
    ({"pattern": "^[a-z]$", "allOf": [{"minLength": 1.0}]}, ["a"], ["", "ab"]),
    ({"allOf": [{"minLength": 2}, {"maxLength": 3}]}, ["ab", "abc"], ["a", "abcd"]),
    ({"$ref": "#/$defs/K", "maxLength": 2}, ["ab"], ["abc", "A"]),
]


@pytest.mark.parametrize(("names", "allowed", "forbidden"), NAME_SCHEMAS)
def test_a_schema_of_names_is_enforced(names: Any, allowed: list[str], forbidden: list[str]) -> None:
    definitions = {"$defs": {"K": {"type": "string", "pattern": "^[a-z]+$"}}}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": NUMBER, **definitions}
    grammar = build_json_schema_grammar(schema)
    assert accepts(grammar, "{}")
    for name in allowed:
        assert is_valid({name: 1}, schema)
        assert accepts(grammar, json.dumps({name: 1}, ensure_ascii=False))
    for name in forbidden:
        assert not is_valid({name: 1}, schema)
        assert not accepts(grammar, json.dumps({name: 1}))
    assert not accepts(grammar, json.dumps({name: "x" for name in allowed or ["a"]}))


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (
            TypeAdapter(dict[Annotated[str, Field(pattern="^[a-z]+$", min_length=2, max_length=3)], int]).json_schema(),
            [{"ab": 1, "abc": 2}, {"A1": "x"}],
            [{"ab": "x"}, {"a": 1}, {"abcd": 1}, {"A123": 1}],
        ),
        (
            {"type": "object", "properties": {"a": NUMBER, "abc": NUMBER}, "propertyNames": {"maxLength": 2}},
            [{"a": 1, "bc": "x"}],
            [{"abc": 1}, {"a": "x"}],
        ),
        (
            {"type": "object", "patternProperties": {}, "propertyNames": {"pattern": "^a"}},
            [{"a": 1}],
            [{"b": 1}],
        ),
    ],
)
def test_names_are_enforced_beside_other_properties(schema: Any, allowed: list[Any], forbidden: list[Any]) -> None:
    grammar = build_json_schema_grammar(schema)
    for value, expected in ((allowed, True), (forbidden, False)):
        for instance in value:
            assert is_valid(instance, schema) is expected
            assert accepts(grammar, json.dumps(instance)) is expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 2.5},
        {"type": "string", "minLength": -1},
        {"type": "string", "nullable": "yes"},
        {"type": "number", "minimum": "0"},
        {"type": "integer", "format": "int32", "minimum": None},
        {"type": "integer", "format": "int32", "maximum": "0"},
        {"type": "integer", "format": "uint64", "minimum": []},
        {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "minItems": 2},
        {"type": "array", "uniqueItems": "yes"},
        {"propertyNames": {"pattern": None}},
        {"propertyNames": {"maxLength": -1}},
        {"type": 5},
        {"type": ["string", 5]},
        {"required": True},
        {"required": ["a", 5]},
        {"properties": []},
        {"oneOf": {}},
        {"enum": "a"},
    ],
)
def test_an_invalid_value_of_a_keyword_is_rejected(schema: Any) -> None:
    with pytest.raises(InvalidArgument):
        build_json_schema_grammar(schema)


def test_a_reference_beside_an_id_is_resolved_as_its_draft_says() -> None:
    base = "https://example.org/base/"
    schema = {
        "$id": base,
        "definitions": {
            "text": {"$id": "https://example.org/value.json", "type": "string"},
            "number": {"$id": "value.json", "type": "number"},
        },
        "allOf": [{"$id": "https://example.org/", "$ref": "value.json"}],
    }
    for draft, right, wrong in ((DRAFT_7, 1, "a"), ({}, "a", 1)):
        document = {**schema, **draft}
        grammar = build_json_schema_grammar(document)
        assert accepts(grammar, json.dumps(right))
        assert is_valid(right, document)
        assert not accepts(grammar, json.dumps(wrong))
        assert not is_valid(wrong, document)


def test_a_schema_below_an_unknown_keyword_is_checked_if_it_is_referred_to() -> None:
    components = {"A": {"type": "string", "maxLenght": 2}, "B": {"type": "string"}}
    assert accepts(build_json_schema_grammar({"$ref": "#/components/B", "components": components}), '"abc"')
    with pytest.raises(UnsupportedOption, match="did you mean `maxLength`") as caught:
        build_json_schema_grammar({"$ref": "#/components/A", "components": components})
    assert caught.value.name == "json_schema.components.A.maxLenght"


def test_a_count_of_too_many_digits_in_a_pattern_of_names_is_an_error() -> None:
    names = {"pattern": f"^[a]{{{'9' * 5000}}}$", "maxLength": 3}
    with pytest.raises(UnsupportedOption, match="the length of names"):
        build_json_schema_grammar({"type": "object", "propertyNames": names})


def test_an_unknown_anchor_is_an_error() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#nothing"}}}
    with pytest.raises(UnsupportedOption, match="#nothing does not refer to a schema of this document") as caught:
        build_json_schema_grammar(schema)
    assert caught.value.name == "json_schema.properties.a.$ref"


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"$ref": "//[#x"}, "json_schema.$ref"),
        ({"$id": "http://[x#"}, "json_schema.$id"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://[x#"}, "json_schema.id"),
        ({"$id": "https://example.org/", "items": {"$ref": "http://[x"}}, "json_schema.items.$ref"),
    ],
)
def test_an_invalid_uri_is_an_error_that_names_its_keyword(schema: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a URI: Invalid IPv6 URL") as caught:
        to_enforceable_schema(schema)
    assert caught.value.name == name


def test_a_reference_to_a_position_after_the_end_of_a_list_is_an_error() -> None:
    for position in ("1", "9" * 5_000):
        with pytest.raises(UnsupportedOption, match="does not refer to a schema of this document"):
            to_enforceable_schema({"allOf": [True], "items": {"$ref": f"#/allOf/{position}"}})


# --- one path: response formats, tools and strict tools

PATHS_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path"},
        "limit": {"type": "integer", "format": "int32", "nullable": True},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "rates": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    },
    "required": ["path", "limit", "tags", "rates"],
    "additionalProperties": False,
}
RIGHT = '{"path": "x", "limit": null, "tags": ["a", "b"], "rates": {"a": 1}}'
WRONG = [
    RIGHT.replace('"b"', '"a"'),
    RIGHT.replace("null", "3000000000"),
    RIGHT.replace('{"a": 1}', '{"a": "1"}'),
    RIGHT.replace('"x"', "1"),
]


def list_formats(schema: Any) -> list[Any]:
    """Return the format of chat completions, and what `text.format` of the Responses API becomes."""
    fields = {"name": "x", "strict": True, "schema": schema}
    text = {"format": {"type": "json_schema", **fields}}
    body = ResponseRequest.model_validate({"model": "m", "input": "x", "text": text})
    return [{"type": "json_schema", "json_schema": fields}, build_response_format(body)]


@pytest.mark.parametrize("text", [RIGHT, *WRONG])
def test_a_response_format_and_a_tool_allow_the_same_arguments(text: str) -> None:
    for format in list_formats(PATHS_SCHEMA):
        spec = parse_response_format(format).spec
        assert spec is not None
        assert accepts(build_grammar(spec), text) is (text == RIGHT)
    definition = {"type": "function", "function": {"name": "f", "strict": True, "parameters": PATHS_SCHEMA}}
    (tool,) = parse_tool_choice("required", parse_tools([definition])).tools
    grammar = TOOL_FAMILIES["hermes"].build_calls_grammar([tool], False, json.dumps)
    call = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'
    assert accepts(grammar, call) is (text == RIGHT)


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_every_tool_family_knows_annotations(family: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "format": "path", "example": "x", "x-order": 1},
            "count": {"type": "integer", "format": "int32", "deprecated": True},
            "note": {"type": "string", "nullable": True, "contentMediaType": "text/plain", "maxLength": 5.0},
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    try:
        grammar = TOOL_FAMILIES[family].build_calls_grammar(tools, False, json.dumps)
    except RequestError as error:
        pytest.fail(f"{family}: {error}")
    assert grammar
