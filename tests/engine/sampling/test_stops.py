"""Stop sequences are matched across pieces, as soon as their last byte arrives."""

from __future__ import annotations

import pytest

from afterglow.engine.sampling.stops import StopMatcher


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
