"""Moves that make busy sequences adjacent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.engine.kvcache.placement import count_runs, plan_moves


@pytest.mark.parametrize(
    ("seq_ids", "runs"), [([], 0), ([3], 1), ([0, 1, 2], 1), ([0, 2], 2), ([5, 4, 9, 10], 2), ([0, 2, 4, 6], 4)]
)
def test_consecutive_ids_are_one_run(seq_ids, runs):
    assert count_runs(seq_ids) == runs


@given(st.data())
def test_the_moves_make_all_busy_sequences_adjacent(data):
    count = data.draw(st.integers(1, 12))
    lengths = data.draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))
    busy = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    moves = plan_moves(busy, lengths)
    after = set(busy)
    for source, target in moves:
        assert source in after, "only busy sequences move"
        assert target not in after, "and not to another busy one"
        after.remove(source)
        after.add(target)
    assert count_runs(sorted(after)) == 1


def test_adjacent_sequences_do_not_move():
    assert plan_moves([3, 4, 5], [10] * 8) == []


def test_a_short_sequence_moves_to_a_long_one():
    assert plan_moves([0, 5], [1000, 0, 0, 0, 0, 10]) == [(5, 1)]


def test_an_empty_place_is_preferred_to_one_that_must_be_exchanged():
    assert plan_moves([2, 5], [0, 400, 50, 0, 0, 50]) == [(5, 3)]
