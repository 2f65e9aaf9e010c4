"""However an answer's bytes are cut into tokens, its parts add up to the same turn; and stops hold in all of them."""

from __future__ import annotations

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

THINK = next(style for style in REASONING_FORMATS if style.start_tag == "<think>")
TOOLS = parse_tools([{"type": "function", "function": {"name": "paint"}}])
CALL = '<tool_call>\n{"name": "paint", "arguments": {"color": "grün", "at": [1, {"x": "é"}]}}\n</tool_call>'


def read(pieces: list[bytes], stops: list[str]) -> tuple[ParsedOutput, str | None]:
    """As `TurnStream` does, with the engine's matcher before it."""
    matcher = StopMatcher([stop.encode() for stop in stops])
    detokenizer = Detokenizer(stops)
    reader = ReasoningParser(TOOL_FAMILIES["hermes"].create_parser(TOOLS, lambda: "id"), THINK)
    parts, fired = [], None
    for piece in pieces:
        parts += reader.feed(detokenizer.feed(piece))
        if (found := matcher.feed(piece)) is not None:
            fired = found.decode()
            break
    parts += reader.feed(detokenizer.finish(fired)) + reader.finish()
    return join_parts(parts), fired


def cut(data: bytes, places: list[int]) -> list[bytes]:
    places = sorted({place for place in places if 0 < place < len(data)})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@settings(max_examples=200)
@given(
    st.sampled_from(["", "<think>\nHm, <b>é\n</think>\n\n", "<think>"]),
    st.sampled_from(["", "Guten Tag. 🙂 ", "a < b"]),
    st.sampled_from(["", CALL, CALL + "\n" + CALL, CALL[:40]]),
    st.sampled_from(["", " Fertig."]),
    st.lists(st.integers(0, 300), max_size=20),
    st.sampled_from([[], ["Tag", "g."], ["🙂"], ["zzz"]]),
)
def test_any_cutting_gives_the_same_turn(thought, said, calls, end, places, stops):
    data = (thought + said + calls + end).encode()
    # Stops end an answer at a piece's end, and what follows in the piece is cut off: the turn is the same.
    assert read(cut(data, places), stops) == read(cut(data, list(range(len(data)))), stops)


@pytest.mark.parametrize("stop", [[""], ["ok", ""], [3], "END", [None], ["\ud800"], [b"END"]])
def test_stops_that_cannot_be_are_refused(stop):
    with (
        afterglow.load(models.get_path("attention"), context=128) as model,
        pytest.raises(InvalidArgument, match="`stop`"),
    ):
        model.complete("Hello", stop=stop)


def test_a_stop_inside_a_character_of_several_bytes_never_fires():
    answer, fired = read([b"caf\xc3", b"\xa9 \xc3", b"\xa8"], ["Ã"])
    assert (answer.text, fired) == ("café è", None)


def test_a_stop_of_several_bytes_is_found_across_tokens():
    answer, fired = read([b"caf\xc3", b"\xa9 au lait"], ["é"])
    assert (answer.text, fired) == ("caf", "é")


def test_of_overlapping_stops_the_one_that_ends_first_fires():
    answer, fired = read([b"one tw", b"o three"], ["two three", "wo"])
    assert (answer.text, fired) == ("one t", "wo")
