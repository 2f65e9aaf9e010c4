"""A family's grammar accepts its calls of the offered tools and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from afterglow.chat.output.parts import join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.grammar.lark import MAX_PARALLEL_CALLS
from afterglow.chat.tools.tool import Tool, parse_tools
from afterglow.errors import InvalidArgument, UnsupportedOption
from support.tool_outputs import RECORDED_OUTPUTS
from support.tool_outputs_json import BEGIN, END, SECTION, fenced_call, kimi_call, named_call
from support.tool_outputs_text import gemma_call, gemma_quote, glm_call, xml_call
from support.tool_records import NOW, PARIS, TOOLS, RecordedOutput, json_call, tagged_call

pytestmark = pytest.mark.slow

llguidance = pytest.importorskip("llguidance")
TOKENIZER = llguidance.LLTokenizer("byte")
ENFORCED = [recorded for recorded in RECORDED_OUTPUTS if recorded.enforced]
SAY = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
WITH_TRIGGER = sorted(name for name, family in TOOL_FAMILIES.items() if family.triggers)


def quote_literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def accepts(grammar: str, text: str) -> bool:
    """Return whether the grammar accepts the whole text and can end there."""
    error = llguidance.LLMatcher.validate_grammar(grammar, TOKENIZER)
    assert not error, error
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    tokens = TOKENIZER.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def build_grammar(family: str, *, parallel: bool = False, offered: tuple[Tool, ...] = TOOLS) -> str:
    return TOOL_FAMILIES[family].build_calls_grammar(offered, parallel, quote_literal)


def strip_reasoning(recorded: RecordedOutput) -> str:
    """Return the calls alone: harmony's reasoning precedes them (see chat.constraints.grammar)."""
    return recorded.raw.rpartition("<|start|>assistant")[2]


def test_every_family_has_an_output_that_its_grammar_accepts() -> None:
    assert {recorded.family for recorded in ENFORCED} == set(TOOL_FAMILIES)


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_a_recorded_call_of_the_family_is_accepted(recorded: RecordedOutput) -> None:
    assert accepts(build_grammar(recorded.family), strip_reasoning(recorded))
    assert accepts(build_grammar(recorded.family, parallel=True), strip_reasoning(recorded))


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_an_unknown_name_and_surrounding_text_are_rejected(recorded: RecordedOutput) -> None:
    grammar = build_grammar(recorded.family)
    name = recorded.calls[0][0]
    assert not accepts(grammar, recorded.raw.replace(name, "dance"))
    assert not accepts(grammar, recorded.raw + " And more.")
    assert not accepts(grammar, "Words first. " + recorded.raw)
    assert not accepts(grammar, recorded.raw[:-2])


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_a_tool_that_was_not_offered_is_rejected(recorded: RecordedOutput) -> None:
    others = tuple(tool for tool in TOOLS if tool.name != recorded.calls[0][0])
    assert not accepts(build_grammar(recorded.family, offered=others), recorded.raw)


INVALID_CALLS: list[tuple[str, str]] = [
    ("hermes", tagged_call(("get_weather", '{"city": 5}'))),
    ("hermes", tagged_call(("get_weather", "{}"))),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
    ("hermes", tagged_call(("get_weather", '{"city": "Paris", "unit": "kelvin"}'))),
    ("hermes", tagged_call(("search", '{"query": "x", "filters": {"tags": [1]}}'))),
    ("generic", tagged_call(("get_weather", '{"city": "Paris", "more": 1}'))),
    ("qwen-coder", xml_call("get_weather", city="Paris", days="two")),
    ("qwen-coder", xml_call("get_weather", days="2")),
    ("qwen-coder", xml_call("get_weather", city="Paris", unit="kelvin")),
    ("qwen-coder", xml_call("search", filters='{"tags": 1}', query="x")),
    ("glm", glm_call("get_weather", city="Paris", days="two")),
    ("glm", glm_call("get_weather", city="Paris", unit="kelvin")),
    ("llama", json_call(("get_weather", '{"city": 5}'), "parameters")),
    ("llama", json_call(PARIS)),  # its key is `parameters`
    ("pythonic", "[get_weather(city=5)]"),
    ("pythonic", "[get_weather(days=2)]"),
    ("pythonic", '[get_weather(city="Paris", unit="kelvin")]'),
    ("lfm", '<|tool_call_start|>[get_weather(city="Paris", detailed=1)]<|tool_call_end|>'),
    ("tool-code", "```tool_code\nget_weather()\n```"),
    ("mistral", f"[TOOL_CALLS][{json_call(('get_weather', '{}'))}]"),
    ("mistral-named", "[TOOL_CALLS]get_weather[ARGS]{}"),
    ("mistral-ids", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}"),
    ("granite", f"<|tool_call|>[{json_call(('get_weather', '{}'))}]"),
    ("nemotron", f"<TOOLCALL>[{json_call(('get_weather', '{}'))}]</TOOLCALL>"),
    ("deepseek", f"{BEGIN}{fenced_call(('get_weather', '{}'))}{END}"),
    ("deepseek-named", f"{BEGIN}{named_call(('get_weather', '{}'))}{END}"),
    ("kimi", f"{SECTION[0]}{kimi_call(('get_weather', '{}'))}{SECTION[1]}"),
    ("gemma", gemma_call("get_weather{city:5}")),
    ("gemma", gemma_call(f"get_weather{{city:{gemma_quote('Paris')},unit:{gemma_quote('kelvin')}}}")),
    ("gemma", gemma_call(f"search{{filters:{{tags:[1]}},query:{gemma_quote('x')}}}")),
    ("function-gemma", "<start_function_call>call:get_weather{}<end_function_call>"),
    ("harmony", "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>"),
]


