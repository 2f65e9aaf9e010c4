"""What decodes take is measured before anybody asks, and leaves nothing behind."""

from __future__ import annotations

import afterglow
from afterglow import tiny
from afterglow.engine.calibration import ROWS, calibrate
from afterglow.engine.costs import StepCosts
from afterglow.engine.settings import EngineSettings
from afterglow.testing import FakeBackend


def test_a_model_that_may_guess_knows_at_load_what_more_rows_cost():
    with afterglow.load(tiny.path("attention"), context=256, disk=False) as model:
        assert model._running().call(lambda engine: engine.memory.costs.steps.longest) == ROWS[-1]


def test_without_guesses_nothing_is_measured():
    off = EngineSettings(speculation="off")
    with afterglow.load(tiny.path("attention"), context=256, disk=False, engine=off) as model:
        assert model._running().call(lambda engine: engine.memory.costs.steps.longest) == 0


def test_it_leaves_memory_empty():
    backend = FakeBackend("attention")
    calibrate(backend, StepCosts())
    assert backend.held(0) is None


def test_a_slow_machine_is_not_kept_waiting():
    backend, steps = FakeBackend("attention"), StepCosts()
    calibrate(backend, steps, seconds=0.0)
    assert steps.longest == 0
