"""Calibration measures decodes at load and leaves the KV cache empty."""

from __future__ import annotations

import functools
import os
import time

import pytest

import afterglow
from afterglow.engine.host import build
from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.speculation import calibration
from afterglow.engine.speculation.calibration import (
    MAX_AGE_SECONDS,
    MAX_CALIBRATION_SECONDS,
    ROW_COUNTS,
    calibrate,
    recall_step_costs,
    store_step_costs,
)
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend, models


@pytest.mark.native
def test_a_model_with_speculation_has_measured_all_row_counts_after_loading(monkeypatch, tmp_path):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))  # without earlier measurements
    # On a busy machine the first decode alone can exceed the time limit.
    monkeypatch.setattr(build, "calibrate", functools.partial(calibrate, max_seconds=60.0))
    with afterglow.load(models.get_path("attention"), context=256, disk_cache=False) as model:
        assert (
            model._get_host().call(lambda engine: engine.prefix_cache.cost_model.step_costs.max_measured_rows)
            == ROW_COUNTS[-1]
        )


@pytest.mark.native
def test_a_second_load_with_the_same_settings_is_not_calibrated_again(monkeypatch, tmp_path):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(build, "calibrate", lambda *args: (calls.append(args), calibrate(*args, max_seconds=60.0)))
    measured = []
    for threads in (1, 1, 2):
        with afterglow.load(models.get_path("attention"), context=256, disk_cache=False, threads=threads) as model:
            host = model._get_host()
            measured.append(host.call(lambda engine: engine.prefix_cache.cost_model.step_costs.max_measured_rows))
    assert (len(calls), measured) == (2, [ROW_COUNTS[-1]] * 3)


def test_measurements_that_are_old_or_damaged_are_not_used(tmp_path):
    path, step_costs = tmp_path / "steps", StepCosts()
    calibrate(FakeBackend("attention"), step_costs)
    store_step_costs(path, step_costs)
    recalled = StepCosts()
    assert recall_step_costs(path, recalled)
    assert recalled.list_samples() == step_costs.list_samples()
    os.utime(path, (0, time.time() - MAX_AGE_SECONDS - 1))
    assert not recall_step_costs(path, StepCosts())
    for text in ("[]", "{", '{"1": 5}'):
        path.write_text(text)
        assert not recall_step_costs(path, StepCosts())


@pytest.mark.native
def test_without_speculation_nothing_is_measured():
    off = EngineSettings(speculation="off")
    with afterglow.load(models.get_path("attention"), context=256, disk_cache=False, engine=off) as model:
        assert model._get_host().call(lambda engine: engine.prefix_cache.cost_model.step_costs.max_measured_rows) == 0


def test_calibration_leaves_the_kv_cache_empty():
    backend = FakeBackend("attention")
    calibrate(backend, StepCosts())
    assert backend.get_position_range(0) is None


class SlowBackend(FakeBackend):
    """Its decodes take longer than the time limit of a calibration, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__("attention")
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def decode(self, spans) -> None:
        super().decode(spans)
        self.now += 3 * MAX_CALIBRATION_SECONDS


def test_calibration_measures_a_model_that_is_slower_than_its_time_limit(monkeypatch):
    backend, step_costs = SlowBackend(), StepCosts()
    monkeypatch.setattr(calibration, "time", backend)
    calibrate(backend, step_costs)
    assert step_costs.max_measured_rows == 1
    assert step_costs.estimate_seconds(1, 0.0) == pytest.approx(3 * MAX_CALIBRATION_SECONDS)
    assert len(backend.decode_history) == 2  # and stops as soon as one row count is measured