@pytest.mark.parametrize(("family", "raw"), INVALID_CALLS)
def test_arguments_that_violate_the_schema_are_rejected(family: str, raw: str) -> None:
    assert not accepts(build_grammar(family, parallel=True), raw)


SEVERAL = [
    recorded
    for recorded in RECORDED_OUTPUTS
    if recorded.case == "several calls" and not recorded.text and recorded.family not in ("harmony", "seed")
]


@pytest.mark.parametrize("recorded", SEVERAL, ids=str)
def test_several_calls_are_accepted_only_if_parallel(recorded: RecordedOutput) -> None:
    raw = recorded.raw.rstrip("\n")
    assert accepts(build_grammar(recorded.family, parallel=True), raw)
    assert not accepts(build_grammar(recorded.family), raw)


REPEATED = [
    ("hermes", tagged_call(PARIS), "\n"),
    ("qwen-coder", xml_call("get_weather", city="Paris"), "\n"),
    ("glm", glm_call("get_weather", city="Paris"), "\n"),
    ("gemma", gemma_call(f"get_weather{{city:{gemma_quote('Paris')}}}"), ""),
    ("mistral-named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', ""),
]


@pytest.mark.parametrize(("family", "call", "separator"), REPEATED)
def test_the_number_of_calls_is_bounded(family: str, call: str, separator: str) -> None:
    grammar = build_grammar(family, parallel=True)
    assert accepts(grammar, separator.join([call] * MAX_PARALLEL_CALLS))
    assert not accepts(grammar, separator.join([call] * (MAX_PARALLEL_CALLS + 1)))


@pytest.mark.parametrize(
    ("family", "begin", "call", "separator", "end"),
    [
        ("pythonic", "[", 'get_weather(city="Paris")', ", ", "]"),
        ("llama", "", json_call(PARIS, "parameters"), "; ", ""),
        ("granite", "<|tool_call|>[", json_call(PARIS), ", ", "]"),
        ("kimi", SECTION[0], kimi_call(PARIS), "", SECTION[1]),
    ],
)
def test_the_length_of_a_list_of_calls_is_bounded(family: str, begin: str, call: str, separator: str, end: str) -> None:
    grammar = build_grammar(family, parallel=True)
    assert accepts(grammar, begin + separator.join([call] * MAX_PARALLEL_CALLS) + end)
    assert not accepts(grammar, begin + separator.join([call] * (MAX_PARALLEL_CALLS + 1)) + end)


@pytest.mark.parametrize(("family", "call"), [row[:2] for row in REPEATED if row[2]])
def test_a_newline_after_a_call_does_not_demand_another_call(family: str, call: str) -> None:
    assert accepts(build_grammar(family, parallel=True), call + "\n")


@pytest.mark.parametrize("family", WITH_TRIGGER)
def test_after_a_trigger_the_rest_of_the_call_is_accepted(family: str) -> None:
    trigger = TOOL_FAMILIES[family].triggers[0]
    grammar = TOOL_FAMILIES[family].build_after_trigger_grammar(TOOLS, quote_literal)
    raws = [recorded.raw for recorded in ENFORCED if recorded.family == family and trigger in recorded.raw]
    raws += ["<|python_tag|>" + json_call(PARIS, "parameters")] if family == "llama" else []
    assert raws
    for raw in raws:
        assert accepts(grammar, raw.partition(trigger)[2])
        assert not accepts(grammar, raw.partition(trigger)[2] + "x")
        assert not accepts(
            grammar,
            raw.partition(trigger)[2]
            .replace("get_weather", "dance")
            .replace("now", "dance")
            .replace("search", "dance"),
        )


def test_after_llamas_second_trigger_the_object_continues() -> None:
    grammar = TOOL_FAMILIES["llama"].build_after_trigger_grammar(TOOLS, quote_literal, '{"name": "')
    assert accepts(grammar, 'get_weather", "parameters": {"city": "Paris"}}')
    assert not accepts(grammar, 'get_weather", "parameters": {"city": 1}}')
    assert not accepts(grammar, json_call(PARIS, "parameters"))


def test_an_unknown_trigger_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="trigger"):
        TOOL_FAMILIES["hermes"].build_after_trigger_grammar(TOOLS, quote_literal, "<call>")
    with pytest.raises(UnsupportedOption, match="pythonic"):
        TOOL_FAMILIES["pythonic"].build_after_trigger_grammar(TOOLS, quote_literal)


