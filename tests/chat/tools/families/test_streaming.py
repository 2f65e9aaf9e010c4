"""Can a user ever see how an answer was cut into pieces?"""

from __future__ import annotations

import json
from itertools import count, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta, join_parts
from afterglow.chat.tools import TOOL_FAMILIES
from support.tool_outputs import RECORDED, TOOLS, Recorded, gemma, glm, quotes, tag, xml

MARKERS = sorted({marker for family in TOOL_FAMILIES.values() for marker in (*family.markers, *family.triggers)})
WORDS = ["{", "}", "[", "]", '"', ":", ",", ";", "<", ">", "=", "(", ")", "\n", " ", "\\", "'", "1", "é", "☀"]
PIECES = [*MARKERS, *WORDS, '{"name": "now", "arguments": {}}', '"name": "get_weather"', "get_weather", "city", "call:"]
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


def read(family: str, pieces: list[str]) -> list[OutputPart]:
    numbers = count()
    reader = TOOL_FAMILIES[family].create_parser(TOOLS, new_id=lambda: f"call {next(numbers)}")
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += reader.feed(piece)
    return parts + reader.finish()


def cut(text: str, places: list[int]) -> list[str]:
    return [
        text[start:end] for start, end in pairwise([0, *sorted(place % (len(text) + 1) for place in places), len(text)])
    ]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_one_character_at_a_time_reads_the_same(recorded: Recorded) -> None:
    assert join_parts(read(recorded.family, list(recorded.raw))) == join_parts(read(recorded.family, [recorded.raw]))


@given(recorded=st.sampled_from(RECORDED), places=st.lists(st.integers(min_value=0, max_value=400), max_size=8))
def test_however_an_answer_is_cut_it_reads_the_same(recorded: Recorded, places: list[int]) -> None:
    whole = join_parts(read(recorded.family, [recorded.raw]))
    assert join_parts(read(recorded.family, cut(recorded.raw, places))) == whole


@given(
    family=st.sampled_from(sorted(TOOL_FAMILIES)),
    text=st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    places=st.lists(st.integers(min_value=0, max_value=400), max_size=6),
)
@example("harmony", "<|message|><|start|><", [3])
def test_however_nonsense_is_cut_it_reads_the_same(family: str, text: str, places: list[int]) -> None:
    assert join_parts(read(family, list(text))) == join_parts(read(family, [text]))
    assert join_parts(read(family, cut(text, places))) == join_parts(read(family, [text]))


@given(family=st.sampled_from(sorted(TOOL_FAMILIES)), text=st.text(alphabet="ab<>|{}[]()=\"'`:;,_ \n1", max_size=60))
def test_what_is_no_call_is_given_back_exactly(family: str, text: str) -> None:
    answer = join_parts(read(family, list(text)))
    assert not answer.tool_calls
    assert answer.text == text


WRITERS = {
    "hermes": lambda text: tag(("get_weather", json.dumps({"city": text}))),
    "mistral-named": lambda text: "[TOOL_CALLS]get_weather[ARGS]" + json.dumps({"city": text}, ensure_ascii=False),
    "qwen-coder": lambda text: xml("get_weather", city=text),
    "glm": lambda text: glm("get_weather", city=text),
    "gemma": lambda text: gemma(f"get_weather{{city:{quotes(text)}}}"),
    "pythonic": lambda text: f"[get_weather(city={text!r})]",
    "lfm": lambda text: f"<|tool_call_start|>[get_weather(city={json.dumps(text)})]<|tool_call_end|>",
    "harmony": lambda text: f"<|channel|>commentary to=functions.get_weather<|message|>{json.dumps({'city': text})}",
}
ENDINGS = ("</parameter>", "</arg_value>", '<|"|>')  # no text can hold what ends it


@given(family=st.sampled_from(sorted(WRITERS)), text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_comes_through_as_an_argument(family: str, text: str) -> None:
    assume(not any(ending in text or text.endswith("<") for ending in ENDINGS))
    assume(family != "harmony" or "<|" not in text)  # control tokens, which end a message
    answer = join_parts(read(family, list(WRITERS[family](text))))
    assert answer.text == ""
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"city": text}]


@pytest.mark.parametrize("recorded", [one for one in RECORDED if one.calls and not one.text], ids=str)
def test_nothing_of_a_call_ever_shows_as_text(recorded: Recorded) -> None:
    for places in ([], range(len(recorded.raw))):
        shown = [part for part in read(recorded.family, cut(recorded.raw, list(places))) if isinstance(part, TextDelta)]
        assert shown == []


@pytest.mark.parametrize("recorded", [one for one in RECORDED if one.calls], ids=str)
def test_only_the_first_part_of_a_call_has_its_id_and_name(recorded: Recorded) -> None:
    seen: set[int] = set()
    for part in read(recorded.family, list(recorded.raw)):
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
def test_long_arguments_stream_while_they_are_written(family: str, raw: str) -> None:
    parts = read(family, list(raw))
    assert sum(isinstance(part, ToolCallDelta) for part in parts) >= 50


def test_text_streams_at_once_and_a_marker_is_held_back() -> None:
    reader = TOOL_FAMILIES["hermes"].create_parser(TOOLS)
    assert reader.feed("Hello") == [TextDelta("Hello")]
    assert reader.feed(" <tool_c") == []
    assert reader.feed("ase") == [TextDelta(" <tool_case")]


def test_json_that_is_the_answer_streams_too() -> None:
    reader = TOOL_FAMILIES["llama"].create_parser(TOOLS)
    assert reader.feed('{"na') == []
    assert reader.feed('mes": [') == [TextDelta('{"names": [')]
    assert reader.feed("1, 2") == [TextDelta("1, 2")]
