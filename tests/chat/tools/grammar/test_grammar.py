"""Does a grammar let a model write its family's calls of the given tools, and nothing else?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from afterglow.chat.tools import TOOL_FAMILIES, Tool, parse_tools
from afterglow.errors import InvalidArgument, UnsupportedOption
from support.tool_outputs import (
    BEGIN,
    END,
    NOW,
    PARIS,
    RECORDED,
    SECTION,
    TOOLS,
    Recorded,
    fenced,
    gemma,
    glm,
    item,
    kimi,
    named,
    quotes,
    tag,
    xml,
)

llguidance = pytest.importorskip("llguidance")
TOKENIZER = llguidance.LLTokenizer("byte")
ENFORCED = [one for one in RECORDED if one.enforced]
WITH_TRIGGER = sorted(name for name, family in TOOL_FAMILIES.items() if family.triggers)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar takes the whole text and may end there."""
    error = llguidance.LLMatcher.validate_grammar(grammar, TOKENIZER)
    assert not error, error
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    tokens = TOKENIZER.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(family: str, *, parallel: bool = False, offered: tuple[Tool, ...] = TOOLS) -> str:
    return TOOL_FAMILIES[family].build_calls_grammar(offered, parallel, quoted)


def after_thoughts(recorded: Recorded) -> str:
    """The calls alone: harmony's thoughts come before them (see chat.grammar.after_thought)."""
    return recorded.raw.rpartition("<|start|>assistant")[2]


def test_every_family_has_an_answer_that_its_grammar_takes() -> None:
    assert {one.family for one in ENFORCED} == set(TOOL_FAMILIES)


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_what_a_model_of_the_family_writes_is_accepted(recorded: Recorded) -> None:
    assert accepts(grammar_of(recorded.family), after_thoughts(recorded))
    assert accepts(grammar_of(recorded.family, parallel=True), after_thoughts(recorded))


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_another_name_and_a_rest_are_rejected(recorded: Recorded) -> None:
    grammar = grammar_of(recorded.family)
    name = recorded.calls[0][0]
    assert not accepts(grammar, recorded.raw.replace(name, "dance"))
    assert not accepts(grammar, recorded.raw + " And more.")
    assert not accepts(grammar, "Words first. " + recorded.raw)
    assert not accepts(grammar, recorded.raw[:-2])


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_a_tool_that_was_not_offered_is_rejected(recorded: Recorded) -> None:
    others = tuple(tool for tool in TOOLS if tool.name != recorded.calls[0][0])
    assert not accepts(grammar_of(recorded.family, offered=others), recorded.raw)


WRONG: list[tuple[str, str]] = [
    ("hermes", tag(("get_weather", '{"city": 5}'))),
    ("hermes", tag(("get_weather", "{}"))),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
    ("hermes", tag(("get_weather", '{"city": "Paris", "unit": "kelvin"}'))),
    ("hermes", tag(("search", '{"query": "x", "filters": {"tags": [1]}}'))),
    ("generic", tag(("get_weather", '{"city": "Paris", "more": 1}'))),
    ("qwen-coder", xml("get_weather", city="Paris", days="two")),
    ("qwen-coder", xml("get_weather", days="2")),
    ("qwen-coder", xml("get_weather", city="Paris", unit="kelvin")),
    ("qwen-coder", xml("search", filters='{"tags": 1}', query="x")),
    ("glm", glm("get_weather", city="Paris", days="two")),
    ("glm", glm("get_weather", city="Paris", unit="kelvin")),
    ("llama", item(("get_weather", '{"city": 5}'), "parameters")),
    ("llama", item(PARIS)),  # its word is `parameters`
    ("pythonic", "[get_weather(city=5)]"),
    ("pythonic", "[get_weather(days=2)]"),
    ("pythonic", '[get_weather(city="Paris", unit="kelvin")]'),
    ("lfm", '<|tool_call_start|>[get_weather(city="Paris", detailed=1)]<|tool_call_end|>'),
    ("tool-code", "```tool_code\nget_weather()\n```"),
    ("mistral", f"[TOOL_CALLS][{item(('get_weather', '{}'))}]"),
    ("mistral-named", "[TOOL_CALLS]get_weather[ARGS]{}"),
    ("mistral-ids", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}"),
    ("granite", f"<|tool_call|>[{item(('get_weather', '{}'))}]"),
    ("nemotron", f"<TOOLCALL>[{item(('get_weather', '{}'))}]</TOOLCALL>"),
    ("deepseek", f"{BEGIN}{fenced(('get_weather', '{}'))}{END}"),
    ("deepseek-named", f"{BEGIN}{named(('get_weather', '{}'))}{END}"),
    ("kimi", f"{SECTION[0]}{kimi(('get_weather', '{}'))}{SECTION[1]}"),
    ("gemma", gemma("get_weather{city:5}")),
    ("gemma", gemma(f"get_weather{{city:{quotes('Paris')},unit:{quotes('kelvin')}}}")),
    ("gemma", gemma(f"search{{filters:{{tags:[1]}},query:{quotes('x')}}}")),
    ("function-gemma", "<start_function_call>call:get_weather{}<end_function_call>"),
    ("harmony", "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>"),
]


