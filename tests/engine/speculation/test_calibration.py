"""Calibration measures decodes at load and leaves the KV cache empty."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace

import pytest

import afterglow
from afterglow.engine.host import build
from afterglow.engine.kvcache.cost_model import CostModel, StepCosts
from afterglow.engine.speculation import calibration
from afterglow.engine.speculation.calibration import (
    MAX_AGE_SECONDS,
    MAX_CALIBRATION_SECONDS,
    ROW_COUNTS,
    calibrate,
    calibrate_prefill,
    load_costs,
    load_step_costs,
    store_costs,
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
    assert load_step_costs(path, recalled)
    assert recalled.list_samples() == step_costs.list_samples()
    os.utime(path, (0, time.time() - MAX_AGE_SECONDS - 1))
    assert not load_step_costs(path, StepCosts())
    for text in ("[]", "{", '{"1": 5}'):
        path.write_text(text)
        assert not load_step_costs(path, StepCosts())


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


class Machine(FakeBackend):
    """A machine with a clock of its own: a decode takes as long as one row, or as its rows if that is more."""

    def __init__(self, seconds_per_step: float, seconds_per_entry: float, bytes_per_second: float) -> None:
        super().__init__("attention", cells_per_sequence=8192, batch_cells=2048)
        self.seconds_per_step, self.seconds_per_entry = seconds_per_step, seconds_per_entry
        self.bytes_per_second = bytes_per_second
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def decode(self, spans) -> None:
        super().decode(spans)
        self.now += max(self.seconds_per_step, self.seconds_per_entry * sum(len(span.entries) for span in spans))

    def save(self, sequence, scope, *, long_lived=False):
        state = replace(super().save(sequence, scope), nbytes=20_000 * self.get_position_range(sequence)[1])
        self.now += state.nbytes / self.bytes_per_second
        return state


@pytest.mark.parametrize(
    ("seconds_per_step", "seconds_per_entry"),
    [(0.006, 20e-6), (0.01, 0.004), (0.002, 0.0005)],
    ids=["gpu", "cpu", "small"],
)
def test_the_costs_of_prefill_and_transfers_are_known_after_loading(monkeypatch, seconds_per_step, seconds_per_entry):
    machine, cost_model = Machine(seconds_per_step, seconds_per_entry, 2e9), CostModel()
    monkeypatch.setattr(calibration, "time", machine)
    calibrate_prefill(machine, cost_model)
    assert machine.now < 0.15
    assert 0.99 * seconds_per_entry < cost_model.seconds_per_entry < 2 * seconds_per_entry
    assert cost_model.bytes_per_entry == pytest.approx(20_000, rel=0.2)
    assert cost_model.cell_bytes_per_entry == pytest.approx(20_000, rel=0.2)
    assert machine.get_position_range(0) is None


class PreparingGPU(Machine):
    """A GPU that prepares its kernels for large batches in the first such decode."""

    def __init__(self) -> None:
        super().__init__(0.006, 50e-6, 8e9)
        self.capabilities = replace(self.capabilities, interruptible=False)
        self.is_prepared = False

    def decode(self, spans) -> None:
        super().decode(spans)
        if not self.is_prepared and sum(len(span.entries) for span in spans) > 8:
            self.is_prepared = True
            self.now += 0.12


def test_the_preparation_of_a_gpu_is_not_measured_as_prefill(monkeypatch):
    machine, cost_model = PreparingGPU(), CostModel()
    monkeypatch.setattr(calibration, "time", machine)
    calibrate_prefill(machine, cost_model)
    assert cost_model.seconds_per_entry == pytest.approx(50e-6)
    assert cost_model.seconds_per_byte == pytest.approx(1 / 8e9)
    assert machine.now < 0.4


def test_a_slow_machine_is_calibrated_by_two_decodes(monkeypatch):
    machine, cost_model = Machine(0.2, 0.1, 2e9), CostModel()
    monkeypatch.setattr(calibration, "time", machine)
    calibrate_prefill(machine, cost_model)
    assert len(machine.decode_history) == 2
    assert cost_model.seconds_per_entry == pytest.approx(0.1)


def test_stored_costs_hold_until_the_first_measurement(tmp_path):
    path, measured = tmp_path / "costs", CostModel()
    measured.record_prefill(500, 0.5)
    measured.record_transfer(10**6, 0.001, entries=50)
    measured.record_disk_read(10**7, 0.1)
    measured.cell_bytes_per_entry = 15_000.0
    store_costs(path, measured)
    cost_model = CostModel()
    assert load_costs(path, cost_model)
    sizes = ("bytes_per_entry", "cell_bytes_per_entry")
    for name in ("seconds_per_entry", "seconds_per_byte", *sizes, "seconds_per_disk_byte"):
        assert getattr(cost_model, name) == pytest.approx(getattr(measured, name))
    cost_model.record_prefill(400, 4.0)  # the machine is slower today
    cost_model.record_transfer(10**6, 0.01, entries=50)
    assert cost_model.seconds_per_entry == pytest.approx(0.01)
    assert cost_model.seconds_per_byte == pytest.approx(1e-8)
    os.utime(path, (0, time.time() - MAX_AGE_SECONDS - 1))
    assert not load_costs(path, CostModel())
    for text in ("[]", "{", "{}", '{"prefill": 5}', '{"prefill": {"a": 5}}'):
        path.write_text(text)
        assert not load_costs(path, CostModel())


@pytest.mark.native
def test_a_second_load_knows_what_the_first_has_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(build, "calibrate_prefill", lambda *args: (calls.append(args), calibrate_prefill(*args)))
    costs = []
    for _ in range(2):
        with afterglow.load(models.get_path("attention"), context=256, disk_cache=False) as model:
            costs.append(model._get_host().call(lambda engine: engine.prefix_cache.cost_model.seconds_per_entry))
            model.complete([5] * 100, max_tokens=1)
            learned = model._get_host().call(lambda engine: engine.prefix_cache.cost_model.seconds_per_entry)
            costs.append(learned)
    assert len(calls) == 1
    assert costs[2] == costs[1]
