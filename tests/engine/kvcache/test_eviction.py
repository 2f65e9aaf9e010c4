"""Eviction policy: the order of eviction, over plain values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from afterglow.engine.kvcache.eviction import (
    HALF_LIFE_SECONDS,
    choose_positions_to_drop,
    choose_victims,
    compute_log_value,
    compute_rank,
    estimate_eviction_cost,
    find_victim,
)


@dataclass
class Stored:
    key: bytes
    pinned: bool = False


@pytest.mark.parametrize("now", [0.0, 10 * HALF_LIFE_SECONDS], ids=["now", "later"])
def test_data_loses_half_of_its_value_with_each_half_life(now):
    rank = compute_rank(compute_log_value(1.0, 100), now)
    assert rank == pytest.approx(compute_rank(compute_log_value(2.0, 100), now - HALF_LIFE_SECONDS))
    assert rank > compute_rank(compute_log_value(1.9, 100), now - HALF_LIFE_SECONDS)


def test_of_equal_age_the_larger_or_cheaper_data_is_evicted_first():
    rank = compute_rank(compute_log_value(1.0, 100), 0.0)
    assert compute_rank(compute_log_value(1.0, 200), 0.0) < rank
    assert compute_rank(compute_log_value(0.5, 100), 0.0) < rank
    assert compute_rank(compute_log_value(0.0, 100), 0.0) < compute_rank(compute_log_value(1e-9, 10**12), 0.0)


def test_pinned_and_protected_data_is_not_evicted():
    stored = [Stored(b"pinned", pinned=True), Stored(b"protected"), Stored(b"old"), Stored(b"new")]
    assert find_victim(stored, {b"protected"}) is stored[2]
    assert find_victim(stored[:2], {b"protected"}) is None


def test_only_as_much_is_evicted_as_is_needed():
    assert choose_victims([("a", 10), ("b", 10)], 0) == []
    assert choose_victims([("a", 10), ("b", 10)], 10) == ["a"]
    assert choose_victims([("a", 10), ("b", 10)], 100) == ["a", "b"]


def test_evicting_costs_the_cheaper_of_computing_again_and_storing():
    assert estimate_eviction_cost(10.0, 0.0) == 5.0
    assert estimate_eviction_cost(10.0, HALF_LIFE_SECONDS) == 2.5
    assert estimate_eviction_cost(10.0, 0.0, transfer_seconds=1.0) == 1.5
    assert estimate_eviction_cost(1.0, 0.0, transfer_seconds=1.0) == 0.5


def test_c3_dropping_retains_the_first_and_the_newest_and_thins_out_the_old():
    positions = list(range(100, 1700, 100))
    dropped = choose_positions_to_drop(positions, 8)
    remaining = [position for position in positions if position not in dropped]
    assert len(remaining) == 8
    assert remaining[0] == 100
    assert remaining[-2:] == [1500, 1600]
    gaps = [second - first for first, second in itertools.pairwise(remaining)]
    assert max(gaps[:4]) > max(gaps[-3:])  # old ones are sparse, recent ones dense


def test_c3_only_the_newest_remains_if_one_is_allowed():
    assert choose_positions_to_drop([10, 20, 30], 1) == [20, 10]
    assert choose_positions_to_drop([10, 20, 30], 3) == []
