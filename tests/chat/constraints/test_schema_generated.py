"""Random schemas, and random texts of their grammars: `jsonschema` finds every text valid."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from afterglow.chat.constraints.grammar import build_json_schema_grammar
from afterglow.errors import RequestError
from support.grammar_text import BYTES, MERGED, generate

pytestmark = pytest.mark.slow

NAMES = st.sampled_from(["a", "b", "c", "a b", "$ref", "items", "ü"])
VALUES = st.sampled_from([None, True, False, 0, 1, -1, 2.5, "", "a", "ab", "1", [], [1], {}, {"a": 1}])
ANNOTATIONS = st.sampled_from(
    [{}, {}, {"title": "x"}, {"format": "path"}, {"x-order": 1}, {"default": 1}, {"contentMediaType": "text/plain"}]
)
NUMBER = {"type": "number"}
FORMATS = st.sampled_from(["date", "time", "ipv4", "uuid", "uuid4", "email", "unknown"])
PATTERNS = st.sampled_from(["^[ab]{1,3}$", "x", "^$", "^(?!\\.)[.a]{2}$"])


@st.composite
def ranges(draw: st.DrawFn, low: str, high: str, limit: int) -> dict[str, Any]:
    """Return none, one or both of two bounds, in order."""
    first, second = sorted((draw(st.integers(0, limit)), draw(st.integers(0, limit))))
    keywords = {low: first, high: float(second) if draw(st.booleans()) else second}
    return {key: value for key, value in keywords.items() if draw(st.booleans())}


@st.composite
def scalars(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["string", "pattern", "format", "integer", "number", "multiple", "simple", "values"]))
    match kind:
        case "string":
            schema = {"type": "string", **draw(ranges("minLength", "maxLength", 4))}
        case "pattern":
            schema = {"type": "string", "pattern": draw(PATTERNS)}
        case "format":
            schema = {"type": "string", "format": draw(FORMATS)}
        case "integer":
            schema = {"type": "integer", **draw(ranges("minimum", "maximum", 30))}
            schema |= draw(st.sampled_from([{}, {"format": "int32"}, {"format": "uint8"}, {"exclusiveMinimum": -5}]))
        case "number":
            schema = {
                "type": "number",
                **draw(ranges("minimum", "maximum", 3)),
                **draw(st.sampled_from([{}, {"format": "double"}])),
            }
        case "multiple":
            schema = {
                "type": draw(st.sampled_from(["integer", "number"])),
                "multipleOf": draw(st.sampled_from([3, 0.5, 2.0])),
            }
        case "simple":
            schema = {"type": draw(st.sampled_from(["null", "boolean", ["string", "null"], ["integer", "boolean"]]))}
        case _:
            schema = draw(
                st.one_of(VALUES.map(lambda v: {"const": v}), st.lists(VALUES, min_size=1).map(lambda v: {"enum": v}))
            )
    return {**schema, **{key: value for key, value in draw(ANNOTATIONS).items() if key not in schema}}


@st.composite
def compounds(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    kind = draw(
        st.sampled_from(["array", "set", "tuple", "object", "record", "names", "any", "one", "reference", "not"])
    )
    match kind:
        case "array":
            return {"type": "array", "items": draw(inner), **draw(ranges("minItems", "maxItems", 3))}
        case "set":
            return {"type": "array", "items": draw(scalars()), "uniqueItems": True, "maxItems": draw(st.integers(1, 4))}
        case "tuple":
            items = draw(st.lists(inner, min_size=1, max_size=2))
            return {"type": "array", "prefixItems": items, "items": draw(st.sampled_from([False, {"type": "null"}]))}
        case "object":
            properties = draw(st.dictionaries(NAMES, inner, max_size=3))
            required = [name for name in properties if draw(st.booleans())]
            others = draw(st.sampled_from([{}, {"additionalProperties": False}, {"unevaluatedProperties": False}]))
            return {"type": "object", "properties": properties, "required": required, **others}
        case "record":
            return {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": draw(inner)}
        case "names":
            names = draw(
                st.sampled_from(
                    [
                        *({"enum": ["a", "b"]}, {"pattern": "^k"}, {"maxLength": 2}, {"const": "x"}, {"not": NUMBER}),
                        *({"pattern": "^[ab]*$", "minLength": 1, "maxLength": 2}, {"format": "ipv4"}),
                        {"anyOf": [{"const": "a"}, {"pattern": "^[bc]+$"}, {"type": "null"}]},
                    ]
                )
            )
            return {"type": "object", "propertyNames": names, "additionalProperties": draw(inner)}
        case "any":
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3)), "description": "x"}
        case "one":
            return {
                "oneOf": [
                    {"type": "object", "properties": {"t": {"const": t}, "v": draw(inner)}, "required": ["t", "v"]}
                    for t in "ab"
                ]
            }
        case "reference":
            return {"$ref": "#/$defs/x", "description": "x"}
        case _:
            return {"not": {"type": draw(st.sampled_from(["string", ["number", "object"]]))}}


SCHEMAS = st.recursive(scalars(), compounds, max_leaves=6)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, definition=scalars(), seed=st.integers(0, 2**32))
def test_every_text_of_a_grammar_is_valid(schema: dict[str, Any], definition: dict[str, Any], seed: int) -> None:
    document = {**schema, "$defs": {"x": definition}}
    jsonschema.Draft202012Validator.check_schema(document)
    validator = jsonschema.Draft202012Validator(document, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        grammar = build_json_schema_grammar(document)
    except RequestError as error:  # no instance, or overlapping alternatives
        event(f"rejected: {error}"[:60])
        return
    for number, compiler in enumerate((BYTES, BYTES, MERGED)):
        text = generate(grammar, Random(seed + number), compiler, max_tokens=400)
        event("too long" if text is None else "checked")
        if text is not None:
            errors = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not errors, (text, errors)
