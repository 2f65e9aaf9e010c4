"""What decodes take is measured before anybody asks, and leaves nothing behind."""

from __future__ import annotations

import afterglow
from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.speculation.calibration import ROW_COUNTS, calibrate
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend, models


def test_a_model_that_may_guess_knows_at_load_what_more_rows_cost():
    with afterglow.load(models.get_path("attention"), context=256, disk_cache=False) as model:
        assert (
            model._get_host().call(lambda engine: engine.prefix_cache.cost_model.step_costs.max_measured_rows)
            == ROW_COUNTS[-1]
        )


def test_without_guesses_nothing_is_measured():
    off = EngineSettings(speculation="off")
    with afterglow.load(models.get_path("attention"), context=256, disk_cache=False, engine=off) as model:
        assert model._get_host().call(lambda engine: engine.prefix_cache.cost_model.step_costs.max_measured_rows) == 0


def test_it_leaves_memory_empty():
    backend = FakeBackend("attention")
    calibrate(backend, StepCosts())
    assert backend.get_position_range(0) is None


def test_a_slow_machine_is_not_kept_waiting():
    backend, steps = FakeBackend("attention"), StepCosts()
    calibrate(backend, steps, max_seconds=0.0)
    assert steps.max_measured_rows == 0