@pytest.mark.parametrize(("family", "raw"), WRONG)
def test_arguments_that_the_schema_forbids_are_rejected(family: str, raw: str) -> None:
    assert not accepts(grammar_of(family, parallel=True), raw)


SEVERAL = [one for one in RECORDED if one.what == "several" and not one.text and one.family not in ("harmony", "seed")]


@pytest.mark.parametrize("recorded", SEVERAL, ids=str)
def test_several_calls_are_accepted_only_where_they_may_be(recorded: Recorded) -> None:
    raw = recorded.raw.rstrip("\n")
    assert accepts(grammar_of(recorded.family, parallel=True), raw)
    assert not accepts(grammar_of(recorded.family), raw)


@pytest.mark.parametrize("family", WITH_TRIGGER)
def test_behind_a_trigger_the_rest_of_the_call_is_accepted(family: str) -> None:
    trigger = TOOL_FAMILIES[family].triggers[0]
    grammar = TOOL_FAMILIES[family].build_after_trigger_grammar(TOOLS, quoted)
    raws = [one.raw for one in ENFORCED if one.family == family and trigger in one.raw]
    raws += ["<|python_tag|>" + item(PARIS, "parameters")] if family == "llama" else []
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


def test_behind_llamas_other_trigger_the_object_goes_on() -> None:
    grammar = TOOL_FAMILIES["llama"].build_after_trigger_grammar(TOOLS, quoted, '{"name": "')
    assert accepts(grammar, 'get_weather", "parameters": {"city": "Paris"}}')
    assert not accepts(grammar, 'get_weather", "parameters": {"city": 1}}')
    assert not accepts(grammar, item(PARIS, "parameters"))


def test_a_trigger_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="trigger"):
        TOOL_FAMILIES["hermes"].build_after_trigger_grammar(TOOLS, quoted, "<call>")
    with pytest.raises(UnsupportedOption, match="pythonic"):
        TOOL_FAMILIES["pythonic"].build_after_trigger_grammar(TOOLS, quoted)


def test_a_call_cannot_be_enforced_without_tools() -> None:
    with pytest.raises(InvalidArgument, match="tools"):
        TOOL_FAMILIES["hermes"].build_calls_grammar((), True, quoted)


@pytest.mark.parametrize("recorded", ENFORCED, ids=str)
def test_where_markers_are_control_tokens_the_grammar_wants_the_tokens(recorded: Recorded) -> None:
    family = TOOL_FAMILIES[recorded.family]
    ids = {marker: 1 + index for index, marker in enumerate(family.markers)}  # bytes that no answer holds
    tokens = after_thoughts(recorded)
    for marker, token in ids.items():
        tokens = tokens.replace(marker, chr(token))
    grammar = family.build_calls_grammar(TOOLS, False, lambda text: f"<[{ids[text]}]>" if text in ids else quoted(text))
    if recorded.what != "tags inside arguments":  # there they are text
        assert accepts(grammar, tokens)
    assert tokens == recorded.raw or not accepts(grammar, recorded.raw)


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "dependentRequired"])
def test_a_keyword_that_no_grammar_enforces_is_refused_by_name(family: str, keyword: str) -> None:
    offered = tool(x={"type": "array", "items": {keyword: True}}, uniqueItems={"enum": [{"not": 1}]})
    with pytest.raises(UnsupportedOption, match=rf"tools\.f\.parameters\.properties\.x\.items\.{keyword}"):
        grammar_of(family, offered=offered)


def test_choices_of_which_only_one_may_hold_must_be_of_different_types() -> None:
    apart = {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}
    assert accepts(grammar_of("glm", offered=tool(x=apart)), glm("f", x="true"))
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}
    with pytest.raises(UnsupportedOption, match="oneOf"):
        grammar_of("glm", offered=tool(x=overlapping))


def tool(**properties: Any) -> tuple[Tool, ...]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])


