"""Response formats: each allows exactly its texts, or is rejected by name."""

from __future__ import annotations

import json

import llguidance
import pytest
from pydantic import BaseModel

from afterglow.chat.constraints import grammar
from afterglow.chat.constraints.response_format import parse_response_format
from afterglow.chat.output.reasoning import REASONING_FORMATS
from afterglow.errors import InvalidArgument, InvalidGrammar, RequestError, UnsupportedOption

THINK = next(format for format in REASONING_FORMATS if format.start_tag == "<think>")


class ByteTokenizer:
    """One token per byte, an end token and a control token."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256, 257)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>", b"\xff<mark>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = llguidance.LLTokenizer(ByteTokenizer())


def accepts(text_grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, text_grammar)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def build_format_grammar(format: object) -> str:
    spec = parse_response_format(format).spec
    assert spec is not None
    return grammar.build_grammar(spec)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("format", "allowed", "forbidden"),
    [
        ({"type": "json_object"}, ['{"a": [1, null]}', "{}"], ["[1]", "1", '{"a"}', "hello"]),
        (
            {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}},
            ['{"name": "Bob", "age": 3}', '{"name":"Zoë","age":3}'],
            ['{"name": "Bob"}', '{"name": "Bob", "age": -1}', '{"name": "Bob", "age": 3, "x": 1}', "{}", "Bob"],
        ),
        ({"type": "regex", "pattern": "[0-9]{3}-[a-z]+"}, ["123-abc"], ["123", "123-", "x123-abc", "123-abc "]),
        ({"type": "choice", "choices": ["yes", 'say "no"', "ja\nnein"]}, ["yes", 'say "no"', "ja\nnein"], ["no", ""]),
        (
            {"type": "grammar", "grammar": 'start: "a" b+\nb: /[0-9]/ ","?'},
            ["a1", "a1,2,3"],
            ["a", "b1"],
        ),
        (
            {"type": "grammar", "syntax": "gbnf", "grammar": 'root ::= "yes" | "no" ws [0-9]+\nws ::= " "*'},
            ["yes", "no 12", "no12"],
            ["no", "yes 1", ""],
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_a_format_allows_exactly_its_texts(format, allowed, forbidden):
    format_grammar = build_format_grammar(format)
    for text in allowed:
        assert accepts(format_grammar, text), text
    for text in forbidden:
        assert not accepts(format_grammar, text), text


def test_the_text_format_has_no_grammar():
    assert parse_response_format({"type": "text"}).spec is None
    assert parse_response_format(None).spec is None


class Person(BaseModel):
    name: str
    age: int


def test_a_pydantic_model_is_a_format_and_parses_the_answer():
    format = parse_response_format(Person)
    format_grammar = build_format_grammar(Person)
    assert accepts(format_grammar, '{"name": "Bob", "age": 3}')
    assert not accepts(format_grammar, '{"name": "Bob", "age": 3, "shoes": 44}')
    assert format.parse('{"name": "Bob", "age": 3}') == Person(name="Bob", age=3)


def test_any_type_with_a_schema_is_a_format():
    assert accepts(build_format_grammar(list[int]), "[1, 2]")
    assert not accepts(build_format_grammar(list[int]), '["1"]')
    assert parse_response_format(dict[str, float]).parse('{"a": 1}') == {"a": 1.0}


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}, "response_format.json_schema.extra"),
        ({"type": "json_schema", "json_schema": {"schema": 7}}, "json_schema"),
        ({"type": "regex"}, "response_format.pattern"),
        ({"type": "regex", "pattern": ""}, "response_format.pattern"),
        ({"type": "choice", "choices": []}, "response_format.choices"),
        ({"type": "choice", "choices": "yes"}, "response_format.choices"),
        ({"type": "choice", "choices": ["yes", 1]}, "response_format.choices[1]"),
        ({"type": "grammar"}, "response_format.grammar"),
        ({"type": "grammar", "grammar": "x", "syntax": "bnf"}, "syntax"),
    ],
)
def test_an_invalid_format_is_an_error_that_names_the_field(format, name):
    with pytest.raises(InvalidArgument) as caught:
        parse_response_format(format)
    assert caught.value.name == name


@pytest.mark.parametrize(
    "format",
    [
        {"type": "regex", "pattern": "("},
        {"type": "regex", "pattern": "(?=lookahead)x"},
        {"type": "grammar", "grammar": "start: missing"},
        {"type": "grammar", "syntax": "gbnf", "grammar": "root ::= ("},
    ],
)
def test_an_invalid_grammar_is_rejected(format):
    with pytest.raises(InvalidGrammar):
        parse_response_format(format)


@pytest.mark.parametrize("keyword", [{"if": {}, "then": False}, {"contains": {"type": "integer"}}])
def test_an_unsupported_keyword_is_rejected_by_name(keyword):
    with pytest.raises(UnsupportedOption, match=next(iter(keyword))):
        grammar.build_json_schema_grammar({"type": "array", **keyword})


def test_a_schema_that_is_not_json_is_rejected():
    for schema in ({"const": float("nan")}, {"enum": [object()]}):
        with pytest.raises(RequestError):
            grammar.build_json_schema_grammar(schema)


@pytest.mark.parametrize(
    "text", ['{ "a": 1}', '{"a" : 1}', '{"a":  1}', '{"a": 1 }', '{"a": 1 ,"b": 2}', '{\n  "a": 1\n}', '{"a": 1}\n']
)
def test_json_has_only_the_white_space_that_templates_write(text):
    schema_grammar = grammar.build_json_schema_grammar({"type": "object"})
    assert accepts(schema_grammar, '{"a": 1, "b": [1, 2]}')
    assert accepts(schema_grammar, '{"a":1,"b":[1,2]}')
    assert not accepts(schema_grammar, text)


def test_reasoning_is_allowed_before_the_format():
    spec = parse_response_format({"type": "choice", "choices": ["yes", "no"]}).spec
    free = grammar.build_reasoning_grammar(spec, THINK, grammar.quote_literal, starts_in_reasoning=False)
    assert accepts(free, "yes")
    assert accepts(free, "<think>Is it <b>so</b>?</think>\n\nno")
    assert not accepts(free, "<think>no")
    assert not accepts(free, "<think>Hm</think>maybe")
    opened = grammar.build_reasoning_grammar(spec, THINK, grammar.quote_literal, starts_in_reasoning=True)
    assert accepts(opened, "Hm</think>yes")
    assert not accepts(opened, "yes")


def test_reasoning_between_control_tokens_is_free_text():
    spec = parse_response_format({"type": "regex", "pattern": "[0-9]+"}).spec
    opened = grammar.build_reasoning_grammar(spec, THINK, lambda text: "<[257]>", starts_in_reasoning=True)
    matcher = llguidance.LLMatcher(TOKENIZER, opened)
    data = [*b"so it is </think>", 257, *b"42"]
    assert matcher.try_consume_tokens(data) == len(data)
    assert matcher.is_accepting()


def test_texts_can_be_excluded():
    free = grammar.build_grammar(grammar.build_exclusion_spec(["<tool_call>", "[CALL]"]))
    assert accepts(free, "any <tool> text [of] it")
    assert not accepts(free, "so: <tool_call>{}")
    assert not accepts(free, "[CALL]")


def test_alternatives_allow_any_of_their_specs():
    specs = [parse_response_format({"type": "choice", "choices": [text]}).spec for text in ("one", "two")]
    either = grammar.build_grammar(grammar.build_alternatives_spec(*specs))
    assert accepts(either, "one")
    assert accepts(either, "two")
    assert not accepts(either, "onetwo")


def test_a_grammar_is_json():
    assert json.loads(grammar.build_json_schema_grammar({"type": "integer"}))["grammars"]
