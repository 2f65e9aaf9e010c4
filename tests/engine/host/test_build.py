"""Building engines: what a restart need not find out again."""

from __future__ import annotations

import pickle
from contextlib import closing

import pytest

import afterglow
from afterglow.engine.host import build
from afterglow.engine.host.child_main import unpack
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf import probe
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
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


def test_rope_options_of_a_model_do_not_reach_its_draft_model():
    path = models.get_path("successor-attention")
    with (
        LlamaModel.load(path) as model,
        LlamaContext(model, ContextSettings(cells=256, rope_freq_base=1e6)) as target,
        closing(build._load_draft_model(path, target, EngineSettings(), trust=True)) as draft_model,
    ):
        assert draft_model._backend.context.settings == ContextSettings(cells=256)


@pytest.mark.parametrize(
    ("name", "options"), [("successor-attention", {"batch": 32}), ("successor-window", {"ubatch": 32})]
)
def test_deterministic_mode_refuses_a_batch_that_is_smaller_than_its_chunks(name, options):
    settings = EngineSettings(deterministic=True)
    [option] = options
    with pytest.raises(InvalidArgument, match=f"`{option}` must be at least 64 in deterministic mode"):
        afterglow.load(models.get_path(name), engine=settings, context=128, threads=1, **options)
    smaller = EngineSettings(deterministic=True, grid=32)
    with afterglow.load(models.get_path(name), engine=smaller, context=128, threads=1, **options) as model:
        assert len(model.complete([20] * 100, max_tokens=2, temperature=0).tokens) == 2
