"""Stop sequences are matched across pieces, as soon as their last byte arrives."""

from __future__ import annotations

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.sampling.stops import IndentMatcher, StopMatcher
from afterglow.errors import InvalidArgument
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support.play import ask, prompt, request


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        ([b"the e", b"nd"], [b"end"], b"end"),
        ([b"e", b"n", b"d"], [b"end"], b"end"),
        ([b"ending"], [b"end", b"ending"], b"end"),
        ([b"abab", b"ac"], [b"abac"], b"abac"),
        ([b"nothing", b"here"], [b"end"], None),
        (["é".encode()[:1], "é".encode()[1:]], ["é".encode()], "é".encode()),
    ],
)
def test_a_stop_matches_as_soon_as_its_last_byte_arrives(pieces, stops, expected):
    matcher = StopMatcher(stops)
    results = [matcher.feed(piece) for piece in pieces]
    assert results[:-1] == [None] * (len(pieces) - 1)
    assert results[-1] == expected


def test_the_end_of_a_match_inside_its_piece_is_reported():
    matcher = StopMatcher([b"END"])
    assert matcher.feed(b"the E") is None
    assert matcher.feed(b"ND of it") == b"END"
    assert matcher.match_end == 2


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("x\n    y\n    z", None),
        ("x\n    y\n  z", 10),
        ("x\n\t\t\t\ty\nz", 8),
        ("x\n    y\n\n", 8),  # an empty line
        ("x\n    y\n  ", None),  # more spaces may come
    ],
)
def test_a_line_with_less_indentation_is_found_in_pieces_of_any_size(text: str, offset: int | None) -> None:
    for size in range(1, len(text) + 1):
        matcher, pieces = IndentMatcher(4), [text[start : start + size] for start in range(0, len(text), size)]
        found = [matcher.feed(piece.encode()) for piece in pieces]
        assert next((end for end in found if end is not None), None) == offset


@pytest.fixture
def lines() -> tuple[Engine, list[int]]:
    """An engine on which the fifth token of a prompt is a line end, and the tokens up to the one after it."""
    plain = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=30).tokens
    backend, newline = FakeBackend(), plain[4]
    backend.token_to_piece = lambda token: b"\n" if token == newline else b"a"  # type: ignore[method-assign]
    return Engine(backend), plain[: plain.index(newline) + 2]


def test_a_line_with_less_indentation_ends_generation(lines: tuple[Engine, list[int]]) -> None:
    engine, expected = lines
    answer = ask(engine, prompt(9), ignore_eos=True, max_tokens=30, min_indent=1)
    assert (answer.tokens, answer.reason) == (expected, "length")


def test_after_the_line_deadline_the_next_line_end_ends_generation(lines: tuple[Engine, list[int]]) -> None:
    engine, expected = lines
    answer = ask(engine, prompt(9), ignore_eos=True, max_tokens=30, line_deadline=0.0)
    assert (answer.tokens, answer.reason) == (expected[:-1], "deadline")
    assert len(ask(engine, prompt(9), ignore_eos=True, max_tokens=30, line_deadline=1000.0).tokens) == 30


@pytest.mark.parametrize("options", [{"min_tokens": 3}, {"grammar": 'root ::= "a"'}])
def test_the_infill_sampler_is_refused_where_the_text_must_not_end(options: dict[str, object]) -> None:
    """It may choose an end token that is no candidate."""
    sampling = Sampling(samplers=("top_k", "infill"), grammar=str(options.pop("grammar", "")))
    with pytest.raises(InvalidArgument, match="infill"):
        Engine(FakeBackend()).submit(request("one", prompt(9), sampling=sampling, **options))
