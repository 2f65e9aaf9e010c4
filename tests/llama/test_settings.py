"""C19: cache types, flash attention, sizes and memory estimate are validated before llama.cpp uses them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

import afterglow
from afterglow.errors import InvalidArgument, InvalidModel, OutOfMemory, UnsupportedOperation, UnsupportedOption
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf import footprint
from afterglow.llama.library import devices
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import CACHE_TYPES, ContextSettings
from afterglow.testing import models
from support.contexts import KV_LAYOUTS, decode_tokens, max_difference, random_tokens

QUANTIZED = [name for name in CACHE_TYPES if name not in ("f32", "f16", "bf16")]
# Cache type → least and greatest change of a logit: rounding must show, and must not be larger than its bits explain.
LOGIT_CHANGES = {"f32": (0.0, 0.0), "f16": (0.0, 0.01), "bf16": (1e-4, 0.05), **dict.fromkeys(QUANTIZED, (1e-4, 1.0))}


@pytest.mark.native
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_c19_every_cache_type_computes(open_context, caplog, kind):
    """Uses the hybrid model, whose heads are wide enough for quantized blocks."""
    exact = decode_tokens(open_context("hybrid", cache_type_k="f32", cache_type_v="f32"), 0, random_tokens(64))
    low, high = LOGIT_CHANGES[kind]
    for settings in ({"cache_type_k": kind, "cache_type_v": "f32"}, {"cache_type_k": "f32", "cache_type_v": kind}):
        caplog.clear()
        with caplog.at_level(logging.INFO, "afterglow.llama.cpp"):
            logits = decode_tokens(open_context("hybrid", **settings), 0, random_tokens(64))
        assert f"K ({settings['cache_type_k']})" in caplog.text
        assert f"V ({settings['cache_type_v']})" in caplog.text
        assert low <= max_difference(exact, logits) <= high


@pytest.mark.parametrize("kind", QUANTIZED)
def test_c19_a_quantized_value_cache_needs_flash_attention(kind):
    with pytest.raises(UnsupportedOption, match="flash attention"):
        ContextSettings(cache_type_v=kind, flash_attention=False)


@pytest.mark.native
@pytest.mark.parametrize("kind", QUANTIZED)
def test_c19_a_head_size_that_blocks_do_not_divide_is_rejected(open_model, kind):
    """The tiny attention model has heads of 16."""
    with pytest.raises(InvalidModel, match="block size 32 does not divide"):
        LlamaContext(open_model("attention"), ContextSettings(cells=256, cache_type_k=kind))


INVALID_SETTINGS = [
    ("cells", 0), ("cells", 2**40), ("sequences", 0), ("sequences", 257), ("batch", 0), ("ubatch", -1), ("outputs", 0),
    ("threads", -1), ("recurrent_snapshots", 65), ("cache_type_k", "q3_k"), ("cache_type_v", 7), ("pooling", "sum"),
    ("rope_freq_base", float("nan")), ("rope_freq_scale", -1.0), ("cells", 1.5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), INVALID_SETTINGS, ids=str)
def test_c19_a_setting_out_of_range_is_rejected_by_name(name, value):
    with pytest.raises(InvalidArgument) as caught:
        ContextSettings(**{name: value})
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "value"), [("gpu_layers", -2), ("main_gpu", -1), ("split_mode", "diagonal"), ("tensor_split", (-1.0,))]
)
def test_c19_a_model_setting_out_of_range_is_rejected_by_name(name, value):
    with pytest.raises(InvalidArgument) as caught:
        ModelSettings(**{name: value})
    assert caught.value.name == name


@pytest.mark.native
def test_c19_actual_sizes_are_read_back(open_context):
    streams = open_context("attention", cells=1000, sequences=3)
    assert (streams.cells_per_sequence, streams.cells) == (512, 1536)  # rounded up to 256 per sequence
    unified = open_context("attention", cells=1000, sequences=3, kv_unified=True)
    assert (unified.cells_per_sequence, unified.cells) == (1024, 1024)


@pytest.mark.native
def test_c19_a_context_that_cannot_fit_is_rejected_with_both_numbers(open_model):
    with pytest.raises(OutOfMemory) as caught:
        LlamaContext(open_model("attention"), ContextSettings(cells=2**31 - 1000))
    assert caught.value.needed_bytes > caught.value.available_bytes > 0
    assert "MiB" in str(caught.value)


BUFFER = re.compile(r"(KV|RS) buffer size = +([0-9.]+) MiB")


@pytest.mark.native
@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("name", ["attention", "window", "recurrent", "hybrid", "hybrid-mtp"])
@pytest.mark.parametrize(
    "settings", [{}, {"cache_type_k": "f32"}, {"sequences": 4, "cells": 8192, "recurrent_snapshots": 2}], ids=str
)
def test_c19_the_estimate_equals_what_llama_cpp_allocates(open_model, open_context, caplog, name, unified, settings):
    model = open_model(name)
    with caplog.at_level(logging.INFO, "afterglow.llama.cpp"):
        context = open_context(model, kv_unified=unified, **settings)
    allocated = sum(float(number) for _, number in BUFFER.findall(caplog.text))
    # Snapshots that the architecture does not support take no memory.
    estimate = model.estimate_footprint(replace(context.settings, recurrent_snapshots=context.max_rollback))
    assert (estimate.kv_cache_bytes + estimate.recurrent_bytes) / 2**20 == pytest.approx(allocated, abs=0.02)


MODEL_BUFFER = re.compile(r"model buffer size = +([0-9.]+) MiB")
ALL_BUFFERS = re.compile(r"(?:KV|RS|compute) buffer size = +([0-9.]+) MiB")
LARGE = {"cells": 65_536, "sequences": 4, "ubatch": 128, "batch": 128}  # the KV cache dominates
CHOSEN_BY_FIT = {"cells": 16_384, "sequences": 4}  # for a tiny model: compute buffers are the larger part


@pytest.mark.native
@pytest.mark.parametrize("settings", [LARGE, {**LARGE, "kv_unified": True}, {"cells": 32_768}, CHOSEN_BY_FIT], ids=str)
@pytest.mark.parametrize("name", ["attention", "window", "recurrent", "hybrid", "experts", "colors"])
def test_c19_weights_context_and_compute_buffers_are_within_5_percent(open_model, open_context, caplog, name, settings):
    with caplog.at_level(logging.INFO, "afterglow.llama.cpp"):
        model = open_model(name)
        context = open_context(model, **{"sequences": 1, **settings})
    estimate = model.estimate_footprint(context.settings)
    allocated = sum(float(number) for number in ALL_BUFFERS.findall(caplog.text))
    estimated = estimate.kv_cache_bytes + estimate.recurrent_bytes + estimate.compute_bytes
    assert estimated / 2**20 == pytest.approx(allocated, rel=0.05)
    weights = sum(float(number) for number in MODEL_BUFFER.findall(caplog.text))
    assert estimate.weight_bytes / 2**20 == pytest.approx(weights, rel=0.05, abs=0.02)


@pytest.mark.native
def test_c19_layers_and_experts_are_divided_between_ram_and_gpu(open_model):
    facts, settings = footprint.ModelFacts([open_model("experts").header]), ContextSettings(cells=4096)
    whole = facts.estimate(settings)
    for layers in range(-1, len(facts.layers) + 2):
        ram, gpu = facts.estimate_devices(settings, gpu_layers=layers)
        assert ram.weight_bytes + gpu.weight_bytes == whole.weight_bytes
        assert ram.kv_cache_bytes + gpu.kv_cache_bytes == whole.kv_cache_bytes
    ram, gpu = facts.estimate_devices(settings, gpu_layers=-1)
    assert ram.weight_bytes == facts.input_bytes
    assert not ram.kv_cache_bytes
    ram, gpu = facts.estimate_devices(settings, gpu_layers=-1, cpu_moe_layers=2)
    assert ram.weight_bytes == facts.input_bytes + sum(layer.expert_bytes for layer in facts.layers[:2])


@pytest.mark.native
def test_c19_experts_that_stay_in_ram_do_not_change_the_logits(open_model, open_context, caplog):
    expected = decode_tokens(open_context("experts"), 0, random_tokens(10))
    with caplog.at_level(logging.DEBUG, "afterglow.llama.cpp"):
        model = open_model("experts", cpu_moe_layers=2)
    overridden = re.findall(r"tensor blk\.(\d+)\.ffn_up_exps\.weight .*overridden to CPU", caplog.text)
    assert sorted(set(overridden)) == ["0", "1"]
    assert max_difference(decode_tokens(open_context(model), 0, random_tokens(10)), expected) < 1e-4


LOAD_MODES = [(True, False, "mmap"), (False, False, "none"), (False, True, "mlock"), (True, True, "mmap+mlock")]


@pytest.mark.native
@pytest.mark.parametrize(("mmap", "mlock", "mode"), LOAD_MODES)
def test_c19_memory_mapping_and_locking_are_used_and_do_not_change_the_logits(
    open_model, open_context, caplog, mmap, mlock, mode
):
    with caplog.at_level(logging.INFO, "afterglow.llama.cpp"):
        model = open_model("attention", mmap=mmap, mlock=mlock)
    assert f"(load_mode = {mode})" in caplog.text
    assert (str(model.path) in Path("/proc/self/maps").read_text()) is mmap
    expected = decode_tokens(open_context("attention"), 0, random_tokens(10))
    assert max_difference(decode_tokens(open_context(model), 0, random_tokens(10)), expected) == 0.0


@pytest.mark.native
def test_c19_threads_can_be_changed(open_context):
    def get_threads() -> tuple[int, int]:
        symbols = get_library().symbols
        return symbols.llama_n_threads(context.pointer), symbols.llama_n_threads_batch(context.pointer)

    context = open_context("attention", threads=3)
    assert get_threads() == (3, 3)
    context.set_threads(1, 2)
    assert get_threads() == (1, 2)
    before = decode_tokens(context, 0, random_tokens(10))
    context.set_threads(2, 1)
    assert get_threads() == (2, 1)
    context.memory.clear()
    assert max_difference(decode_tokens(context, 0, random_tokens(10)), before) == 0.0


@pytest.mark.native
def test_c19_without_a_gpu_its_layers_stay_on_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "list_devices", lambda: ())
    with LlamaModel.load(models.get_path("attention"), ModelSettings(gpu_layers=-1), trust=True) as model:
        LlamaContext(model, ContextSettings(cells=64)).close()


@pytest.mark.native
@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
def test_c19_a_shift_of_bf16_keys_is_refused(kind):
    """llama.cpp aborts the process if it rotates them, also if the memory is probed at load."""
    options = {"context": 512, "threads": 1, "cache_type_k": "bf16", "disk_cache": False}
    with afterglow.load(models.get_path(kind), **options) as model:
        first = model.complete(random_tokens(100), max_tokens=4)
        assert model.complete(random_tokens(100), max_tokens=4).tokens == first.tokens
        memory = model._lifecycle.context.memory
        assert not memory.can_shift
        with pytest.raises(UnsupportedOperation, match="cannot be shifted"):
            memory.shift(0, 5)
