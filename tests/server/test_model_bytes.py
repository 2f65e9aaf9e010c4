"""Estimated memory of served models, and the limits for all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from afterglow.api.load import build_engine_spec
from afterglow.api.options import LoadOptions, check_options
from afterglow.cli.serve import build_load_options, build_model_registry, plan_budget
from afterglow.cli.settings import load_settings
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import OutOfMemory
from afterglow.llama.gguf.footprint import estimate_footprint
from afterglow.llama.gguf.header import read_header
from afterglow.llama.library.devices import Device
from afterglow.server.model_budget import RAM
from afterglow.server.model_bytes import (
    MIN_RAM_TIER_BYTES,
    PROCESS_BYTES,
    choose_limits,
    estimate_min_ram_tier,
    estimate_model_bytes,
)
from afterglow.testing import models

GIB = 1024**3


def build_gpu(name: str, free_bytes: int) -> Device:
    return Device(name=name, description="", kind="gpu", backend="", free_bytes=free_bytes, total_bytes=free_bytes)


def build_spec(gpu_layers: int = 0, **options: Any) -> EngineSpec:
    checked = check_options(LoadOptions, {"context": 1024, "sequences": 2, "gpu_layers": gpu_layers, **options})
    return build_engine_spec(models.get_path("attention"), checked, EngineSettings(), draft=None)


def test_a_model_on_the_cpu_takes_only_ram() -> None:
    spec = build_spec()
    footprint = estimate_footprint(read_header(spec.path), spec.context_settings)
    assert estimate_model_bytes(spec, []) == {RAM: PROCESS_BYTES + footprint.total_bytes}


def test_the_layers_on_a_gpu_do_not_count_as_ram() -> None:
    gpus = [build_gpu("CUDA0", 3 * GIB), build_gpu("CUDA1", GIB)]
    spec = build_spec(gpu_layers=-1)
    footprint = estimate_footprint(read_header(spec.path), spec.context_settings)
    nbytes = estimate_model_bytes(spec, gpus)
    assert nbytes[RAM] == PROCESS_BYTES + footprint.compute_bytes
    assert nbytes["CUDA0"] + nbytes["CUDA1"] == pytest.approx(footprint.total_bytes, abs=2)
    assert nbytes["CUDA0"] == pytest.approx(3 * nbytes["CUDA1"], abs=4)
    one = build_spec(gpu_layers=-1, split_mode="none", main_gpu=1)
    assert set(estimate_model_bytes(one, gpus)) == {RAM, "CUDA1"}


def test_a_draft_model_and_a_projector_count(tmp_path: Path) -> None:
    spec = build_spec()
    projector = tmp_path / "projector"
    projector.write_bytes(bytes(1000))
    larger = dataclasses.replace(spec, draft=models.get_path("draft"), projector_path=projector)
    draft = estimate_footprint(read_header(models.get_path("draft")), spec.context_settings).total_bytes
    assert estimate_model_bytes(larger, [])[RAM] == estimate_model_bytes(spec, [])[RAM] + draft + 1000


def test_the_ram_tier_holds_at_least_one_conversation() -> None:
    assert estimate_min_ram_tier(build_spec()) == MIN_RAM_TIER_BYTES
    spec = build_spec(context=2**20)
    footprint = estimate_footprint(read_header(spec.path), spec.context_settings)
    assert estimate_min_ram_tier(spec) > footprint.kv_cache_bytes / 2


def test_limits_are_the_settings_or_most_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afterglow.server.model_bytes.get_free_memory", lambda *, gpu: 8 * GIB)
    gpus = [build_gpu("CUDA0", 16 * GIB)]
    assert choose_limits(None, None, gpus, {RAM: 1}) == {RAM: 7 * GIB, "CUDA0": 15 * GIB}
    assert choose_limits(GIB, 2 * GIB, gpus, {RAM: 4 * GIB}) == {RAM: GIB, "CUDA0": 2 * GIB}
    assert choose_limits(None, None, [], {RAM: 9 * GIB}) == {RAM: 9 * GIB}  # one model can always be tried


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
    nbytes, limits = plan_budget(served, options, settings)
    assert (options["small"]["context"], options["base"]["context"]) == (256, 512)
    assert options["small"]["ram_cache_bytes"] == 70 * 1024**2
    assert limits[RAM] == GIB >= sum(bytes_by_device[RAM] for bytes_by_device in nbytes.values())
    assert options["base"]["ram_cache_bytes"] > MIN_RAM_TIER_BYTES
    registry = build_model_registry(served, settings)
    small, base = registry.get_slot("small"), registry.get_slot("base")
    assert (small.keep_alive, small.pinned) == (120.0, False)
    assert (base.keep_alive, base.pinned) == (60.0, True)
    private = load_settings(private=True)
    assert build_load_options(served, private)["small"]["disk_cache"] is False


def test_a_budget_smaller_than_a_model_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    settings = load_settings(server={"memory_bytes": "10MiB"})
    with pytest.raises(OutOfMemory, match=r"needs .* MiB, 10 MiB are free"):
        build_model_registry({"tiny": models.get_path("attention")}, settings)
