"""What things take, measured as they happen."""

from __future__ import annotations

import pytest

from afterglow.engine.kvcache.cost_model import CostModel


def test_the_first_decode_of_a_prompt_replaces_the_guess_and_later_ones_are_averaged():
    """Else a new engine takes computing for cheap, and throws away what it should keep."""
    costs = CostModel()
    costs.record_prefill(100, 1.0)
    assert costs.seconds_per_entry == pytest.approx(0.01)
    costs.record_prefill(100, 2.0)
    assert 0.01 < costs.seconds_per_entry < 0.02
