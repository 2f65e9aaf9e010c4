"""Limits of JSON text hold for every vocabulary: items are unique, and numbers end."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Literal

import jsonschema
import pytest

from afterglow.chat.constraints.grammar import build_json_schema_grammar
from afterglow.engine.sampling import json_text
from afterglow.engine.sampling.json_text import (
    MAX_EXPONENT_DIGITS,
    MAX_FRACTION_DIGITS,
    MAX_INTEGER_DIGITS,
    build_probe_grammar,
    get_allowed_tokens,
    parse_value,
)
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.testing import models
from support.grammar_text import BYTES, MERGED, MERGED_VOCABULARY, accepts, generate
from support.greedy import load_greedy

pytestmark = pytest.mark.slow


def unique(items: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **keywords}


FINITE = [
    unique({"enum": ["a", "aa", "ab", "b"]}, minItems=4),
    unique({"type": ["boolean", "null"]}, minItems=3),
    unique({"type": "string", "pattern": "^[ab]{2}$"}, minItems=4),
    unique({"type": "integer", "minimum": 1, "maximum": 12}, minItems=12),
    unique({"type": "number", "minimum": 1, "maximum": 2, "multipleOf": 0.5}, minItems=3),
    unique({"type": "string", "maxLength": 1, "pattern": "^[a-c]*$"}, minItems=4),
    unique({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}, minItems=4),
    unique(
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
        minItems=2,
    ),
]
OPEN = [
    unique({"type": "string"}),
    unique({"type": "string", "maxLength": 2}, minItems=3),
    unique({"type": "number"}),
    unique({"anyOf": [{"const": "a"}, {"type": "integer"}, {"type": "boolean"}]}, maxItems=6),
    {"type": "object", "properties": {"a": unique({"type": "string"}), "b": {"type": "array"}}, "required": ["a", "b"]},
    {"type": "array", "items": unique({"type": "integer"}), "minItems": 3},
    {"anyOf": [unique({"type": "integer"}), {"type": "array", "items": {"type": "string"}}]},
]


def find_duplicates(schema: Any, value: Any) -> bool:
    """Return whether an array of unique items has equal ones; follows the schemas above."""
    if schema.get("uniqueItems"):
        values = [parse_value(json.dumps(item).encode()) for item in value]
        return len(set(values)) < len(values)
    if schema.get("type") == "object":
        return any(find_duplicates(schema["properties"][name], item) for name, item in value.items() if name == "a")
    return schema.get("type") == "array" and any(find_duplicates(schema.get("items", {}), item) for item in value)


@pytest.mark.parametrize("compiler", [BYTES, MERGED], ids=["bytes", "merged"])
@pytest.mark.parametrize("schema", [*FINITE, *OPEN], ids=json.dumps)
def test_random_texts_have_unique_items_and_no_dead_end(schema: Any, compiler: Any) -> None:
    grammar = build_json_schema_grammar(schema)
    lengths = []
    for seed in range(6):
        text = generate(grammar, Random(seed), compiler)
        if text is not None:
            assert not find_duplicates(schema, json.loads(text)), text
            lengths.append(len(text))
    assert lengths


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (unique({"type": "string"}), '["a", "ab", "a b", "A"]', '["a", "ab", "a"]'),
        (unique({"type": "string"}), '["a,\\"a\\"", "a"]', '["a\\"", "a\\""]'),
        (unique({"type": "string"}), '["ü", "u"]', '["ü", "ü"]'),
        (unique({"type": "number"}), "[1, 10, 1.5, -1]", "[1.0, 1]"),
        (unique({"type": "number"}), "[1, 12]", "[1, 2, 1.00]"),
        (unique({"type": "number"}), "[0.5, 0.50000000000000011]", "[0.5, 0.50000000000000001]"),
        (unique({"type": ["integer", "boolean"]}), "[1, true, 0, false]", "[true, 1, true]"),
        (unique({"type": "object"}), '[{"a": 1}, {"a": 2}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]'),
        ({"type": "array", "items": {"type": "string"}}, '["a", "a"]', '["a", 1]'),
        (
            {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "uniqueItems": True},
            '["a", 1, 2]',
            '["a", 1, 1]',
        ),
    ],
)
def test_equal_items_are_forbidden(schema: Any, allowed: str, forbidden: str) -> None:
    grammar = build_json_schema_grammar(schema)
    assert accepts(grammar, allowed)
    assert not accepts(grammar, forbidden)


def test_a_comma_is_forbidden_when_no_other_item_is_left() -> None:
    grammar = build_json_schema_grammar({**unique({"type": "string", "pattern": "^(a|b)$"}), "maxItems": 9})
    assert accepts(grammar, '["a", "b"]')
    matcher = BYTES.compile(GrammarConstraint(grammar=grammar))
    for byte in b'["a", "b"':
        matcher.accept(byte)
    allowed = bytes(token for token in matcher.get_allowed_tokens() if token < 256)
    assert b"]" in allowed
    assert b"," not in allowed


FRACTION = {"type": "number", "minimum": 0, "maximum": 1}
RECORD = {"type": "object", "properties": {"a": FRACTION}, "required": ["a"], "additionalProperties": False}


PAIR = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"],
        "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("items", "start"),
    [
        (FRACTION, "[1,"),
        (FRACTION, "[1,0,"),
        ({"type": "number"}, "[0,"),
        ({"type": "number"}, "[0, -0.5, 1,"),
        (RECORD, '[{"a":1},'),
        (RECORD, '[{"a": 1.00},'),
        (RECORD, '[{"a":0},{"a":1},'),
        (PAIR, '[{"a":0,"b":0},'),
        ({"type": "array", "items": FRACTION, "minItems": 2, "maxItems": 2}, "[[1,0],"),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiler", [BYTES, MERGED], ids=["bytes", "merged"])
@pytest.mark.parametrize("preferred", ["1.0e", "01.e", "0.e-", "e-0.1", "-0.e"])
def test_a_model_that_prefers_equal_numbers_completes_other_items(
    items: Any, start: str, compiler: Any, preferred: str
) -> None:
    matcher = compiler.compile(GrammarConstraint(grammar=build_json_schema_grammar(unique(items, minItems=4))))
    text = start.encode()
    for byte in text:
        matcher.accept(byte)
    while not matcher.is_finished and len(text) < 400:
        allowed = matcher.get_allowed_tokens()
        token = next((byte for byte in b"]" + preferred.encode() if byte in allowed), int(allowed[0]))
        matcher.accept(token)
        text += MERGED_VOCABULARY.pieces[token]
    values = json.loads(text)
    assert len(values) >= 4
    assert not find_duplicates(unique(items), values)


@pytest.mark.parametrize("zero", ["0", "-0", "0.0", "0e45", "0E-12", "0.00e+7"])
@pytest.mark.parametrize("other", ["0", "-0.000", "0e1", "-0.0e99"])
def test_zeros_are_equal_in_every_spelling(zero: str, other: str) -> None:
    grammar = build_json_schema_grammar(unique({"type": "number"}))
    assert accepts(grammar, f"[{zero}, 1]")
    assert not accepts(grammar, f"[{zero}, {other}]")
    assert not accepts(grammar, f"[{zero}, 1, {other}]")


def test_exponents_of_zero_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = BYTES.compile(GrammarConstraint(grammar=build_json_schema_grammar(unique({"type": "number"}))))
    for byte in b"[0, 0":
        matcher.accept(byte)
    calls = []
    monkeypatch.setattr(json_text, "get_allowed_tokens", lambda *args: calls.append(1) or get_allowed_tokens(*args))
    allowed = bytes(token for token in matcher.get_allowed_tokens() if token < 256)
    assert b"." in allowed
    assert b"e" not in allowed
    assert len(calls) < 20


def test_an_exponent_has_few_digits_in_an_array_of_unique_numbers() -> None:
    grammar = build_json_schema_grammar(unique({"type": "number"}))
    assert accepts(grammar, "[1, 1e23]")
    assert not accepts(grammar, "[1, 1e234]")
    assert not accepts(grammar, "[0, 0e-6043537625700941019]")


def test_long_items_are_compared_completely() -> None:
    values = ["x" * 3000 + ending for ending in "ab"]
    grammar = build_json_schema_grammar(unique({"enum": values}))
    matcher = BYTES.compile(GrammarConstraint(grammar=grammar))
    for byte in f'["{values[0]}", "{values[1][:-1]}'.encode():
        matcher.accept(byte)
    assert list(matcher.get_allowed_tokens()) == [ord("b")]


def test_the_search_for_another_item_is_bounded_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{number:03}" + "x" * 40 for number in range(200)]
    grammar = build_json_schema_grammar(unique({"enum": words}, minItems=200))
    matcher = BYTES.compile(GrammarConstraint(grammar=grammar))
    for byte in json.dumps(words[:-1], separators=(",", ":"))[:-1].encode() + b',"':
        matcher.accept(byte)
    calls = 0

    def count_calls(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return get_allowed_tokens(*arguments)

    monkeypatch.setattr(json_text, "get_allowed_tokens", count_calls)
    assert ord("1") in matcher.get_allowed_tokens()
    assert 0 < calls <= json_text.MAX_SEARCH_NODES


def test_a_token_that_certainly_leaves_another_item_goes_before_unknown_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = build_json_schema_grammar(unique({"enum": ["aaa", "aab", "b"]}, minItems=2))
    for nodes, expected in ((400, {"a", "b"}), (0, {"b"})):
        monkeypatch.setattr(json_text, "MAX_SEARCH_NODES", nodes)
        matcher = BYTES.compile(GrammarConstraint(grammar=grammar))
        for byte in b'["aaa","':
            matcher.accept(byte)
        assert {chr(token) for token in matcher.get_allowed_tokens()} == expected


def test_only_grammars_with_unique_items_have_a_probe() -> None:
    assert build_probe_grammar(build_json_schema_grammar({"type": "array"})) is None
    assert build_probe_grammar(build_json_schema_grammar(unique({"type": "string"}))) is not None


@pytest.mark.native
def test_a_model_generates_unique_items_and_short_numbers():
    """On random weights, which would generate anything; in JSON and in tool calls."""
    schema = {
        "type": "object",
        "properties": {"letters": unique({"enum": ["a", "b", "c"]}, minItems=3), "size": {"type": "number"}},
        "required": ["letters", "size"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options = {"temperature": 1.0, "max_tokens": 400}
    with load_greedy(models.get_path("attention"), context=2048) as model:
        for seed in range(3):
            answers = [
                model.chat("Hello", response_format=format, seed=seed, **options).text,
                model.chat("Hello", tools=tools, tool_choice="required", seed=seed, **options).tool_calls[0].arguments,
            ]
            for value in map(json.loads, answers):
                assert sorted(value["letters"]) == ["a", "b", "c"]
        assert model.chat("Hello", response_format=set[Literal["x", "y"]], seed=1, **options).parsed <= {"x", "y"}


LONG = "1234567890" * 4


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({"type": "integer"}, str(2**63 - 1), True),
        ({"type": "integer"}, str(2**63), False),
        ({"type": "integer"}, str(1 - 2**63), True),
        ({"type": "integer"}, str(-(2**64)), False),
        ({"type": "integer"}, LONG[: MAX_INTEGER_DIGITS + 1], False),
        ({"type": "integer", "minimum": 10**18, "maximum": 2**62}, str(2**60), True),
        ({"type": "object"}, f'{{"a": {2**63}}}', False),
        ({"type": "number"}, f"-0.{LONG[:MAX_FRACTION_DIGITS]}", True),
        ({"type": "number"}, f"0.{LONG[: MAX_FRACTION_DIGITS + 1]}", False),
        ({"type": "number"}, f"{LONG[:MAX_INTEGER_DIGITS]}.{LONG[:MAX_FRACTION_DIGITS]}", True),
        ({"type": "number"}, f"{LONG}.5", False),
        ({"type": "number"}, "1.5e-" + LONG[:MAX_EXPONENT_DIGITS], True),
        ({"type": "number"}, "1e" + LONG[: MAX_EXPONENT_DIGITS + 1], False),
        ({"type": "number", "minimum": 0, "maximum": 1}, f"0.{LONG}", False),
        ({}, f'{{"a": [{LONG}]}}', False),
        ({"type": "object"}, f'{{"a": 0.{LONG}}}', False),
        ({"allOf": [{"type": "object"}, {"properties": {"a": {}}}]}, f'{{"a": {LONG}}}', False),
        # not numbers
        ({"type": "string"}, f'"{LONG}"', True),
        ({"type": "string", "pattern": "^[0-9]+$"}, f'"{LONG}"', True),
        ({"type": "string", "pattern": "^[0-9]{40}$"}, f'"{LONG}"', True),
        ({"type": "object"}, f'{{"{LONG}": "{LONG}"}}', True),
    ],
)
def test_numbers_have_a_bounded_length(schema: Any, text: str, allowed: bool) -> None:
    assert accepts(build_json_schema_grammar(schema), text) is allowed


def test_digits_of_other_grammars_are_not_limited() -> None:
    assert accepts("start: /[0-9]+/", LONG)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "pattern": "^[0-9]+-[0-9]+$"}, f"{LONG}-{LONG}"),
        ({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}, f"{LONG}.{LONG}"),
        ({"type": "string", "pattern": "^[0-9]+, [0-9]+$"}, f"{LONG}, {LONG}"),
        ({"type": "string", "pattern": "^0x[0-9A-F]{40}$"}, f"0x{LONG}"),
        ({"type": "string", "pattern": "^[0-9]{10,40}/[0-9]{4}$"}, f"{LONG}/2024"),
        ({"type": "string", "pattern": '^"[0-9]+,[0-9]+$'}, f'"{LONG},1'),
        ({"type": "string", "format": "date-time"}, f"2024-02-29T10:00:00.{LONG}Z"),
        ({"enum": [f"{LONG}-a", f"{LONG[:MAX_INTEGER_DIGITS]}-b"]}, f"{LONG}-a"),
        (unique({"type": "string", "pattern": "^[0-9]+,$"}), [f"{LONG},", f"{LONG}1,"]),
        (
            {
                "type": "object",
                "properties": {LONG: {"type": "null"}, f"{LONG[:MAX_INTEGER_DIGITS]}:": {"type": "integer"}},
                "additionalProperties": False,
            },
            {LONG: None, f"{LONG[:MAX_INTEGER_DIGITS]}:": 1},
        ),
    ],
)
def test_digits_in_strings_are_not_limited(schema: Any, value: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)
    assert accepts(build_json_schema_grammar(schema), json.dumps(value, separators=(",", ":")))


def test_digits_in_unquoted_texts_are_not_limited() -> None:
    number = {"json_schema": {"type": "integer"}}
    call = {"lark_grammar": 'start: "<a>" PHONE "</a><b>" @number "</b>"\nPHONE: /[0-9]+-[0-9]+/'}
    grammar = json.dumps({"grammars": [call, {"name": "number", **number}]})
    assert accepts(grammar, f"<a>{LONG}-1</a><b>12</b>")
    assert not accepts(grammar, f"<a>{LONG}-1</a><b>{LONG}</b>")


@pytest.mark.parametrize("prose", ['5" pipe', '"a', 'ends with "', '"""'])
def test_quotes_in_prose_do_not_lift_the_limit_of_numbers(prose: str) -> None:
    rules = {"lark_grammar": 'start: prose @answer\nprose[suffix="</a>"]: /(.|\n)*/'}
    grammar = json.dumps({"grammars": [rules, {"name": "answer", "json_schema": {"type": "object"}}]})
    assert accepts(grammar, prose + '</a>{"a":1}')
    assert not accepts(grammar, f'{prose}</a>{{"a":{LONG}}}')
    assert not accepts(grammar, f'{prose}</a>{{"a":"\\"","b":{LONG}}}')