def test_a_call_cannot_be_enforced_without_tools() -> None:
    with pytest.raises(InvalidArgument, match="tools"):
        TOOL_FAMILIES["hermes"].build_calls_grammar((), True, quote_literal)


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_if_markers_are_control_tokens_the_grammar_requires_the_tokens(recorded: RecordedOutput) -> None:
    family = TOOL_FAMILIES[recorded.family]
    token_ids = {marker: 1 + index for index, marker in enumerate(family.markers)}  # bytes that no output contains
    tokens = strip_reasoning(recorded)
    for marker, token in token_ids.items():
        tokens = tokens.replace(marker, chr(token))
    pattern = re.compile(f"({'|'.join(map(re.escape, token_ids)) or '(?!)'})")

    def write_literal(text: str) -> str:
        pieces = filter(None, pattern.split(text))
        return " ".join(f"<[{token_ids[piece]}]>" if piece in token_ids else quote_literal(piece) for piece in pieces)

    grammar = family.build_calls_grammar(TOOLS, False, write_literal)
    if recorded.case != "tags inside arguments":  # there the markers are text
        assert accepts(grammar, tokens)
    assert tokens == recorded.raw or not accepts(grammar, recorded.raw)


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
@pytest.mark.parametrize("keyword", ["contains", "$dynamicRef", "dependentRequired"])
def test_a_keyword_that_no_grammar_enforces_is_rejected_by_name(family: str, keyword: str) -> None:
    offered = build_tools(x={"type": "array", "items": {keyword: True}}, contains={"enum": [{"if": 1}]})
    with pytest.raises(UnsupportedOption, match=re.escape(f"tools.f.parameters.properties.x.items.{keyword}")):
        build_grammar(family, offered=offered)


def test_one_of_alternatives_must_have_different_types() -> None:
    disjoint = {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}
    assert accepts(build_grammar("glm", offered=build_tools(x=disjoint)), glm_call("f", x="true"))
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}
    with pytest.raises(UnsupportedOption, match="oneOf"):
        build_grammar("glm", offered=build_tools(x=overlapping))


def build_tools(**properties: Any) -> tuple[Tool, ...]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])


NON_JSON_FAMILIES = ["qwen-coder", "seed", "minimax", "glm", "gemma", "function-gemma"]


@pytest.mark.parametrize("family", [*NON_JSON_FAMILIES, "pythonic", "lfm", "tool-code"])
def test_an_object_keyword_that_the_format_cannot_enforce_is_rejected_by_name(family: str) -> None:
    schema = {"type": "object", "properties": {}, "minProperties": 1}
    offered = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(UnsupportedOption, match=r"tools\.f\.parameters\.minProperties"):
        build_grammar(family, offered=offered)


def test_a_bounded_string_length_excludes_the_surrounding_newlines() -> None:
    grammar = build_grammar("qwen-coder", offered=build_tools(x={"type": "string", "minLength": 2, "maxLength": 3}))
    assert accepts(grammar, xml_call("f", x="abc"))
    assert not accepts(grammar, xml_call("f", x="a"))
    assert not accepts(grammar, xml_call("f", x="abcd"))


