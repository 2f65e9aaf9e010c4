"""Cost model: running averages of measured times."""

from __future__ import annotations

import pytest

from afterglow.engine.kvcache.cost_model import CostModel, StepCosts
from afterglow.engine.types.tile import RowTile


def test_the_first_measurement_replaces_each_estimate():
    """Otherwise a new engine on a fast GPU loads from disk what it computes faster, and stores at a loss."""
    cost_model = CostModel()
    cost_model.record_prefill(1000, 0.02)
    cost_model.record_transfer(10_000_000, 0.1, entries=100)
    cost_model.record_disk_read(10_000_000, 0.5)
    assert cost_model.seconds_per_entry == pytest.approx(2e-5)
    assert cost_model.seconds_per_byte == pytest.approx(1e-8)
    assert cost_model.bytes_per_entry == pytest.approx(100_000)
    assert cost_model.seconds_per_disk_byte == pytest.approx(5e-8)


def test_short_prefills_do_not_change_the_cost_of_an_entry_of_a_long_one():
    cost_model = CostModel()
    cost_model.record_prefill(2000, 0.04)
    for _ in range(20):
        cost_model.record_prefill(12, 0.005)
    assert cost_model.seconds_per_entry == pytest.approx(2e-5)


def test_attention_to_the_tokens_before_counts_once_a_decode_in_tiles_was_measured():
    cost_model = CostModel(RowTile(balanced_cells=1000))
    cost_model.record_prefill(512, 0.512)
    assert cost_model.estimate_prefill_seconds(20, after=2000) == pytest.approx(0.02)
    cost_model.record_prefill(512, 0.512, [(512, 0)])
    assert cost_model.estimate_prefill_seconds(20, after=1990) == pytest.approx(0.06)
    assert cost_model.estimate_prefill_seconds(64, after=1968) == pytest.approx(0.064 * 1.5)  # a whole tile
    assert cost_model.estimate_prefill_seconds(0, after=1968) == 0


def test_a_lasting_change_of_speed_is_followed():
    cost_model = CostModel()
    for _ in range(8):
        cost_model.record_prefill(500, 0.5)
    cost_model.record_prefill(500, 5.0)  # another process had the cores
    assert cost_model.seconds_per_entry == pytest.approx(1e-3)
    for _ in range(8):
        cost_model.record_prefill(500, 5.0)
    assert cost_model.seconds_per_entry == pytest.approx(1e-2)


def test_step_costs_are_interpolated_and_never_fall():
    costs = StepCosts()
    for _ in range(5):
        costs.record(1, 1.0)
        costs.record(5, 3.0)
    assert costs.estimate_seconds(1, 0.1) == 1.0
    assert costs.estimate_seconds(3, 0.1) == pytest.approx(2.0)
    assert costs.estimate_seconds(7, 0.1) == pytest.approx(4.0)  # extrapolated with the last slope
    for _ in range(5):
        costs.record(9, 0.5)  # noise
    assert costs.estimate_seconds(7, 0.1) == pytest.approx(3.0)
    assert costs.max_measured_rows == 9


def test_without_measurements_rows_cost_as_much_as_prefill():
    costs = StepCosts()
    for _ in range(2):
        costs.record(1, 1.0)
    assert costs.estimate_seconds(5, 0.25) == pytest.approx(2.0)
    assert not costs.is_measured(1)


def test_outliers_do_not_change_the_step_costs():
    costs = StepCosts()
    costs.record(4, 9.0)  # the first decode of a shape is a warm-up
    assert costs.estimate_seconds(4, 0.1) == pytest.approx(0.4)
    for _ in range(3):
        costs.record(4, 1.0)
    assert costs.is_measured(4)
    assert costs.estimate_seconds(4, 0.1) == 1.0
    for _ in range(3):
        costs.record(4, 100.0)
        costs.record(4, 1.0)
    assert costs.estimate_seconds(4, 0.1) == 1.0
    for _ in range(8):
        costs.record(4, 2.0)
    assert costs.estimate_seconds(4, 0.1) == 2.0  # but a lasting change is followed


def test_interrupted_transfers_do_not_change_their_cost():
    cost_model = CostModel()
    for seconds in (0.001, 0.05, 0.001, 0.03, 0.02):
        cost_model.record_transfer(1_000_000, seconds, entries=0)
    assert cost_model.seconds_per_byte == pytest.approx(1e-9)
    for _ in range(8):
        cost_model.record_transfer(1_000_000, 0.01, entries=0)
    assert cost_model.seconds_per_byte == pytest.approx(1e-8)  # a lasting change is followed
