"""Thoughts are a channel of their own, in every style, however the text is cut into tokens."""

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

THINK = next(style for style in REASONING_FORMATS if style.start_tag == "<think>")
tagged = pytest.mark.parametrize(
    "style", [style for style in REASONING_FORMATS if style is not HARMONY_REASONING], ids=lambda s: s.start_tag
)


def read(text: str, cuts: list[int] | None = None, *, style=THINK, open: bool = False):
    reader = ReasoningParser(PlainTextParser(), style, starts_in_reasoning=open)
    pieces = [text[a:b] for a, b in zip([0, *(cuts or [])], [*(cuts or []), len(text)], strict=True)]
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return join_parts(parts + reader.finish())


@tagged
def test_a_thought_before_the_answer_is_told_apart(style):
    answer = read(f"{style.start_tag}\nLet me see.\n{style.closes}\n\nYes.", style=style)
    assert (answer.reasoning, answer.text) == ("Let me see.", "Yes.")


@tagged
def test_a_thought_that_the_prompt_opened_needs_no_opening(style):
    answer = read(f"Let me see.\n{style.closes}Yes.", style=style, open=True)
    assert (answer.reasoning, answer.text) == ("Let me see.", "Yes.")


def test_an_answer_without_a_thought_is_all_text():
    assert read("Yes, <think> is a tag.").text == "Yes, <think> is a tag."
    assert read("  <thi").text == "  <thi"
    assert read("").text == ""


def test_a_thought_that_never_ends_is_a_thought():
    answer = read("<think>On and on </thi")
    assert (answer.reasoning, answer.text) == ("On and on </thi", "")


def test_an_empty_thought_is_none():
    answer = read("<think>\n\n</think>\n\nYes.")
    assert (answer.reasoning, answer.text) == ("", "Yes.")


def test_thoughts_come_as_they_are_made():
    reader = ReasoningParser(PlainTextParser(), THINK, starts_in_reasoning=True)
    assert reader.feed("Hm,") == [ReasoningDelta("Hm,")]
    assert reader.feed(" so </") == [ReasoningDelta(" so")]
    assert reader.feed("b> it is </think> Y") == [ReasoningDelta(" </b> it is"), TextDelta("Y")]


@given(
    st.text(alphabet="<>/think \nab", max_size=30),
    st.text(alphabet="<>/think \nab", max_size=30),
    st.lists(st.integers(0, 80), max_size=12),
    st.booleans(),
)
def test_any_cutting_gives_the_same_thought_and_answer(thought, said, cuts, open):
    text = f"{'' if open else '<think>'}{thought}</think>{said}"
    cuts = sorted({cut for cut in cuts if cut < len(text)})
    whole = read(text, open=open)
    assert read(text, cuts, open=open) == whole
    assert read(text, list(range(1, len(text))), open=open) == whole


def test_the_style_is_told_from_the_template():
    assert detect_reasoning_format("… {{ '<think>' }} …") is THINK
    assert detect_reasoning_format("{{ content.split('</think>') }}") is THINK
    assert detect_reasoning_format("<|start|>assistant<|channel|>analysis<|message|>") is HARMONY_REASONING
    assert detect_reasoning_format("[THINK]").end_tag == "[/THINK]"
    assert detect_reasoning_format("<|im_start|>{{ role }}") is None
    assert detect_reasoning_format(None) is None


def test_a_prompt_that_ends_inside_a_thought_is_noticed():
    assert THINK.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_what_may_be_the_beginning_of_a_text_is_measured():
    assert find_overlap("abc</thin", "</think>") == 6
    assert find_overlap("abc", "</think>") == 0
    assert find_overlap("</think>", "</think>") == 0


def test_reasoning_is_on_off_a_budget_or_an_effort():
    assert parse_reasoning_options(None, THINK, "<think>").budget_tokens is None
    assert parse_reasoning_options(True, THINK, "<think>").chat_template_kwargs == {"enable_thinking": True}
    assert parse_reasoning_options(False, THINK, "<think>").budget_tokens == 0
    assert parse_reasoning_options(64, THINK, "<think>").budget_tokens == 64
    assert parse_reasoning_options("low", THINK, "<think>").budget_tokens == 512
    assert (
        parse_reasoning_options("low", THINK, "<think> reasoning_effort").chat_template_kwargs["reasoning_effort"]
        == "low"
    )
    assert not parse_reasoning_options("none", THINK, "<think>").allowed


@pytest.mark.parametrize("value", ["much", -1, 1.5, [1]])
def test_other_reasoning_is_refused(value):
    with pytest.raises(InvalidArgument, match="reasoning"):
        parse_reasoning_options(value, THINK, "<think>")


@pytest.mark.parametrize("value", [True, 100, "high"])
def test_thoughts_are_refused_where_the_model_has_none(value):
    with pytest.raises(UnsupportedOption, match="knows no thoughts"):
        parse_reasoning_options(value, None, "<|im_start|>")
    assert parse_reasoning_options(False, None, "<|im_start|>").budget_tokens == 0  # that much can be promised
