"""A schema is enforced or refused: no text that violates it can be written, and no keyword is passed over.

The judge is JSON-Schema-Test-Suite. Instances are tried in many spellings: orders of names, spaces, escapes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest

from afterglow.chat.constraints.grammar import build_json_schema_grammar
from afterglow.errors import InvalidArgument, RequestError, UnsupportedOption
from support import fetched

SPELLINGS = [(ascii, separators) for ascii in (False, True) for separators in ((", ", ": "), (",", ":"))]
SUITE = fetched.schema_suite()
FILES = sorted({case.file for case in SUITE})


class Bytes:
    """A vocabulary in which every byte is a token."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([value]) for value in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode("utf-8", "surrogatepass"))) and matcher.is_accepting())


def orders(value: Any) -> Iterator[Any]:
    """The same value with the names of its objects in other orders; some of them, where there are many."""
    if isinstance(value, dict):
        for pairs in itertools.islice(itertools.permutations(value.items()), 24):
            choices = [list(itertools.islice(orders(item), 6)) for _, item in pairs]
            for items in itertools.islice(itertools.product(*choices), 24):
                yield dict(zip((name for name, _ in pairs), items, strict=True))
    elif isinstance(value, list):
        choices = [list(itertools.islice(orders(item), 6)) for item in value]
        yield from map(list, itertools.islice(itertools.product(*choices), 24))
    else:
        yield value


def texts(value: Any) -> set[str]:
    return {
        json.dumps(order, ensure_ascii=ascii, separators=separators)
        for order in orders(value)
        for ascii, separators in SPELLINGS
    }


def judged(cases: list[fetched.SchemaCase]) -> tuple[dict[str, int], list[str]]:
    """How often what happened, and the invalid instances that were let through."""
    counts = {"refused": 0, "enforced": 0, "invalid": 0, "valid": 0, "valid accepted": 0}
    wrong = []
    for case in cases:
        try:
            grammar = build_json_schema_grammar(case.schema)
        except RequestError:
            counts["refused"] += 1
            continue
        counts["enforced"] += 1
        for description, instance, valid in case.tests:
            accepted = any(accepts(grammar, text) for text in texts(instance))
            counts["valid" if valid else "invalid"] += 1
            counts["valid accepted"] += valid and accepted
            if accepted and not valid:
                wrong.append(f"{case.file}: {case.description}: {description}")
    return counts, wrong


@pytest.mark.parametrize("file", FILES)
def test_no_invalid_instance_of_the_suite_can_be_written(file):
    _, wrong = judged([case for case in SUITE if case.file == file])
    assert wrong == []


def test_most_valid_instances_of_the_suite_can_be_written_and_much_of_it_is_enforced():
    counts, _ = judged(SUITE)
    assert counts["enforced"] >= 155
    assert counts["invalid"] >= 230
    assert counts["valid accepted"] / counts["valid"] > 0.93


def test_no_invalid_instance_of_the_formats_can_be_written():
    counts, wrong = judged(fetched.schema_suite("draft2020-12/optional/format"))
    assert wrong == []
    assert counts["enforced"] >= 11
    assert counts["invalid"] >= 130


@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "id"),
        *("contentEncoding", "contentMediaType", "contentSchema", "nullable", "x-guidance"),
        *("disallow", "divisibleBy", "extends", "minimun", "anything"),
    ],
)
@pytest.mark.parametrize("place", ["", ".properties.a", ".items", ".anyOf[1]", ".$defs.b", ".additionalProperties"])
def test_a_keyword_that_cannot_be_enforced_is_refused_by_its_place(keyword, place):
    schema: dict[str, Any] = {keyword: {}}
    if place:
        key, _, rest = place[1:].partition(".")
        schema = {key: {rest: schema}} if rest else {key: schema}
        schema = {"anyOf": [{}, schema["anyOf[1]"]]} if "anyOf[1]" in schema else schema
    with pytest.raises(UnsupportedOption) as caught:
        build_json_schema_grammar(schema)
    assert caught.value.name == f"json_schema{place}.{keyword}"


def test_names_and_values_are_no_keywords():
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
def test_no_other_spelling_gets_round_a_schema(schema, text):
    assert not accepts(build_json_schema_grammar(schema), text)


@pytest.mark.parametrize(
    ("format", "text"),
    [("date", "2024-02-29"), ("date", "2000-02-29"), ("date", "2023-12-31"), ("time", "23:59:59Z"),
     ("date-time", "2024-02-29T23:59:59.5+01:00")],
)  # fmt: skip
def test_days_and_times_that_exist_can_be_written(format, text):
    assert accepts(build_json_schema_grammar({"type": "string", "format": format}), f'"{text}"')


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "integer", "format": "int32"}, "json_schema.format"),
        ({"type": "object", "minProperties": 2}, "json_schema.minProperties"),
        ({"const": "a\x00b"}, "json_schema.const"),
        ({"enum": [["a\x7f"]]}, "json_schema.enum"),
        ({"pattern": "a\\x7fb"}, "json_schema.pattern"),
        ({"patternProperties": {"\\x01": {}}}, "json_schema.patternProperties"),
        ({"default": {"disallow": 1}, "$ref": "#/default"}, "json_schema.$ref"),
    ],
)
def test_what_would_be_enforced_by_half_is_refused(schema, name):
    with pytest.raises(UnsupportedOption) as caught:
        build_json_schema_grammar(schema)
    assert caught.value.name == name


def test_a_schema_that_is_too_deep_or_no_schema_is_refused():
    deep: Any = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="deeper"):
        build_json_schema_grammar(deep)
    with pytest.raises(InvalidArgument, match="must be a schema"):
        build_json_schema_grammar({"properties": {"a": 5}})