def test_a_trigger_may_end_inside_a_string() -> None:
    arguments = {"type": "object", "properties": {"n": {}, "s": {"pattern": "^[0-9]+-$"}}}
    others = [{"name": "arguments", "json_schema": arguments}]
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "f\\", " @arguments "}"'}, *others]})
    constraint = GrammarConstraint(triggers=((b'{"name": "', grammar),))
    start = b'{"name": "f", '
    for text, is_allowed in (
        (b'{"n":' + LONG.encode(), False),
        (b'{"s":"' + LONG.encode(), True),
        (b'{"n":"","s":"' + LONG.encode(), True),
    ):
        matcher = BYTES.compile(constraint)
        for byte in start + text[:-1]:
            allowed = matcher.get_allowed_tokens()
            if allowed is not None and byte not in allowed:
                break
            matcher.accept(byte)
        else:
            allowed = matcher.get_allowed_tokens()
        assert (allowed is not None and text[-1] in allowed) is is_allowed


@pytest.mark.parametrize("compiler", [BYTES, MERGED], ids=["bytes", "merged"])
def test_a_model_that_prefers_digits_ends_its_numbers(compiler: Any) -> None:
    matcher = compiler.compile(GrammarConstraint(grammar=build_json_schema_grammar({"type": "object"})))
    for byte in b'{"a":0.':
        matcher.accept(byte)
    pieces = MERGED_VOCABULARY.pieces
    number = b""
    while digits := [token for token in matcher.get_allowed_tokens() if pieces[token].isdigit()]:
        matcher.accept(int(digits[-1]))
        number += pieces[digits[-1]]
    assert len(number) == MAX_FRACTION_DIGITS


def test_brackets_in_prose_do_not_limit_the_text() -> None:
    schema = json.loads(build_json_schema_grammar(unique({"type": "integer"})))["grammars"][0]["json_schema"]
    prose = {"lark_grammar": 'start: prose @values\nprose[suffix="ANSWER:"]: /(.|\\n)*/'}
    grammar = json.dumps({"grammars": [prose, {"name": "values", "json_schema": schema}]})
    assert accepts(grammar, "in [1, 1] and [a, b) ANSWER:[1,2]")
    assert not accepts(grammar, "in [1, 1] and [a, b) ANSWER:[1,1]")


def test_deeply_nested_items_do_not_fail_the_engine() -> None:
    text = b"[" * 5000 + b"]" * 5000
    assert parse_value(text) == parse_value(text)
