"""The parse does not depend on how the output is split into pieces, and text and arguments stream early."""

from __future__ import annotations

import json
from itertools import count, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta, join_parts
from afterglow.chat.tools.detection import TOOL_FAMILIES
from support.tool_outputs import RECORDED_OUTPUTS
from support.tool_outputs_text import gemma_call, gemma_quote, glm_call, xml_call
from support.tool_records import TOOLS, RecordedOutput, tagged_call

MARKERS = sorted({marker for family in TOOL_FAMILIES.values() for marker in (*family.markers, *family.triggers)})
CHARACTERS = ["{", "}", "[", "]", '"', ":", ",", ";", "<", ">", "=", "(", ")", "\n", " ", "\\", "'", "1", "é", "☀"]
PIECES = [
    *MARKERS,
    *CHARACTERS,
    '{"name": "now", "arguments": {}}',
    '"name": "get_weather"',
    "get_weather",
    "city",
    "call:",
]
PIECES += [
    "<function=",
    "<parameter=",
    "</parameter>",
    "</function>",
    "functions.now:0",
    "```",
    "function",
    "true",
    "Paris",
]


def parse(family: str, pieces: list[str]) -> list[OutputPart]:
    numbers = count()
    parser = TOOL_FAMILIES[family].create_parser(TOOLS, new_id=lambda: f"call {next(numbers)}")
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return parts + parser.finish()


def split(text: str, positions: list[int]) -> list[str]:
    return [
        text[start:end]
        for start, end in pairwise([0, *sorted(position % (len(text) + 1) for position in positions), len(text)])
    ]


@pytest.mark.parametrize("recorded", RECORDED_OUTPUTS, ids=str)
def test_parsing_one_character_at_a_time_gives_the_same_output(recorded: RecordedOutput) -> None:
    assert join_parts(parse(recorded.family, list(recorded.raw))) == join_parts(parse(recorded.family, [recorded.raw]))


@given(
    recorded=st.sampled_from(RECORDED_OUTPUTS), positions=st.lists(st.integers(min_value=0, max_value=400), max_size=8)
)
def test_any_split_of_a_recorded_output_parses_the_same(recorded: RecordedOutput, positions: list[int]) -> None:
    expected = join_parts(parse(recorded.family, [recorded.raw]))
    assert join_parts(parse(recorded.family, split(recorded.raw, positions))) == expected


@given(
    family=st.sampled_from(sorted(TOOL_FAMILIES)),
    text=st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    positions=st.lists(st.integers(min_value=0, max_value=400), max_size=6),
)
@example("harmony", "<|message|><|start|><", [3])
def test_any_split_of_random_text_parses_the_same(family: str, text: str, positions: list[int]) -> None:
    assert join_parts(parse(family, list(text))) == join_parts(parse(family, [text]))
    assert join_parts(parse(family, split(text, positions))) == join_parts(parse(family, [text]))


@given(family=st.sampled_from(sorted(TOOL_FAMILIES)), text=st.text(alphabet="ab<>|{}[]()=\"'`:;,_ \n1", max_size=60))
def test_text_without_a_call_is_returned_unchanged(family: str, text: str) -> None:
    output = join_parts(parse(family, list(text)))
    assert not output.tool_calls
    assert output.text == text


WRITERS = {
    "hermes": lambda text: tagged_call(("get_weather", json.dumps({"city": text}))),
    "mistral-named": lambda text: "[TOOL_CALLS]get_weather[ARGS]" + json.dumps({"city": text}, ensure_ascii=False),
    "qwen-coder": lambda text: xml_call("get_weather", city=text),
    "glm": lambda text: glm_call("get_weather", city=text),
    "gemma": lambda text: gemma_call(f"get_weather{{city:{gemma_quote(text)}}}"),
    "pythonic": lambda text: f"[get_weather(city={text!r})]",
    "lfm": lambda text: f"<|tool_call_start|>[get_weather(city={json.dumps(text)})]<|tool_call_end|>",
    "harmony": lambda text: f"<|channel|>commentary to=functions.get_weather<|message|>{json.dumps({'city': text})}",
}
ENDINGS = ("</parameter>", "</arg_value>", '<|"|>')  # a value cannot contain its own ending


@given(family=st.sampled_from(sorted(WRITERS)), text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_survives_as_an_argument(family: str, text: str) -> None:
    assume(not any(ending in text or text.endswith("<") for ending in ENDINGS))
    assume(family != "harmony" or "<|" not in text)  # control tokens end a message
    output = join_parts(parse(family, list(WRITERS[family](text))))
    assert output.text == ""
    assert [json.loads(call.arguments) for call in output.tool_calls] == [{"city": text}]


@pytest.mark.parametrize(("escapes", "text"), [(r"\ud83d\ude00", "😀"), (r"\ud83d", "\ufffd"), (r"a\ude00", "a\ufffd")])
@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("pythonic", "[get_weather(city='{}')]"),
        ("qwen-coder", "<tool_call><function=look><parameter=city>\n['{}']\n</parameter></function></tool_call>"),
        ("glm", "<tool_call>look\n<arg_key>city</arg_key><arg_value>['{}']</arg_value></tool_call>"),
        ("hermes", r'<tool_call>{{"name": "get_weather", "arguments": "{{\"city\": \"{}\"}}"}}</tool_call>'),
        ("hermes", r'<tool_call>{{"arguments": "{{\"city\": \"{}\"}}", "name": "get_weather"}}</tool_call>'),
        ("hermes", r'<tool_call>{{"name": "{}", "arguments": {{"city": "Paris"}}}}</tool_call>'),
        ("apertus", r'<|tools_prefix|>[{{"{}": {{"city": "Paris"}}}}]<|tools_suffix|>'),
    ],
)
def test_a_call_with_escaped_surrogates_can_be_encoded(family: str, raw: str, escapes: str, text: str) -> None:
    for pieces in ([raw.format(escapes)], list(raw.format(escapes))):
        (call,) = join_parts(parse(family, pieces)).tool_calls
        assert text in call.name + call.arguments
        assert (call.name + call.arguments).encode()


