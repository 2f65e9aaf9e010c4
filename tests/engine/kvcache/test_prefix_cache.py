"""C13: cached prefixes cover exactly their tokens, stay within their bytes, and end when their reason ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import afterglow
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import models

pytestmark = pytest.mark.native

MEMORY_KINDS = ("attention", "window", "recurrent", "hybrid")
PROMPT = [1 + n % 200 for n in range(200)]


def load(kind: str, **options) -> afterglow.Model:
    options = {"context": 512, "sequences": 1, "threads": 1, "disk_cache": False, **options}
    return afterglow.load(models.get_path(kind), projector=False, **options)


def count_cached(model: afterglow.Model, prompt: list[int] = PROMPT) -> int:
    return model.complete(prompt, max_tokens=3, temperature=0).usage.cached_tokens


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c13_a_cached_prefix_covers_exactly_its_tokens(kind):
    diverged = [*PROMPT[:150], 7, *PROMPT[151:]]
    with load(kind) as model:
        cold = model.complete(diverged, max_tokens=8, temperature=0)
        model.clear_cache()
        count_cached(model)
        warm = model.complete(diverged, max_tokens=8, temperature=0)
        assert warm.tokens == cold.tokens
        assert warm.usage.cached_tokens <= 150
        if kind == "attention":
            assert warm.usage.cached_tokens == 150
        continued = [*diverged, *warm.tokens]  # the last token was sampled and not computed
        assert count_cached(model, [*continued, 9]) == len(continued) - 1


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_c13_cached_prefixes_stay_within_their_bytes(kind):
    limit = 300_000
    with load(kind, engine=EngineSettings(ram_cache_bytes=limit)) as model:
        for seed in range(6):
            count_cached(model, [1 + (seed + 7 * n) % 200 for n in range(300)])
            assert model._get_host().call(lambda engine: engine.prefix_cache.store.ram.budget.used_bytes) <= limit
        assert model._get_host().call(lambda engine: engine.prefix_cache.store.ram.budget.used_bytes) > 0


def test_c13_cached_prefixes_end_on_demand_and_on_unload():
    with load("attention") as model:
        count_cached(model)
        assert count_cached(model) == len(PROMPT)
        model.clear_cache()
        assert count_cached(model) == 0
        model.unload()
        model.activate()
        assert count_cached(model) == 0


def test_c13_cached_prefixes_end_with_a_change_of_identity(tmp_path: Path, monkeypatch):
    """What is on disk is found again by the same model with the same settings only."""
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    with load("hybrid", disk_cache=True) as model:
        count_cached(model)
    for other in ({"cache_type_k": "f32"}, {"flash_attention": False}):
        with load("hybrid", disk_cache=True, **other) as model:
            assert count_cached(model) == 0
    with load("hybrid", disk_cache=True) as model:
        assert count_cached(model) >= 128