@pytest.mark.parametrize("nullable", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}])
def test_a_nullable_string_is_written_without_quotes(nullable: dict[str, Any]) -> None:
    grammar = build_grammar("glm", offered=build_tools(x=nullable, n={"type": "integer"}))
    assert accepts(grammar, glm_call("f", x="null", n="1"))
    assert accepts(grammar, glm_call("f", x="Paris", n="1"))


def test_a_nullable_string_in_gemma_and_pythonic() -> None:
    offered = build_tools(
        x={"type": ["string", "null"]}, y={"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
    )
    grammar = build_grammar("gemma", offered=offered)
    assert accepts(grammar, gemma_call("f{x:null,y:[true,false]}"))
    assert accepts(grammar, gemma_call(f"f{{x:{gemma_quote('a')},y:[]}}"))
    assert not accepts(grammar, gemma_call("f{x:null,y:[true,false,true]}"))
    grammar = build_grammar("pythonic", offered=offered)
    assert accepts(grammar, "[f(x=None, y=[true])]")
    assert accepts(grammar, '[f(x="a", y=[])]')


SCHEMA_WITH_REFERENCE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("family", "write"),
    [
        ("hermes", lambda value: tagged_call(("f", f'{{"place": {value}}}'))),
        ("qwen-coder", lambda value: xml_call("f", place=value)),
        ("pythonic", lambda value: f"[f(place={value})]"),
        ("mistral-named", lambda value: f'[TOOL_CALLS]f[ARGS]{{"place": {value}}}'),
    ],
)
def test_references_in_a_schema_are_resolved(family: str, write: Any) -> None:
    offered = parse_tools([{"type": "function", "function": {"name": "f", "parameters": SCHEMA_WITH_REFERENCE}}])
    grammar = build_grammar(family, offered=offered)
    assert accepts(grammar, write('{"city": "Paris"}'))
    assert not accepts(grammar, write('{"city": 5}'))


def test_references_are_resolved_in_gemmas_notation() -> None:
    offered = parse_tools([{"type": "function", "function": {"name": "f", "parameters": SCHEMA_WITH_REFERENCE}}])
    assert accepts(build_grammar("gemma", offered=offered), gemma_call(f"f{{place:{{city:{gemma_quote('Paris')}}}}}"))


def test_a_recursive_schema_is_rejected_if_the_format_must_expand_it() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#/$defs/Tree"}}}
    offered = parse_tools(
        [{"type": "function", "function": {"name": "f", "parameters": {**tree, "$defs": {"Tree": tree}}}}]
    )
    with pytest.raises(UnsupportedOption, match="recursion"):
        build_grammar("gemma", offered=offered)
    assert accepts(build_grammar("hermes", offered=offered), tagged_call(("f", '{"child": {"child": {}}}')))


def test_an_enforced_call_parses() -> None:
    parser = TOOL_FAMILIES["harmony"].create_parser(TOOLS)
    raw = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    assert accepts(build_grammar("harmony"), raw)
    assert [part.name for part in parser.feed(raw) if hasattr(part, "name")] == [NOW[0]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ("a < b", "a < b"),
        ("<![CDATA[<b>bold</b>]]>", "<b>bold</b>"),
        ("<![CDATA[a</param>b]]>", "a</param>b"),
        ("<![CDATA[]]>", ""),
        ("<b>bold</b>", None),
        ("<![CDATA[a", None),
        ("<![CDATA[a]]>b", None),
    ],
)
def test_the_parser_of_minicpm_reads_what_its_grammar_accepts(value: str, expected: str | None) -> None:
    (tool,) = parse_tools([{"type": "function", "function": {"name": "say", "parameters": SAY}}])
    text = f'<function name="say"><param name="text">{value}</param></function>'
    assert accepts(build_grammar("minicpm", offered=(tool,)), text) == (expected is not None)
    if expected is not None:
        parser = TOOL_FAMILIES["minicpm"].create_parser([tool])
        (call,) = join_parts(parser.feed(text) + parser.finish()).tool_calls
        assert json.loads(call.arguments) == {"text": expected}


def test_a_cdata_section_has_the_length_of_its_text() -> None:
    schema = {**SAY, "properties": {"text": {"type": "string", "minLength": 2, "maxLength": 3}}}
    (tool,) = parse_tools([{"type": "function", "function": {"name": "say", "parameters": schema}}])
    grammar = build_grammar("minicpm", offered=(tool,))
    for value, is_allowed in (("a", False), ("ab", True), ("abcd", False), ("<![CDATA[<a>]]>", True)):
        text = f'<function name="say"><param name="text">{value}</param></function>'
        assert accepts(grammar, text) == is_allowed, value