@pytest.mark.parametrize(
    "recorded", [recorded for recorded in RECORDED_OUTPUTS if recorded.calls and not recorded.text], ids=str
)
def test_a_call_never_leaks_into_the_text(recorded: RecordedOutput) -> None:
    for positions in ([], range(len(recorded.raw))):
        text_parts = [
            part for part in parse(recorded.family, split(recorded.raw, list(positions))) if isinstance(part, TextDelta)
        ]
        assert text_parts == []


@pytest.mark.parametrize("recorded", [recorded for recorded in RECORDED_OUTPUTS if recorded.calls], ids=str)
def test_the_beginning_of_a_marker_after_a_call_is_not_text(recorded: RecordedOutput) -> None:
    for end in range(len(recorded.raw)):
        parser = TOOL_FAMILIES[recorded.family].create_parser(TOOLS)
        output = join_parts(parser.feed(recorded.raw[:end]) + parser.finish(truncated=True))
        assert not output.tool_calls or recorded.text.startswith(output.text), recorded.raw[:end]


def test_text_that_may_be_a_marker_is_kept_if_the_model_ends_there_or_wrote_text_before() -> None:
    call = tagged_call(("now", "{}"))
    for raw, is_truncated, text in ((f"{call} <", False, "<"), (f"{call} 1 <", True, "1 <"), ("1 <", True, "1 <")):
        parser = TOOL_FAMILIES["hermes"].create_parser(TOOLS)
        assert join_parts(parser.feed(raw) + parser.finish(truncated=is_truncated)).text == text


@pytest.mark.parametrize("recorded", [recorded for recorded in RECORDED_OUTPUTS if recorded.calls], ids=str)
def test_only_the_first_part_of_a_call_has_its_id_and_name(recorded: RecordedOutput) -> None:
    seen: set[int] = set()
    for part in parse(recorded.family, list(recorded.raw)):
        assert isinstance(part, TextDelta | ReasoningDelta | ToolCallDelta)
        if isinstance(part, ToolCallDelta):
            assert (part.id is not None) == (part.name is not None) == (part.index not in seen)
            seen.add(part.index)
    assert sorted(seen) == list(range(len(recorded.calls)))


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "' + "x" * 50 + '"}}</tool_call>'),
        (
            "qwen-coder",
            "<tool_call><function=get_weather><parameter=city>" + "x" * 50 + "</parameter></function></tool_call>",
        ),
        ("harmony", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "' + "x" * 50 + '"}'),
        ("gemma", '<|tool_call>call:get_weather{city:<|"|>' + "x" * 50 + '<|"|>}<tool_call|>'),
    ],
)
def test_long_arguments_stream_as_they_are_generated(family: str, raw: str) -> None:
    parts = parse(family, list(raw))
    assert sum(isinstance(part, ToolCallDelta) for part in parts) >= 50


def test_text_streams_immediately_and_a_partial_marker_is_held_back() -> None:
    parser = TOOL_FAMILIES["hermes"].create_parser(TOOLS)
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" <tool_c") == []
    assert parser.feed("ase") == [TextDelta(" <tool_case")]


MENTIONS = [
    "To define one, write `<function=name>` and then the body.\n\nParagraph two.",
    "The tag <function=now>. Next paragraph.",
    "The tag <function=now>",
    "<function=dance>\n<parameter=kind>\nwaltz\n</parameter>\n</function>",
]


@pytest.mark.parametrize("text", MENTIONS)
def test_a_function_tag_without_the_opening_and_an_offered_call_is_text(text: str) -> None:
    for size in range(1, len(text) + 1):
        output = join_parts(parse("qwen-coder", [text[i : i + size] for i in range(0, len(text), size)]))
        assert (output.text, output.tool_calls) == (text, ())


def test_a_call_without_the_opening_follows_a_mention_of_its_tag() -> None:
    text = "I write <function=now>:\n<function=now>\n</function>\n</tool_call>"
    for size in range(1, len(text) + 1):
        output = join_parts(parse("qwen-coder", [text[i : i + size] for i in range(0, len(text), size)]))
        assert output.text == "I write <function=now>:"
        assert [(call.name, call.arguments) for call in output.tool_calls] == [("now", "{}")]


def test_a_json_answer_streams() -> None:
    parser = TOOL_FAMILIES["llama"].create_parser(TOOLS)
    assert parser.feed('{"na') == []
    assert parser.feed('mes": [') == [TextDelta('{"names": [')]
    assert parser.feed("1, 2") == [TextDelta("1, 2")]
