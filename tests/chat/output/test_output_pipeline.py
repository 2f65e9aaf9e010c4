"""Output pipeline: stop strings, detokenizer, reasoning parser and tool parser give the same response for any split."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import afterglow
from afterglow.chat.output.detokenizer import Detokenizer
from afterglow.chat.output.parts import ParsedOutput, join_parts
from afterglow.chat.output.reasoning import REASONING_FORMATS, ReasoningParser
from afterglow.chat.tools.detection import TOOL_FAMILIES
from afterglow.chat.tools.tool import parse_tools
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.errors import InvalidArgument
from afterglow.testing import models
from afterglow.testing.script import script_answers

THINK = next(format for format in REASONING_FORMATS if format.start_tag == "<think>")
TOOLS = parse_tools([{"type": "function", "function": {"name": "paint"}}])
CALL = '<tool_call>\n{"name": "paint", "arguments": {"color": "grün", "at": [1, {"x": "é"}]}}\n</tool_call>'


def parse(pieces: list[bytes], stops: list[str]) -> tuple[ParsedOutput, str | None]:
    """Parse as `ChatStream` does, after the engine's stop matcher."""
    matcher = StopMatcher([stop.encode() for stop in stops])
    detokenizer = Detokenizer(stops)
    parser = ReasoningParser(lambda: TOOL_FAMILIES["hermes"].create_parser(TOOLS, lambda: "id"), THINK)
    parts, matched = [], None
    for piece in pieces:
        parts += parser.feed(detokenizer.feed(piece))
        if (stop := matcher.feed(piece)) is not None:
            matched = stop.decode()
            break
    parts += parser.feed(detokenizer.finish(matched)) + parser.finish()
    return join_parts(parts), matched


def split(data: bytes, positions: list[int]) -> list[bytes]:
    positions = sorted({position for position in positions if 0 < position < len(data)})
    return [data[a:b] for a, b in zip([0, *positions], [*positions, len(data)], strict=True)]


@settings(max_examples=200)
@given(
    st.sampled_from(["", "<think>\nHm, <b>é\n</think>\n\n", "<think>"]),
    st.sampled_from(["", "Guten Tag. 🙂 ", "a < b"]),
    st.sampled_from(["", CALL, CALL + "\n" + CALL, CALL[:40]]),
    st.sampled_from(["", " Fertig."]),
    st.lists(st.integers(0, 300), max_size=20),
    st.sampled_from([[], ["Tag", "g."], ["🙂"], ["zzz"]]),
)
def test_any_split_gives_the_same_response(reasoning, text, calls, end, positions, stops):
    data = (reasoning + text + calls + end).encode()
    # A stop ends generation at the end of a piece; the text after it in that piece is dropped.
    assert parse(split(data, positions), stops) == parse(split(data, list(range(len(data)))), stops)


@pytest.mark.native
@pytest.mark.parametrize("stop", [[""], ["ok", ""], [3], "END", [None], ["\ud800"], [b"END"]])
def test_invalid_stops_are_rejected(stop):
    with (
        afterglow.load(models.get_path("attention"), context=128) as model,
        pytest.raises(InvalidArgument, match="`stop`"),
    ):
        model.complete("Hello", stop=stop)


def test_a_stop_never_matches_inside_a_multibyte_character():
    output, matched = parse([b"caf\xc3", b"\xa9 \xc3", b"\xa8"], ["Ã"])
    assert (output.text, matched) == ("café è", None)


def test_a_multibyte_stop_matches_across_tokens():
    output, matched = parse([b"caf\xc3", b"\xa9 au lait"], ["é"])
    assert (output.text, matched) == ("caf", "é")


def test_of_overlapping_stops_the_one_that_ends_first_matches():
    output, matched = parse([b"one tw", b"o three"], ["two three", "wo"])
    assert (output.text, matched) == ("one t", "wo")


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


@pytest.mark.native
@pytest.mark.parametrize(
    ("response_format", "answer", "stop", "text", "parsed"),
    [
        (list[int], "[1, 2]", [], "[1, 2]", [1, 2]),
        (list[int], "[1, 2]", [", 2"], "[1", None),
        (int, "10", ["0"], "1", None),  # the text before the stop is another value
        ({"type": "json_object"}, '{"a": 2}', [": 2"], '{"a"', None),
        (Even, '{"number": 2}', [], '{"number": 2}', Even(number=2)),
        (Even, '{"number": 3}', [], '{"number": 3}', None),
        (list[ipaddress.IPv4Network], '["x"]', [], '["x"]', None),
    ],
)
def test_a_text_that_is_no_value_of_the_response_format_is_not_parsed(
    response_format: Any, answer: str, stop: list[str], text: str, parsed: Any
):
    with afterglow.load(models.get_path("attention"), context=256) as model, script_answers(model, [answer, answer]):
        response = model.chat("Hello", response_format=response_format, stop=stop)
        stream = model.chat("Hello", response_format=response_format, stop=stop, stream=True)
        assert "".join(part.text for part in stream) == text
    for result in (response, stream.response):
        assert (result.text, result.finish_reason, result.parsed) == (text, "stop", parsed)


@pytest.mark.native
def test_the_response_is_available_after_a_validator_failed():
    def fail(value: int) -> int:
        raise KeyError(value)

    hint = Annotated[int, pydantic.AfterValidator(fail)]
    with afterglow.load(models.get_path("attention"), context=256) as model, script_answers(model, ["5"]):
        stream = model.chat("Hello", response_format=hint, stream=True)
        with pytest.raises(KeyError):
            stream.result()
    assert (stream.response.text, stream.response.parsed) == ("5", None)
