"""Fit: options that are not set are chosen by what fits into memory, in a fixed order of preference."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow.api.fit import MAX_CONTEXT_TOKENS, WANTED_CONTEXT_TOKENS, Companions, FitPlan, find_first, plan_fit
from afterglow.api.options import LoadOptions, check_options
from afterglow.errors import OutOfMemory
from afterglow.llama.gguf.footprint import ModelFacts
from afterglow.llama.library.devices import MachineMemory
from afterglow.testing import models
from support.model_shapes import GIB, MEMORY_SIZES, build_shapes

ROOT = Path(__file__).parents[2]
SHAPES = build_shapes()
FACTS = {name: ModelFacts([header]) for name, header in SHAPES.items()}
RAM_SIZES = [4, 6, 8, 11, 16, 24, 32, 48, 64, 128, 256]
GPU_SIZES = [2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 80, 160]


def plan(name: str, ram: float, *gpus: float, **options: Any) -> FitPlan:
    memory = MachineMemory(ram_bytes=int(ram * GIB), gpu_bytes=tuple(int(gpu * GIB) for gpu in gpus))
    return plan_fit(FACTS[name], check_options(LoadOptions, {"threads": 1, **options}), memory)


def try_plan(name: str, ram: float, *gpus: float, **options: Any) -> FitPlan | None:
    try:
        return plan(name, ram, *gpus, **options)
    except OutOfMemory:
        return None


# --- the recorded plans


def test_the_plans_of_twelve_shapes_on_six_machines_are_those_recorded() -> None:
    record = runpy.run_path(str(ROOT / "scripts" / "record_fit.py"))["record_plans"]
    recorded = json.loads((ROOT / "tests" / "data" / "fit.json").read_text())
    assert len(recorded) == 12
    assert all(len(plans) == len(MEMORY_SIZES) == 6 for plans in recorded.values())
    assert record() == recorded, "run scripts/record_fit.py and review the difference"


# --- invariants


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_never_needs_more_than_there_is_and_its_lines_add_up(name: str) -> None:
    for ram in RAM_SIZES:
        for gpus in ((), (4,), (12,), (24, 24), (80,)):
            if (fitted := try_plan(name, ram, *gpus)) is None:
                continue
            assert fitted.ram_bytes <= ram * GIB
            assert fitted.gpu_bytes <= sum(gpus) * GIB
            assert sum(line.ram_bytes for line in fitted.lines) == fitted.ram_bytes
            assert sum(line.gpu_bytes for line in fitted.lines) == fitted.gpu_bytes
            assert all(line.reason for line in fitted.lines)
            assert not gpus or not fitted.options["gpu_layers"] or fitted.gpu_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_more_memory_never_shortens_the_context_and_never_takes_precision_away(name: str) -> None:
    for sizes in ([(ram,) for ram in RAM_SIZES], [(64, gpu) for gpu in GPU_SIZES]):
        plans = [fitted for size in sizes if (fitted := try_plan(name, *size)) is not None]
        contexts = [fitted.options["context"] for fitted in plans]
        assert contexts == sorted(contexts)
        assert [fitted.options["sequences"] for fitted in plans] == sorted(p.options["sequences"] for p in plans)
        if len(sizes[0]) == 1:
            quantized = [fitted.options["cache_type_k"] == "q8_0" for fitted in plans]
            assert quantized == sorted(quantized, reverse=True)
        else:
            layers = [fitted.options["gpu_layers"] % 1000 - fitted.options["cpu_moe_layers"] for fitted in plans]
            assert all(fitted.options["gpu_layers"] == -1 for fitted in plans[-1:]), layers


@pytest.mark.parametrize("name", SHAPES)
def test_the_context_has_32k_tokens_whenever_they_fit_in_any_type(name: str) -> None:
    wanted = min(WANTED_CONTEXT_TOKENS, FACTS[name].hyperparameters.trained_context)
    for ram in RAM_SIZES:
        fitted = try_plan(name, ram)
        smallest = try_plan(name, ram * 7 / 8 - 0.01, context=wanted, sequences=1, ram_cache_bytes=int(ram * GIB / 16))
        if smallest is not None:
            assert fitted is not None
            assert fitted.options["context"] >= wanted
    assert plan(name, 512).options["context"] == min(MAX_CONTEXT_TOKENS, FACTS[name].hyperparameters.trained_context)


# --- preferences


def test_a_context_of_32k_comes_before_sequences_with_cells_of_their_own() -> None:
    small, large = plan("dense 8B", 16), plan("dense 8B", 512)
    assert (small.options["sequences"], small.options["kv_unified"]) == (4, True)
    assert (large.options["sequences"], large.options["kv_unified"]) == (4, False)
    assert small.options["context"] >= WANTED_CONTEXT_TOKENS


def test_the_cache_is_quantized_only_if_32k_do_not_fit_otherwise() -> None:
    assert plan("dense 14B", 16).options["cache_type_k"] == "q8_0"
    assert plan("dense 14B", 24).options["cache_type_k"] == "f16"
    assert plan("dense 14B", 14, cache_type_k="f16", cache_type_v="f16").options["context"] < WANTED_CONTEXT_TOKENS
    without = plan("dense 14B", 14, flash_attention=False)  # quantized values need it
    assert without.options["cache_type_v"] == "f16"


def test_the_layers_on_gpus_fit_the_split_of_the_gpus() -> None:
    both = plan("dense 70B", 64, 24, 24)
    assert 24 * GIB < both.gpu_bytes <= 48 * GIB
    assert plan("dense 70B", 64, 24, 24, split_mode="none").gpu_bytes <= 24 * GIB
    uneven = plan("dense 70B", 64, 24, 24, tensor_split=(3.0, 1.0))
    assert 0 < uneven.gpu_bytes * 3 / 4 <= 24 * GIB


def test_experts_go_to_ram_before_whole_layers_do() -> None:
    fitted = plan("MoE 30B-A3B", 32, 10)
    assert fitted.options["gpu_layers"] == -1
    assert 0 < fitted.options["cpu_moe_layers"] < 48
    fewer = plan("MoE 30B-A3B", 32, 14).options["cpu_moe_layers"]
    assert fewer < fitted.options["cpu_moe_layers"]
    dense = plan("dense 32B", 32, 10)
    assert 0 < dense.options["gpu_layers"] < 65
    assert dense.options["cpu_moe_layers"] == 0


def test_given_options_are_not_changed() -> None:
    options = {
        "context": 8000, "sequences": 2, "cache_type_k": "q4_0", "cache_type_v": "f16", "gpu_layers": 7,
        "cpu_moe_layers": 3, "batch": 700, "ubatch": 300, "kv_unified": True, "ram_cache_bytes": 5_000_000,
    }  # fmt: skip
    fitted = plan("MoE 30B-A3B", 64, 24, **options)
    assert fitted.options == options
    assert not fitted.chosen
    for name, value in options.items():
        alone = plan("MoE 30B-A3B", 64, 24, **{name: value})
        assert alone.options[name] == value
        assert name not in alone.chosen


def test_one_sequence_needs_no_shared_cells() -> None:
    assert plan("dense 8B", 16, sequences=1).options["kv_unified"] is False


def test_a_draft_model_heads_and_a_projector_take_their_part() -> None:
    options = check_options(LoadOptions, {"threads": 1})
    memory, facts = MachineMemory(ram_bytes=48 * GIB), FACTS["dense 8B"]
    alone = plan_fit(facts, options, memory)
    companions = [
        Companions(draft=FACTS["dense 0.5B"]),
        Companions(projector_bytes=3 * GIB),
    ]
    for companion in companions:
        assert plan_fit(facts, options, memory, companion).options["context"] < alone.options["context"]
    mtp = plan_fit(facts, options, memory, Companions(uses_mtp=True))
    assert "MTP heads" in [line.name for line in mtp.lines]


def test_memory_that_ram_and_gpu_share_is_counted_once() -> None:
    options = check_options(LoadOptions, {"threads": 1})
    shared = MachineMemory(ram_bytes=16 * GIB, gpu_bytes=(16 * GIB,), shares_ram=True)
    fitted = plan_fit(FACTS["dense 14B"], options, shared)
    assert fitted.ram_bytes + fitted.gpu_bytes <= 16 * GIB


# --- refusals


@pytest.mark.parametrize(
    ("ram", "options", "advice"),
    [
        (12, {"context": 131_072, "sequences": 1}, r"context=\d+ fits"),
        (12, {"context": 32_768, "sequences": 4, "kv_unified": False}, r"(context|sequences|kv_unified)=\w+ fits"),
        (16, {"ram_cache_bytes": 15 * GIB}, r"ram_cache_bytes=\d+ fits"),
        (4, {}, "smaller model"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers_and_what_fits(ram, options, advice) -> None:
    with pytest.raises(OutOfMemory, match=advice) as caught:
        plan("dense 8B", ram, **options)
    assert caught.value.needed_bytes > caught.value.available_bytes
    assert caught.value.available_bytes == ram * GIB
    name, _, value = caught.value.advice.partition(" ")[0].partition("=")
    if value:
        fixed = {**options, name: value == "True" if value in ("True", "False") else int(value)}
        assert plan("dense 8B", ram, **fixed).options[name] == fixed[name]


def test_the_context_that_a_refusal_names_is_the_longest_that_fits() -> None:
    with pytest.raises(OutOfMemory, match=r"context=\d+ fits") as caught:
        plan("dense 8B", 12, context=1_000_000, sequences=1)
    context = int(caught.value.advice.partition(" ")[0].removeprefix("context="))
    assert plan("dense 8B", 12, context=context, sequences=1).options["context"] == context
    with pytest.raises(OutOfMemory):
        plan("dense 8B", 12, context=context + 1024, sequences=1)


def test_memory_for_less_than_the_reserve_is_refused_with_a_context_that_fits() -> None:
    smallest = next(mib for mib in range(1024, 16 * 1024, 16) if try_plan("dense 8B", mib / 1024, context=1024))
    with pytest.raises(OutOfMemory, match=r"context=1024 fits") as caught:
        plan("dense 8B", smallest / 1024)
    assert caught.value.needed_bytes > caught.value.available_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "full precision"),
        ({"cache_type_k": "q8_0"}, "given"),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, "given"),
        ({"cache_type_v": "f16"}, "full precision"),
    ],
)
def test_the_reason_for_cache_types_is_true(options, reason) -> None:
    (line,) = [line for line in plan("dense 8B", 64, **options).lines if line.name == "KV cache"]
    assert line.reason == reason


def test_a_gpu_computes_more_rows_at_once_if_there_is_room_and_nothing_else_is_given() -> None:
    assert plan("dense 8B", 64, 80).options["ubatch"] == 2048
    assert plan("dense 8B", 64, 80, ubatch=256).options["ubatch"] == 256
    assert plan("dense 8B", 64, 80, batch=1024).options["ubatch"] == 1024
    assert plan("dense 8B", 64, 80, gpu_layers=0).options["ubatch"] == 512
    assert plan("dense 8B", 64, 4).options["ubatch"] == 512, "its buffers would take memory from the layers"
    assert plan("dense 8B", 64, gpu_layers=-1).options["ubatch"] == 512, "there is no GPU"


@pytest.mark.native
def test_load_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afterglow.llama.model._load_pointer", lambda *_: pytest.fail("loaded"))
    with pytest.raises(OutOfMemory, match=r"context=\d+ fits"):
        afterglow.load(models.get_path("attention"), context=8_000_000, sequences=255, kv_unified=False)


@pytest.mark.native
def test_a_loaded_model_has_what_its_plan_says() -> None:
    with afterglow.load(models.get_path("hybrid"), threads=1, disk_cache=False) as model:
        assert model.fit is not None
        assert model.context_length == model.fit.options["context"] == 4096
        assert model.engine_info.sequences == model.fit.options["sequences"] == 4
        _, settings = model.settings
        assert settings.cells == 4 * 4096


@pytest.mark.native
def test_sequences_that_share_their_cells_have_the_whole_context_each() -> None:
    path = models.get_path("attention")
    with afterglow.load(path, threads=1, context=512, sequences=3, kv_unified=True, disk_cache=False) as model:
        assert model.settings[1].cells == model.context_length == 512
        completion = model.complete([5] * 400, max_tokens=20, ignore_eos=True)
        assert len(completion.tokens) == 20


def test_find_first_needs_a_logarithmic_number_of_questions() -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= 613

    assert find_first(1024, holds) == 613
    assert len(asked) <= 12
    assert find_first(0, holds) is None
