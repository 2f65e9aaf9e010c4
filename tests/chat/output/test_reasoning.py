"""Reasoning parser and reasoning options: every format, any split of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.chat.constraints.reasoning_options import parse_reasoning_options
from afterglow.chat.output.parts import PlainTextParser, ReasoningDelta, TextDelta, join_parts
from afterglow.chat.output.reasoning import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    ReasoningParser,
    detect_reasoning_format,
    find_overlap,
)
from afterglow.errors import InvalidArgument, UnsupportedOption

THINK = next(format for format in REASONING_FORMATS if format.start_tag == "<think>")
for_each_tag_format = pytest.mark.parametrize(
    "format",
    [format for format in REASONING_FORMATS if format is not HARMONY_REASONING],
    ids=lambda format: format.start_tag,
)


def parse(text: str, positions: list[int] | None = None, *, format=THINK, open: bool = False):
    parser = ReasoningParser(PlainTextParser, format, starts_in="reasoning" if open else "turn")
    pieces = [text[a:b] for a, b in zip([0, *(positions or [])], [*(positions or []), len(text)], strict=True)]
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return join_parts(parts + parser.finish())


@for_each_tag_format
def test_reasoning_before_the_answer_is_separated(format):
    output = parse(f"{format.start_tag}\nLet me see.\n{format.end_tag}\n\nYes.", format=format)
    assert (output.reasoning, output.text) == ("Let me see.", "Yes.")


@for_each_tag_format
def test_reasoning_opened_by_the_prompt_needs_no_start_tag(format):
    output = parse(f"Let me see.\n{format.end_tag}Yes.", format=format, open=True)
    assert (output.reasoning, output.text) == ("Let me see.", "Yes.")


def test_output_without_reasoning_is_text():
    assert parse("Yes, <think> is a tag.").text == "Yes, <think> is a tag."
    assert parse("  <thi").text == "  <thi"
    assert parse("").text == ""


def test_unclosed_reasoning_is_reasoning():
    output = parse("<think>On and on </thi")
    assert (output.reasoning, output.text) == ("On and on </thi", "")


def test_empty_reasoning_is_dropped():
    output = parse("<think>\n\n</think>\n\nYes.")
    assert (output.reasoning, output.text) == ("", "Yes.")


def test_reasoning_is_streamed():
    parser = ReasoningParser(PlainTextParser, THINK, starts_in="reasoning")
    assert parser.feed("Hm,") == [ReasoningDelta("Hm,")]
    assert parser.feed(" so </") == [ReasoningDelta(" so")]
    assert parser.feed("b> it is </think> Y") == [ReasoningDelta(" </b> it is"), TextDelta("Y")]


@given(
    st.text(alphabet="<>/think \nab", max_size=30),
    st.text(alphabet="<>/think \nab", max_size=30),
    st.lists(st.integers(0, 80), max_size=12),
    st.booleans(),
)
def test_any_split_gives_the_same_reasoning_and_answer(reasoning, answer, positions, open):
    text = f"{'' if open else '<think>'}{reasoning}</think>{answer}"
    positions = sorted({position for position in positions if position < len(text)})
    whole = parse(text, open=open)
    assert parse(text, positions, open=open) == whole
    assert parse(text, list(range(1, len(text))), open=open) == whole


def test_the_reasoning_format_is_detected_from_the_template():
    assert detect_reasoning_format("… {{ '<think>' }} …") is THINK
    assert detect_reasoning_format("{{ content.split('</think>') }}") is THINK
    assert detect_reasoning_format("<|start|>assistant<|channel|>analysis<|message|>") is HARMONY_REASONING
    assert detect_reasoning_format("[THINK]").end_tag == "[/THINK]"
    assert detect_reasoning_format("<|im_start|>{{ role }}") is None
    assert detect_reasoning_format(None) is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n",  # Phi
        "<|begin|>user<|content|>{{ messages[0].content }}<|end|><|begin|>assistant",  # Solar-Open
    ],
)
def test_a_template_whose_turns_end_with_end_is_not_harmony(template):
    assert detect_reasoning_format(template) is None


def test_a_prompt_that_ends_inside_reasoning_is_detected():
    assert THINK.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_overlap_with_an_ending_is_found():
    assert find_overlap("abc</thin", "</think>") == 6
    assert find_overlap("abc", "</think>") == 0
    assert find_overlap("</think>", "</think>") == 0


def test_the_option_is_on_off_a_budget_or_an_effort():
    assert parse_reasoning_options(None, THINK, "<think>").budget_tokens is None
    assert parse_reasoning_options(True, THINK, "<think>").chat_template_kwargs == {"enable_thinking": True}
    assert parse_reasoning_options(False, THINK, "<think>").budget_tokens == 0
    assert parse_reasoning_options(64, THINK, "<think>").budget_tokens == 64
    assert parse_reasoning_options("low", THINK, "<think>").budget_tokens == 512
    effort = parse_reasoning_options("low", THINK, "<think> reasoning_effort")
    assert effort.chat_template_kwargs["reasoning_effort"] == "low"
    assert not parse_reasoning_options("none", THINK, "<think>").allowed


@pytest.mark.parametrize("value", ["much", -1, 1.5, [1]])
def test_invalid_reasoning_options_are_rejected(value):
    with pytest.raises(InvalidArgument, match="reasoning"):
        parse_reasoning_options(value, THINK, "<think>")


@pytest.mark.parametrize("value", [True, 100, "high"])
def test_reasoning_is_rejected_without_template_support(value):
    with pytest.raises(UnsupportedOption, match="does not support reasoning"):
        parse_reasoning_options(value, None, "<|im_start|>")
    assert parse_reasoning_options(False, None, "<|im_start|>").budget_tokens == 0  # off is always possible
