"""Streaming detokenizer: no partial characters, and no part of a stop text (C20)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.chat.output.detokenizer import Detokenizer


def stream(pieces: list[bytes], stops: tuple[str, ...] = (), stop: str | None = None) -> list[str]:
    detokenizer = Detokenizer(stops)
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish(stop)]


def test_c20_a_partial_character_is_held_back():
    assert stream(["é".encode()[:1], "é".encode()[1:]]) == ["", "é", ""]


def test_c20_an_incomplete_character_at_the_end_is_replaced():
    assert "".join(stream(["é".encode()[:1]])) == "\ufffd"


def test_c20_a_possible_stop_prefix_is_held_back():
    assert stream([b"the E", b"N", b"gland"], ("END",)) == ["the ", "", "ENgland", ""]


def test_c20_a_stop_and_the_text_after_it_are_dropped():
    assert "".join(stream([b"fine E", b"ND and more"], ("END",), stop="END")) == "fine "


@pytest.mark.parametrize("stops", [("aab",), ("ab", "aab"), ("baa", "aaa")])
def test_c20_overlapping_stops_are_held_back(stops):
    assert "".join(stream([b"a", b"a", b"c"], stops)) == "aac"


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=8))
def test_c20_any_split_gives_the_same_text(text, positions):
    data = text.encode("utf-8", "replace")
    offsets = sorted({0, len(data), *(position for position in positions if position < len(data))})
    pieces = [data[start:end] for start, end in itertools.pairwise(offsets)]
    assert "".join(stream(pieces, ("stop", "<|end|>"))) == data.decode()
