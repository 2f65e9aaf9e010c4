"""Estimated memory of served models, and the limits for all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from afterglow.api.fit import FitPlan
from afterglow.api.load import plan_load
from afterglow.api.options import LoadOptions, check_options
from afterglow.cli.serve import build_load_options, build_model_registry, plan_budget
from afterglow.cli.settings import load_settings
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import OutOfMemory
from afterglow.llama.library.devices import Device, MachineMemory
from afterglow.llama.model import ModelSettings
from afterglow.server.model_budget import RAM
from afterglow.server.model_bytes import choose_limits, count_plan_bytes, divide_memory
from afterglow.testing import models

GIB = 1024**3


def build_gpu(name: str, free_bytes: int) -> Device:
    return Device(name=name, description="", kind="gpu", backend="", free_bytes=free_bytes, total_bytes=free_bytes)


def build_plan(**options: Any) -> FitPlan:
    checked = check_options(LoadOptions, {"context": 1024, "sequences": 2, **options})
    return plan_load(models.get_path("attention"), checked, EngineSettings(), memory=MachineMemory(ram_bytes=4 * GIB))


def test_a_model_on_the_cpu_takes_only_ram() -> None:
    plan = build_plan()
    assert count_plan_bytes(plan, ModelSettings(), []) == {RAM: plan.ram_bytes}


def test_the_memory_of_gpus_is_divided_as_the_model_is() -> None:
    gpus = [build_gpu("CUDA0", 3 * GIB), build_gpu("CUDA1", GIB)]
    plan = dataclasses.replace(build_plan(), gpu_bytes=4000)
    assert count_plan_bytes(plan, ModelSettings(), gpus) == {RAM: plan.ram_bytes, "CUDA0": 3000, "CUDA1": 1000}
    equal = ModelSettings(tensor_split=(1, 1))
    assert count_plan_bytes(plan, equal, gpus) == {RAM: plan.ram_bytes, "CUDA0": 2000, "CUDA1": 2000}
    one = ModelSettings(split_mode="none", main_gpu=1)
    assert count_plan_bytes(plan, one, gpus) == {RAM: plan.ram_bytes, "CUDA1": 4000}


def test_limits_are_the_settings_or_most_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afterglow.server.model_bytes.get_free_memory", lambda *, gpu: 8 * GIB)
    gpus = [build_gpu("CUDA0", 16 * GIB)]
    assert choose_limits(None, None, gpus) == {RAM: 7 * GIB, "CUDA0": 15 * GIB}
    assert choose_limits(GIB, 2 * GIB, gpus) == {RAM: GIB, "CUDA0": 2 * GIB}


@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100), min_size=1),
    ram=st.integers(1, 400),
    gpus=st.lists(st.integers(1, 200), max_size=2),
)
def test_the_shares_of_models_that_fit_are_within_the_memory(
    weights: dict[str, int], ram: int, gpus: list[int]
) -> None:
    memory = MachineMemory(ram_bytes=ram, gpu_bytes=tuple(gpus))
    shares = divide_memory(memory, weights)
    pool = sum(gpus) or ram
    assume(sum(weights.values()) <= pool)
    assert sum(share.ram_bytes for share in shares.values()) <= ram
    for index, gpu in enumerate(gpus):
        assert sum(share.gpu_bytes[index] for share in shares.values()) <= gpu
    if not gpus:
        assert all(shares[name].ram_bytes >= nbytes for name, nbytes in weights.items())


# --- serve


def write_settings(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text)
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(path))


def test_the_table_of_a_model_overrides_the_common_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.get_path("attention")
    text = f"""
        [models.small]
        model = "{path}"
        context = 256
        keep_alive = "2m"
        ram_cache_bytes = "70MiB"
        [models.base]
        model = "{path}"
        pinned = true
        [server]
        keep_alive = 60
        memory_bytes = "1GiB"
    """
    write_settings(tmp_path / "settings.toml", text, monkeypatch)
    settings = load_settings(context=512)
    served: dict[str, Any] = {name: path for name in settings.models}
    options = build_load_options(served, settings)
    plans, nbytes, limits = plan_budget(served, options, settings)
    assert (options["small"]["context"], options["base"]["context"]) == (256, 512)
    assert options["small"]["ram_cache_bytes"] == 70 * 1024**2
    assert limits[RAM] == GIB >= sum(bytes_by_device[RAM] for bytes_by_device in nbytes.values())
    assert options["base"]["ram_cache_bytes"] == plans["base"].options["ram_cache_bytes"] > 0
    registry = build_model_registry(served, settings)
    small, base = registry.get_slot("small"), registry.get_slot("base")
    assert (small.keep_alive, small.served.pinned) == (120.0, False)
    assert (base.keep_alive, base.served.pinned) == (60.0, True)
    private = load_settings(private=True)
    assert build_load_options(served, private)["small"]["disk_cache"] is False


def test_a_budget_smaller_than_a_model_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    settings = load_settings(server={"memory_bytes": "10MiB"})
    with pytest.raises(OutOfMemory, match=r"needs .* MiB, 10 MiB are free"):
        build_model_registry({"tiny": models.get_path("attention")}, settings)


def test_models_share_the_memory_if_each_gets_the_wanted_context_and_take_turns_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    served: dict[str, Any] = dict.fromkeys(("a", "b", "c"), models.get_path("attention"))
    for memory, fit_together in (("8GiB", True), ("400MiB", False)):
        settings = load_settings(server={"memory_bytes": memory})
        plans, nbytes, limits = plan_budget(served, build_load_options(served, settings), settings)
        assert (sum(nbytes[name][RAM] for name in served) <= limits[RAM]) == fit_together
        assert all(nbytes[name][RAM] <= limits[RAM] for name in served)
        assert all("context" in plan.chosen for plan in plans.values())
