"""Text as it streams: no half characters, and nothing of a stop text ever shows (C20)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.chat.output.detokenizer import Detokenizer


def stream(pieces: list[bytes], stops: tuple[str, ...] = (), stop: str | None = None) -> list[str]:
    detokenizer = Detokenizer(stops)
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish(stop)]


def test_c20_half_a_character_is_held_back():
    assert stream(["é".encode()[:1], "é".encode()[1:]]) == ["", "é", ""]


def test_c20_a_character_that_never_comes_whole_is_shown_as_broken():
    assert "".join(stream(["é".encode()[:1]])) == "\ufffd"


def test_c20_what_may_become_a_stop_is_held_back_until_it_is_certain():
    assert stream([b"the E", b"N", b"gland"], ("END",)) == ["the ", "", "ENgland", ""]


def test_c20_a_stop_and_what_follows_it_never_show():
    assert "".join(stream([b"fine E", b"ND and more"], ("END",), stop="END")) == "fine "


@pytest.mark.parametrize("stops", [("aab",), ("ab", "aab"), ("baa", "aaa")])
def test_c20_overlapping_stops_are_held_back_too(stops):
    assert "".join(stream([b"a", b"a", b"c"], stops)) == "aac"


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=8))
def test_c20_any_cutting_gives_the_same_text(text, cuts):
    data = text.encode("utf-8", "replace")
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    assert "".join(stream(pieces, ("stop", "<|end|>"))) == data.decode()
