"""Tools that take a text: their grammar is enforced inside the call format of every family."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from afterglow.chat.output.parts import join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.families.xml import DSML
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.text_input import TextInputReader, unwrap_text_input, wrap_text_input
from afterglow.chat.tools.tool import TextInput, Tool, build_text_tool
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.errors import InvalidArgument
from support.grammar_text import BYTES, PieceVocabulary, accepts, generate
from support.patches import PATCH_GRAMMAR, parse_patch

# Few characters, so that random texts end soon, and those that quotes, tags and escapes are made of.
SHORT_PATCH_GRAMMAR = PATCH_GRAMMAR.replace(r"/[^\n\r]*/", r'/[a"\'\\<>\/]{0,9}/').replace(
    r"/[^\n\r]+/", "/[a.<]{1,4}/"
)
END_LITERAL = f"<[{PieceVocabulary.end_token}]>"  # the only control token of the vocabulary
TRICKY = 'quotes " \' \\ \t newline \n é 😀 </parameter> {"input": "x"} \u0007'


def build(syntax: str, definition: str) -> Tool:
    return build_text_tool("apply_patch", "Edit files.", TextInput(syntax, definition), where="tools[0]")  # type: ignore[arg-type]


def read_input(family: ToolFamily, tool: Tool, text: str) -> str:
    parser = family.create_parser([tool])
    output = join_parts(parser.feed(text) + parser.finish())
    assert [call.name for call in output.tool_calls] == ["apply_patch"], text
    return unwrap_text_input(output.tool_calls[0].arguments)


@pytest.mark.parametrize("family", TOOL_FAMILIES.values(), ids=TOOL_FAMILIES.keys())
def test_every_family_enforces_a_lark_grammar(family: ToolFamily) -> None:
    tool, random = build("lark", SHORT_PATCH_GRAMMAR), Random(7)
    grammar = family.build_calls_grammar([tool], False, json.dumps)
    patches = [generate(grammar, random, closing=0) for _ in range(3)]
    complete = [text for text in patches if text is not None]
    assert complete
    for text in complete:
        parse_patch(read_input(family, tool, text))


@pytest.mark.parametrize("family", TOOL_FAMILIES.values(), ids=TOOL_FAMILIES.keys())
def test_every_family_enforces_a_regular_expression(family: ToolFamily) -> None:
    pattern = r'([a-c"\\/<>]|\n){1,20}'
    tool, random = build("regex", pattern), Random(3)
    grammar = family.build_calls_grammar([tool], False, json.dumps)
    for _ in range(8):
        text = generate(grammar, random, closing=0)
        assert text is not None
        assert re.fullmatch(pattern, read_input(family, tool, text))


@pytest.mark.parametrize(
    ("family", "end"), [("qwen-coder", "</parameter>"), ("glm", "</arg_value>"), ("gemma", '<|"|>')]
)
def test_a_text_does_not_contain_the_text_that_ends_it(family: str, end: str) -> None:
    tool = build("regex", "(?s:a.*z)")
    grammar = TOOL_FAMILIES[family].build_calls_grammar([tool], False, json.dumps)
    call = {
        "qwen-coder": (
            "<tool_call>\n<function=apply_patch>\n<parameter=input>\n{}\n</parameter>\n</function>\n</tool_call>"
        ),
        "glm": "<tool_call>apply_patch\n<arg_key>input</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "gemma": '<|tool_call>call:apply_patch{{input:<|"|>{}<|"|>}}<tool_call|>',
    }[family]
    assert accepts(grammar, call.format("a < </ b\n\nz"))
    assert not accepts(grammar, call.format(f"a{end}z"))
    assert not accepts(grammar, call.format("ab"))


@pytest.mark.parametrize("name", [name for name, family in TOOL_FAMILIES.items() if family.triggers])
def test_a_grammar_is_enforced_after_a_trigger(name: str) -> None:
    family, tool = TOOL_FAMILIES[name], build("regex", 'x["<a]{1,9}y')
    for trigger in family.triggers:
        grammar = family.build_after_trigger_grammar([tool], json.dumps, trigger)
        parser = family.create_parser([tool])
        text = generate(grammar, Random(5), closing=0.5)
        assert text is not None
        calls = join_parts(parser.feed(trigger + text) + parser.finish()).tool_calls
        assert calls
        assert all(re.fullmatch('x["<a]{1,9}y', unwrap_text_input(call.arguments)) for call in calls)


@pytest.mark.parametrize(
    ("name", "control"),
    [("glm", "</arg_value>"), ("gemma", '<|"|>'), ("deepseek-dsml", DSML), ("kimi-k3", "<|close|>")],
)
def test_a_control_token_ends_a_text(name: str, control: str) -> None:
    def write_literal(text: str) -> str:
        pieces = [piece for piece in re.split(f"({re.escape(control)})", text) if piece]
        return " ".join(END_LITERAL if piece == control else json.dumps(piece, ensure_ascii=False) for piece in pieces)

    tool = build("lark", PATCH_GRAMMAR)
    grammar = TOOL_FAMILIES[name].build_calls_grammar([tool], True, write_literal)
    assert END_LITERAL in grammar
    BYTES.compile(GrammarConstraint(grammar=grammar))


def test_a_grammar_that_cannot_be_enforced_names_its_tool() -> None:
    for syntax, definition in (("lark", "start: missing"), ("regex", "(?=a)b"), ("regex", "(")):
        with pytest.raises(InvalidArgument, match=re.escape("tools.apply_patch.format.definition")):
            TOOL_FAMILIES["hermes"].build_calls_grammar([build(syntax, definition)], False, json.dumps)


def test_a_definition_describes_the_input_and_its_grammar() -> None:
    function = build("lark", PATCH_GRAMMAR).definition["function"]
    assert function["parameters"]["required"] == ["input"]
    assert "*** Begin Patch" in function["parameters"]["properties"]["input"]["description"]


@pytest.mark.parametrize("escape", [True, False])
def test_a_text_survives_wrapping_and_reading_in_pieces(escape: bool) -> None:
    arguments = json.dumps({"input": TRICKY}, ensure_ascii=escape)
    assert unwrap_text_input(wrap_text_input(TRICKY)) == unwrap_text_input(arguments) == TRICKY
    for size in (1, 2, 5, 1000):
        reader = TextInputReader()
        pieces = [reader.feed(arguments[start : start + size]) for start in range(0, len(arguments), size)]
        assert "".join(pieces) + reader.finish() == TRICKY


def test_arguments_of_another_form_are_the_text() -> None:
    invalid = (r'{"patch": "\ud83d"}', "\ufffd")
    for arguments, text in (('{"patch": "x"}', "x"), invalid, ('"x"', "x"), ("x", "x"), ('{"a": 1}', '{"a": 1}')):
        reader = TextInputReader()
        assert reader.feed(arguments) + reader.finish() == text


def test_truncated_arguments_keep_what_was_written() -> None:
    reader = TextInputReader()
    assert reader.feed('{"input": "ab\\') + reader.finish() == "ab"
