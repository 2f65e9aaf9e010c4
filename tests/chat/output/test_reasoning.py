"""Reasoning parser and reasoning options: every format, any split of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.chat.constraints.reasoning_options import parse_reasoning_options
from afterglow.chat.output.parts import ParsedOutput, PlainTextParser, ReasoningDelta, TextDelta, join_parts
from afterglow.chat.output.reasoning import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    ReasoningParser,
    detect_reasoning_format,
    find_overlap,
)
from afterglow.chat.tools.families.hermes import HERMES
from afterglow.chat.tools.families.xml import QWEN_CODER
from afterglow.chat.tools.tool import parse_tools
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


# --- formats with tags around the text, or with reasoning between texts

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TOOLS = parse_tools([{"type": "function", "function": {"name": "now"}}])


def parse_calls(template: str, text: str, *, open: bool = False):
    """Parse as one text and character by character; both must give the same output."""
    format = detect_reasoning_format(template)
    outputs = []
    for pieces in ([text], list(text)):
        parser = ReasoningParser(
            lambda: HERMES.create_parser(TOOLS, lambda: "id"),
            format,
            starts_in="reasoning" if open else "turn",
            call_starts=HERMES.triggers,
        )
        outputs.append(join_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish()))
    assert outputs[0] == outputs[1]
    return outputs[0].reasoning, outputs[0].text, len(outputs[0].tool_calls)


GEMMA = "<|channel>thought\n<channel|>"
COHERE = "<|START_THINKING|><|START_RESPONSE|>"
KIMI_K3 = "<|open|><|close|><|sep|><|end_of_msg|>"


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (GEMMA, "<|channel>thought\nHm.\n<channel|>Yes", ("Hm.", "Yes", 0)),
        (GEMMA, "<|channel>thought<channel|>Yes<channel|>", ("", "Yes", 0)),
        (GEMMA, "<|channel><|channel>thought\n<channel|>Yes<|channel>thought\n<channel|><channel|>", ("", "Yes", 0)),
        (GEMMA, f"<|channel>thought\nHm.<channel|>{CALL}<|channel>thought\nSo.<channel|>Yes", ("Hm.\n\nSo.", "Yes", 1)),
        (COHERE, "<|START_RESPONSE|>Yes<|END_RESPONSE|>", ("", "Yes", 0)),
        (COHERE, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", ("Hm.", "Yes", 0)),
        ("<|START_THINKING|><|START_TEXT|>", "<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", ("", "Yes", 0)),
        ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes", ("Hm.", "Yes", 0)),
        ("<|think|><|content|>", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes", ("Hm.", "Yes", 0)),
        ("<|think|><|content|>", "<|content|>Yes", ("", "Yes", 0)),
        (KIMI_K3, "<|open|>response<|sep|>Yes<|close|>response<|sep|><|close|>message<|sep|>", ("", "Yes", 0)),
        ("<mm:think>", "</mm:think>Yes", ("", "Yes", 0)),
        ("<mm:think>", f"<mm:think>Hm.</mm:think>{CALL}", ("Hm.", "", 1)),
    ],
)
def test_tags_are_part_of_neither_reasoning_nor_text(template, text, expected):
    assert parse_calls(template, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, ("", "", 1)),
        (f"Hm.\n\n{CALL}", ("Hm.", "", 1)),
        (f"Hm. {CALL}\n{CALL}", ("Hm.", "", 2)),
        (f"Hm. {CALL[:30]}", ("Hm.", "", 1)),  # truncated
        (f"I use <tool_call> tags. {CALL}", ("I use <tool_call> tags.", "", 1)),
        (f"First {CALL} or not?", (f"First {CALL} or not?", "", 0)),  # a draft
        (f"First {CALL} or rather {CALL}\n", (f"First {CALL} or rather", "", 1)),
        (f"I could write {CALL}.</think>Yes", (f"I could write {CALL}.", "Yes", 0)),  # reasoning that was closed
        ("I use <tool_call> tags", ("I use <tool_call> tags", "", 0)),
        ("I use <tool_call", ("I use <tool_call", "", 0)),
        (f"Hm.</think>{CALL}", ("Hm.", "", 1)),
    ],
)
def test_a_call_inside_reasoning_that_is_never_closed_is_a_call(text, expected):
    """Qwen 3.5 and Kimi call at once if the template opened the reasoning."""
    assert parse_calls("<think>", text, open=True) == expected
    assert parse_calls("<think>", f"<think>{text}") == expected


def test_a_call_inside_truncated_reasoning_is_reasoning():
    parser = ReasoningParser(
        lambda: HERMES.create_parser(TOOLS), THINK, starts_in="reasoning", call_starts=HERMES.triggers
    )
    parts = parser.feed(f"Hm. {CALL}") + parser.finish(truncated=True)
    assert join_parts(parts) == ParsedOutput("", f"Hm. {CALL}", ())


@pytest.mark.parametrize(
    "text", ["I should use the <function=name> notation. Then I answer 42.", "I write <function=now> or <function=now>"]
)
def test_a_mention_of_a_function_tag_in_unclosed_reasoning_is_reasoning(text):
    for pieces in ([text], list(text)):
        parser = ReasoningParser(
            lambda: QWEN_CODER.create_parser(TOOLS),
            THINK,
            starts_in="reasoning",
            call_starts=(*QWEN_CODER.triggers, *QWEN_CODER.other_starts),
        )
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        assert join_parts(parts) == ParsedOutput("", text, ())


def test_the_beginning_of_a_marker_after_a_call_is_not_text():
    parser = ReasoningParser(lambda: HERMES.create_parser(TOOLS), THINK, call_starts=HERMES.triggers)
    output = join_parts(parser.feed(f"<think>Hm.</think>{CALL[:-3]}") + parser.finish(truncated=True))
    assert (output.reasoning, output.text, len(output.tool_calls)) == ("Hm.", "", 1)


def test_reasoning_streams_after_a_mention_of_the_call_tag():
    parser = ReasoningParser(
        lambda: HERMES.create_parser(TOOLS), THINK, starts_in="reasoning", call_starts=HERMES.triggers
    )
    assert parser.feed("A <tool_call> is") == [ReasoningDelta("A <tool_call> is")]


@pytest.mark.parametrize(
    ("template", "prompt", "reasoning", "text", "expected"),
    [
        ("<think>", "assistant\n", None, "Yes", "Yes"),
        ("<think>", "assistant\n", "Hm", "Yes", "<think>Hm\n</think>\n\nYes"),
        ("<think>", "assistant\n<think>\n", None, "Yes", "\n</think>\n\nYes"),
        ("<think>", "assistant\n<think>\n", "Hm", None, "Hm"),
        ("'<think>\\n' + reasoning", "assistant\n", "Hm", None, "<think>\nHm"),
        ("'<think>\\n' + reasoning", "assistant\n<think>", "Hm", None, "\nHm"),
        ("'<think>\\n' + reasoning", "assistant\n<think>\n", "Hm", None, "Hm"),
        ("'<think>\\n' + reasoning", "assistant\n<think>", None, "Yes", "\n</think>\n\nYes"),
        ("'<think>\\n' + reasoning", "assistant\n", "", "", "<think>\n\n</think>\n\n"),
        ("'<think>\\n' + reasoning", "assistant\n", "", "Yes", "<think>\n\n</think>\n\nYes"),
        ("'<think>\\n' + reasoning", "assistant\n<think>\n", "", "", "\n</think>\n\n"),
        ("'<think>\\n' + reasoning", "assistant\n<think>\n\n</think>\n\n", "", "Yes", "Yes"),
        ("'<think>\\n' + reasoning", "assistant\n", "", None, "<think>\n"),
        ("<|channel>thought", "<|turn>model\n", "Hm", "Yes", "<|channel>thought\nHm\n<channel|>Yes"),
        ("[BEGIN FINAL RESPONSE]", "<|assistant|>\n", "Hm", None, "Here are my reasoning steps:\nHm"),
        (
            "<|channel|><|message|>",
            "<|start|>assistant",
            "Hm",
            "Yes",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        ),
        ("<|channel|><|message|>", "<|start|>assistant", None, "Yes", "<|channel|>final<|message|>Yes"),
        (COHERE, "<|CHATBOT_TOKEN|>", None, "Yes", "<|START_RESPONSE|>Yes"),
        (COHERE, "<|START_THINKING|>", None, "Yes", "<|END_THINKING|><|START_RESPONSE|>Yes"),
        (KIMI_K3, "<|open|>response<|sep|>", None, "Yes", "Yes"),
    ],
)
def test_an_answer_is_continued_with_the_tags_of_its_format(template, prompt, reasoning, text, expected):
    assert detect_reasoning_format(template).write_continuation(prompt, reasoning, text) == expected
