"""Media ids: FNV-1a of the raw bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import InvalidArgument
from afterglow.media.identity import fnv1a, normalize_id


@pytest.mark.parametrize(
    ("data", "id"),
    [(b"", "cbf29ce484222325"), (b"a", "af63dc4c8601ec8c"), (b"foobar", "85944171f73967e8")],
)
def test_c6_the_id_of_bytes_is_their_fnv_1a(data, id):
    assert fnv1a(data) == id


def fnv1a_by_definition(data: bytes) -> str:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_c6_the_hash_matches_its_definition(data):
    assert fnv1a(data) == fnv1a_by_definition(data)


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 200_000])
def test_c6_the_hash_of_large_data_matches_its_definition(length):
    data = random.Random(length).randbytes(length)
    assert fnv1a(data) == fnv1a_by_definition(data)


@pytest.mark.parametrize("id", ["", "abc", "g" * 16, "0" * 15, "0" * 17, "0" * 16 + "\n", "0x" + "0" * 14, "é" * 16, 7])
def test_c18_a_malformed_id_is_rejected(id):
    with pytest.raises(InvalidArgument, match="16 hexadecimal digits"):
        normalize_id(id)
