"""Tools that take a text: their grammar is enforced inside the call format of every family."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from afterglow.chat.output.parts import join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.text_input import TextInputReader, unwrap_text_input, wrap_text_input
from afterglow.chat.tools.tool import TextInput, Tool, build_text_tool
from afterglow.errors import InvalidArgument
from support.grammar_text import generate
from support.patches import PATCH_GRAMMAR, parse_patch

# Few characters, so that random texts end soon, and those that quotes, tags and escapes are made of.
SHORT_PATCH_GRAMMAR = PATCH_GRAMMAR.replace(r"/[^\n\r]*/", r'/[a"\'\\<>\/]{0,9}/').replace(
    r"/[^\n\r]+/", "/[a.<]{1,4}/"
)
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
    patches = [generate(grammar, random, closing=0) for _ in range(5)]
    complete = [text for text in patches if text is not None]
    assert complete
    for text in complete:
        parse_patch(read_input(family, tool, text))


@pytest.mark.parametrize("family", TOOL_FAMILIES.values(), ids=TOOL_FAMILIES.keys())
def test_every_family_enforces_a_regular_expression(family: ToolFamily) -> None:
    pattern = r'([a-c"\\/<>]|\n){1,20}'
    tool, random = build("regex", pattern), Random(3)
    grammar = family.build_calls_grammar([tool], False, json.dumps)
    for _ in range(20):
        text = generate(grammar, random, closing=0)
        assert text is not None
        assert re.fullmatch(pattern, read_input(family, tool, text))


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
    for arguments, text in (('{"patch": "x"}', "x"), ('"x"', "x"), ("x", "x"), ('{"a": 1}', '{"a": 1}')):
        reader = TextInputReader()
        assert reader.feed(arguments) + reader.finish() == text


def test_truncated_arguments_keep_what_was_written() -> None:
    reader = TextInputReader()
    assert reader.feed('{"input": "ab\\') + reader.finish() == "ab"
