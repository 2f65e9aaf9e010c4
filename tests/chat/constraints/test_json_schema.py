"""JSON schemas are enforced or rejected: the grammar accepts no invalid text, and no keyword is ignored.

Checked with JSON-Schema-Test-Suite. Instances are tried in many spellings: property orders, spaces, escapes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from afterglow.chat.constraints.grammar import build_json_schema_grammar
from afterglow.chat.constraints.json_schema import STRING_FORMATS
from afterglow.errors import InvalidArgument, RequestError, UnsupportedOption
from support import fetched
from support.grammar_text import accepts

SPELLINGS = [(ascii, separators) for ascii in (False, True) for separators in ((", ", ": "), (",", ":"))]
SUITE_FILES = (
    *("additionalProperties", "allOf", "anchor", "anyOf", "boolean_schema", "const", "contains", "content", "default"),
    *("defs", "dependentRequired", "dependentSchemas", "dynamicRef", "enum", "exclusiveMaximum", "exclusiveMinimum"),
    *("format", "if-then-else", "infinite-loop-detection", "items", "maxContains", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf"),
    *("not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "ref"),
    *("refRemote", "required", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "vocabulary"),
)


def iter_orders(value: Any) -> Iterator[Any]:
    """Yield the value with its properties in different orders; only some orders if there are many."""
    if isinstance(value, dict):
        for pairs in itertools.islice(itertools.permutations(value.items()), 24):
            choices = [list(itertools.islice(iter_orders(item), 6)) for _, item in pairs]
            for items in itertools.islice(itertools.product(*choices), 24):
                yield dict(zip((name for name, _ in pairs), items, strict=True))
    elif isinstance(value, list):
        choices = [list(itertools.islice(iter_orders(item), 6)) for item in value]
        yield from map(list, itertools.islice(itertools.product(*choices), 24))
    else:
        yield value


def build_spellings(value: Any) -> set[str]:
    return {
        json.dumps(order, ensure_ascii=ascii, separators=separators)
        for order in iter_orders(value)
        for ascii, separators in SPELLINGS
    }


def check_cases(cases: list[fetched.SchemaCase]) -> tuple[dict[str, int], list[str]]:
    """Count the outcomes. Return them and the invalid instances that a grammar accepts."""
    counts = {"rejected": 0, "enforced": 0, "invalid": 0, "valid": 0, "valid accepted": 0}
    wrongly_accepted = []
    for case in cases:
        try:
            grammar = build_json_schema_grammar(case.schema)
        except RequestError:
            counts["rejected"] += 1
            continue
        counts["enforced"] += 1
        for description, instance, valid in case.tests:
            accepted = any(accepts(grammar, text) for text in build_spellings(instance))
            counts["valid" if valid else "invalid"] += 1
            counts["valid accepted"] += valid and accepted
            if accepted and not valid:
                wrongly_accepted.append(f"{case.file}: {case.description}: {description}")
    return counts, wrongly_accepted


@pytest.fixture(scope="module")
def suite() -> list[fetched.SchemaCase]:
    return fetched.fetch_schema_suite()


@pytest.mark.native
def test_every_file_of_the_suite_is_listed(suite):
    assert {case.file for case in suite} == {f"{name}.json" for name in SUITE_FILES}


@pytest.mark.native
@pytest.mark.parametrize("name", SUITE_FILES)
def test_no_invalid_instance_of_the_suite_is_accepted(suite, name):
    _, wrongly_accepted = check_cases([case for case in suite if case.file == f"{name}.json"])
    assert wrongly_accepted == []


@pytest.mark.native
def test_most_valid_instances_of_the_suite_are_accepted(suite):
    counts, _ = check_cases(suite)
    assert counts["enforced"] >= 155
    assert counts["invalid"] >= 230
    assert counts["valid accepted"] / counts["valid"] > 0.93


@pytest.mark.native
@pytest.mark.parametrize("draft", [4, 6, 7])
def test_no_invalid_instance_of_an_older_draft_is_accepted(draft):
    older = {"$schema": f"http://json-schema.org/draft-0{draft}/schema#"}
    cases = [
        replace(case, schema={**older, **case.schema})
        for case in fetched.fetch_schema_suite(f"draft{draft}")
        if isinstance(case.schema, dict)
    ]
    counts, wrongly_accepted = check_cases(cases)
    assert wrongly_accepted == []
    assert counts["enforced"] >= 90
    assert counts["valid accepted"] / counts["valid"] > 0.9


@pytest.mark.native
def test_no_invalid_instance_of_the_formats_is_accepted():
    suite = fetched.fetch_schema_suite("draft2020-12/optional/format")
    enforced = [case for case in suite if case.file.removesuffix(".json") in STRING_FORMATS]  # others are annotations
    counts, wrongly_accepted = check_cases(enforced)
    assert wrongly_accepted == []
    assert counts["enforced"] >= 10
    assert counts["invalid"] >= 130


@pytest.mark.parametrize(
    "keywords",
    [
        {"if": {"type": "object"}, "then": {"required": ["a"]}},
        {"if": {"type": "object"}, "else": False},
        {"contains": {}},
        {"contains": {}, "minContains": 0, "maxContains": 1},
        *({name: {"a": ["b"]}} for name in ("dependentSchemas", "dependentRequired", "dependencies")),
        *({name: "#"} for name in ("$dynamicRef", "$recursiveRef")),
        *({name: 1} for name in ("x-guidance", "disallow", "divisibleBy", "extends", "formatMinimum", "bsonType")),
    ],
    ids=str,
)
@pytest.mark.parametrize("location", ["", ".properties.a", ".items", ".anyOf[1]", ".$defs.b", ".additionalProperties"])
def test_an_unsupported_keyword_is_an_error_that_names_its_location(keywords, location):
    schema: dict[str, Any] = keywords
    if location:
        key, _, rest = location[1:].partition(".")
        schema = {key: {rest: schema}} if rest else {key: schema}
        schema = {"anyOf": [{}, schema["anyOf[1]"]]} if "anyOf[1]" in schema else schema
    with pytest.raises(UnsupportedOption) as caught:
        build_json_schema_grammar(schema)
    assert caught.value.name == f"json_schema{location}.{next(iter(keywords))}"


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        *(("maxlength", "maxLength"), ("min_length", "minLength"), ("Enum", "enum"), ("minimun", "minimum")),
        *(("requried", "required"), ("any_of", "anyOf"), ("aditionalProperties", "additionalProperties")),
        *(("ref", "$ref"), ("Contains", "contains"), ("uniqueItem", "uniqueItems")),
    ],
)
def test_a_misspelled_keyword_is_an_error_with_the_right_name(name, keyword):
    with pytest.raises(UnsupportedOption, match=re.escape(f"did you mean `{keyword}`?")) as caught:
        build_json_schema_grammar({"type": "object", "properties": {"a": {"type": "string", name: 1}}})
    assert caught.value.name == f"json_schema.properties.a.{name}"


@pytest.mark.parametrize(
    "name",
    [
        *("id", "unit", "units", "order", "placeholder", "markdownEnumDescriptions", "ui:widget", "ui:items", "tsType"),
        *("components", "note", "notes", "cost", "multiple", "label", "x-items", "_meta", "anything", "Größe"),
    ],
)
def test_an_unknown_name_is_an_annotation(name):
    value = {"type": "integer", "maximun": 1, "$id": "x", "required": ["a"]}  # means nothing in an annotation
    schema = {"type": "object", "properties": {"a": {"type": "string", name: value}}, "required": ["a"], name: value}
    grammar = build_json_schema_grammar(schema)
    assert accepts(grammar, '{"a": "x"}')
    assert not accepts(grammar, '{"a": 1}')


def test_annotations_do_not_change_not_and_names():
    schema = {"not": {"type": "null", "unit": "kg"}, "type": ["object", "null"]}
    names = {"propertyNames": {"enum": ["a"], "unit": "kg"}}
    grammar = build_json_schema_grammar({**schema, **names})
    assert accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, '{"b": 1}')
    assert not accepts(grammar, "null")


@pytest.mark.parametrize(
    "keywords",
    [
        {"if": {"required": ["a"]}},
        {"then": False, "else": False},
        {"if": {"required": ["a"]}, "then": {}, "else": True},
        {"contains": {"type": "string"}, "minContains": 0},
        {"minContains": 2, "maxContains": 0},
        *({name: {}} for name in ("dependentSchemas", "dependentRequired", "dependencies")),
        {"dependentSchemas": {"a": True}, "dependentRequired": {"a": []}},
    ],
    ids=str,
)
def test_a_keyword_without_effect_is_accepted(keywords):
    grammar = build_json_schema_grammar({"type": ["object", "array"], **keywords})
    validator = jsonschema.Draft202012Validator(keywords)
    for instance in ({"a": 1}, {}, [1], ["a", "b"]):
        assert validator.is_valid(instance)
        assert accepts(grammar, json.dumps(instance))


@pytest.mark.parametrize(
    "schema",
    [
        {"contains": {"const": 1}, "minContains": 0, "unevaluatedItems": False},
        {"if": {"properties": {"a": {}}}, "unevaluatedProperties": False},
        {"contains": {"const": 1}, "minContains": 0, "$schema": "http://json-schema.org/draft-07/schema#"},
    ],
)
def test_a_keyword_whose_effect_depends_on_others_is_rejected(schema):
    with pytest.raises(UnsupportedOption):
        build_json_schema_grammar(schema)


def test_property_names_and_values_are_not_keywords():
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"if": 1}}, "id": {"enum": [{"contains": 2}], "default": {"not": 1}}},
        "required": ["not", "id"],
        "x-order": 3,
        "title": "anything",
    }
    assert accepts(build_json_schema_grammar(schema), '{"not": {"if": 1}, "id": {"contains": 2}}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "\\u0061": "x"}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "a": "x"}'),
        ({"patternProperties": {"^a$": {"type": "integer"}}}, '{"\\u0061": "x"}'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"1900-02-29"'),
        ({"type": "string", "format": "time"}, '"12:30:60Z"'),
        ({"type": "string", "format": "date-time"}, '"2023-02-29T12:00:00Z"'),
        ({"type": "string", "maxLength": 1}, '"\\ud83d\\ude00\\ud83d\\ude00"'),
        ({"type": "integer"}, "5 and more"),
        ({"type": "integer", "maximum": 10}, "1e5"),
        ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "maxLength": 2}, '"abc"'),
    ],
)
def test_no_spelling_bypasses_a_schema(schema, text):
    assert not accepts(build_json_schema_grammar(schema), text)


@pytest.mark.parametrize(
    ("format", "text"),
    [("date", "2024-02-29"), ("date", "2000-02-29"), ("date", "2023-12-31"), ("time", "23:59:59Z"),
     ("date-time", "2024-02-29T23:59:59.5+01:00")],
)  # fmt: skip
def test_valid_dates_and_times_are_accepted(format, text):
    assert accepts(build_json_schema_grammar({"type": "string", "format": format}), f'"{text}"')


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "object", "minProperties": 2}, "json_schema.minProperties"),
        ({"const": "a\x00b"}, "json_schema.const"),
        ({"enum": [["a\x7f"]]}, "json_schema.enum"),
        ({"pattern": "a\\x7fb"}, "json_schema.pattern"),
        ({"patternProperties": {"\\x01": {}}}, "json_schema.patternProperties"),
        ({"default": {"disallow": 1}, "$ref": "#/default"}, "json_schema.$ref"),
    ],
)
def test_partially_enforceable_keywords_are_rejected(schema, name):
    with pytest.raises(UnsupportedOption) as caught:
        build_json_schema_grammar(schema)
    assert caught.value.name == name


def test_a_schema_that_is_invalid_or_nested_too_deep_is_rejected():
    deep: Any = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="deeper"):
        build_json_schema_grammar(deep)
    with pytest.raises(InvalidArgument, match="must be a schema"):
        build_json_schema_grammar({"properties": {"a": 5}})
