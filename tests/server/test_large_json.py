"""Large JSON responses are encoded in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afterglow.server.large_json import encode_pieces


@pytest.mark.parametrize("value", [{}, [], "a", None, [[]], [1, "ä"], {"a": {"b": [[1.5], [2.5]], "c": 'say "x"'}}])
def test_the_pieces_are_the_json_text_of_a_value(value: Any) -> None:
    assert json.loads("".join(encode_pieces(value))) == value


def test_each_vector_is_a_piece() -> None:
    vectors = [[0.25] * 1000] * 50
    for value in (
        vectors,
        [{"embedding": vector} for vector in vectors],
        [{"embedding": [vector]} for vector in vectors],
    ):
        assert len([piece for piece in encode_pieces(value) if "0.25" in piece]) == 50


def test_a_number_that_json_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="JSON"):
        list(encode_pieces([[float("nan")]]))
