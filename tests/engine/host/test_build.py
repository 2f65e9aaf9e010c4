"""Building engines: what a restart need not find out again."""

from __future__ import annotations

import pickle
from contextlib import closing

import pytest

from afterglow.engine.host import build
from afterglow.engine.host.child_main import unpack
from afterglow.engine.host.process import EngineProcess
from afterglow.llama.gguf import probe
from support.hosts import build_spec

pytestmark = pytest.mark.native


def test_a_restart_skips_trials_and_calibration(monkeypatch):
    spec = build_spec()
    with closing(spec()) as engine:
        assert engine.prefix_cache.cost_model.step_costs.is_measured(1)
        restart = pickle.loads(pickle.dumps(spec.build_restart_spec(engine)))

    def fail(*_: object) -> None:
        raise AssertionError("this is known already")

    monkeypatch.setattr(build, "calibrate", fail)
    monkeypatch.setattr(probe, "ensure_safe", fail)
    with closing(restart()) as engine:
        assert engine.prefix_cache.cost_model.step_costs.is_measured(1)


def test_the_next_child_of_a_process_is_built_from_the_restart_spec():
    with EngineProcess(build_spec()) as engine:
        restart = unpack("factory", engine._factory)
    assert restart.trust
    assert restart.step_costs.is_measured(1)