NOT_JSON = ["qwen-coder", "seed", "minimax", "glm", "gemma", "function-gemma"]


@pytest.mark.parametrize("family", NOT_JSON)
@pytest.mark.parametrize("keyword", [{"pattern": "^a"}, {"format": "date"}])
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(family: str, keyword: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match=rf"tools\.f\.parameters\.x\.{next(iter(keyword))}"):
        grammar_of(family, offered=tool(x={"type": "string", **keyword}))


@pytest.mark.parametrize("family", [*NOT_JSON, "pythonic", "lfm", "tool-code"])
def test_a_keyword_of_the_arguments_that_cannot_be_enforced_is_refused_by_name(family: str) -> None:
    schema = {"type": "object", "properties": {}, "minProperties": 1}
    offered = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(UnsupportedOption, match=r"tools\.f\.parameters\.minProperties"):
        grammar_of(family, offered=offered)


@pytest.mark.parametrize("keyword", [{"uniqueItems": True}, {"prefixItems": []}])
def test_gemma_refuses_arrays_it_cannot_enforce(keyword: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match=rf"x\.{next(iter(keyword))}"):
        grammar_of("gemma", offered=tool(x={"type": "array", **keyword}))


def test_text_of_bounded_length_is_counted_without_its_newlines() -> None:
    grammar = grammar_of("qwen-coder", offered=tool(x={"type": "string", "minLength": 2, "maxLength": 3}))
    assert accepts(grammar, xml("f", x="abc"))
    assert not accepts(grammar, xml("f", x="a"))
    assert not accepts(grammar, xml("f", x="abcd"))


@pytest.mark.parametrize("nothing", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}])
def test_text_or_nothing_is_written_bare(nothing: dict[str, Any]) -> None:
    grammar = grammar_of("glm", offered=tool(x=nothing, n={"type": "integer"}))
    assert accepts(grammar, glm("f", x="null", n="1"))
    assert accepts(grammar, glm("f", x="Paris", n="1"))


def test_text_or_nothing_in_the_other_families() -> None:
    offered = tool(x={"type": ["string", "null"]}, y={"type": "array", "items": {"type": "boolean"}, "maxItems": 2})
    grammar = grammar_of("gemma", offered=offered)
    assert accepts(grammar, gemma("f{x:null,y:[true,false]}"))
    assert accepts(grammar, gemma(f"f{{x:{quotes('a')},y:[]}}"))
    assert not accepts(grammar, gemma("f{x:null,y:[true,false,true]}"))
    grammar = grammar_of("pythonic", offered=offered)
    assert accepts(grammar, "[f(x=None, y=[true])]")
    assert accepts(grammar, '[f(x="a", y=[])]')


REFERRING = {
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
        ("hermes", lambda value: tag(("f", f'{{"place": {value}}}'))),
        ("qwen-coder", lambda value: xml("f", place=value)),
        ("pythonic", lambda value: f"[f(place={value})]"),
        ("mistral-named", lambda value: f'[TOOL_CALLS]f[ARGS]{{"place": {value}}}'),
    ],
)
def test_references_in_a_schema_are_followed(family: str, write: Any) -> None:
    offered = parse_tools([{"type": "function", "function": {"name": "f", "parameters": REFERRING}}])
    grammar = grammar_of(family, offered=offered)
    assert accepts(grammar, write('{"city": "Paris"}'))
    assert not accepts(grammar, write('{"city": 5}'))


def test_references_in_gemmas_notation_are_followed() -> None:
    offered = parse_tools([{"type": "function", "function": {"name": "f", "parameters": REFERRING}}])
    assert accepts(grammar_of("gemma", offered=offered), gemma(f"f{{place:{{city:{quotes('Paris')}}}}}"))


def test_a_schema_that_contains_itself_is_refused_where_it_must_be_written_out() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#/$defs/Tree"}}}
    offered = parse_tools(
        [{"type": "function", "function": {"name": "f", "parameters": {**tree, "$defs": {"Tree": tree}}}}]
    )
    with pytest.raises(UnsupportedOption, match="recursion"):
        grammar_of("gemma", offered=offered)
    assert accepts(grammar_of("hermes", offered=offered), tag(("f", '{"child": {"child": {}}}')))


def test_what_was_enforced_is_read_again() -> None:
    reader = TOOL_FAMILIES["harmony"].create_parser(TOOLS)
    raw = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    assert accepts(grammar_of("harmony"), raw)
    assert [part.name for part in reader.feed(raw) if hasattr(part, "name")] == [NOW[0]]
