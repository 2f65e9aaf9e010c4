"""Cost model: running averages of measured times."""

from __future__ import annotations

import pytest

from afterglow.engine.kvcache.cost_model import CostModel


def test_the_first_prefill_measurement_replaces_the_estimate_and_later_ones_are_averaged():
    """Otherwise a new engine underestimates compute time and does not store what it should."""
    cost_model = CostModel()
    cost_model.record_prefill(100, 1.0)
    assert cost_model.seconds_per_entry == pytest.approx(0.01)
    cost_model.record_prefill(100, 2.0)
    assert 0.01 < cost_model.seconds_per_entry < 0.02
