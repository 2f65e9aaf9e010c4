"""Estimated memory of served models by device, from their files, and the limits for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afterglow.engine.host.build import EngineSpec
from afterglow.llama.gguf.footprint import Footprint, Hyperparameters, estimate_footprint
from afterglow.llama.gguf.header import read_header
from afterglow.llama.library.devices import Device, get_free_memory, list_devices
from afterglow.llama.model import ModelSettings
from afterglow.server.model_budget import RAM

MIB = 1024**2
PROCESS_BYTES = 100 * MIB  # of an engine process without a model: interpreter and libraries; measured
MIN_RAM_TIER_BYTES = 64 * MIB
MAX_RAM_TIER_BYTES = 2048 * MIB
STORED_SEQUENCE_FACTOR = 1.25  # bytes of a stored sequence, with its tables and checkpoints, per byte of KV cache
RAM_RESERVE_FRACTION = 1 / 8  # of the free RAM, for the server, page cache and other programs
GPU_RESERVE_FRACTION = 1 / 16  # of the free memory of a GPU, for drivers and graphs


def estimate_model_bytes(spec: EngineSpec, gpus: Sequence[Device]) -> dict[str, int]:
    """Return the bytes of a model by device, without its RAM tier: weights, KV cache, buffers and the process."""
    header = read_header(spec.path)
    footprint = estimate_footprint(header, spec.context_settings)
    layers = max(1, Hyperparameters(header).get_number("block_count"))
    gpu_layers = spec.model_settings.gpu_layers if gpus else 0
    gpu_fraction = 1.0 if gpu_layers < 0 else min(1.0, gpu_layers / layers)
    split = footprint.total_bytes - footprint.compute_bytes + _estimate_companion_bytes(spec)
    gpu_bytes = int(split * gpu_fraction) + (footprint.compute_bytes if gpu_fraction else 0)
    nbytes = {RAM: PROCESS_BYTES + footprint.compute_bytes + split - int(split * gpu_fraction)}
    for device, share in split_over_gpus(spec.model_settings, gpus).items():
        nbytes[device] = int(gpu_bytes * share)
    return nbytes


def _estimate_companion_bytes(spec: EngineSpec) -> int:
    """Return the bytes of the draft model with its context, and of the projector."""
    path = spec.projector_path
    nbytes = path.stat().st_size if path is not None and path.is_file() else 0
    if spec.draft is not None and spec.draft != "mtp":
        nbytes += estimate_footprint(read_header(spec.draft), spec.context_settings).total_bytes
    return nbytes


def estimate_min_ram_tier(spec: EngineSpec) -> int:
    """Return the bytes that the RAM tier of a model needs to store the longest conversation."""
    footprint: Footprint = estimate_footprint(read_header(spec.path), spec.context_settings)
    sequence_bytes = (footprint.kv_cache_bytes + footprint.recurrent_bytes) / spec.context_settings.sequences
    return max(MIN_RAM_TIER_BYTES, int(sequence_bytes * STORED_SEQUENCE_FACTOR))


def split_over_gpus(settings: ModelSettings, gpus: Sequence[Device]) -> dict[str, float]:
    """Return the share of each GPU in a model: `tensor_split`, or by free memory."""
    if settings.split_mode == "none":
        return {gpu.name: 1.0 for gpu in gpus[settings.main_gpu : settings.main_gpu + 1]}
    weights: list[float] = list(settings.tensor_split) if any(settings.tensor_split) else [g.free_bytes for g in gpus]
    total = sum(weights) or 1.0
    return {gpu.name: weight / total for gpu, weight in zip(gpus, weights, strict=False)}


def list_gpus() -> list[Device]:
    """Return the GPUs of this machine."""
    return [device for device in list_devices() if "gpu" in device.kind]


def choose_limits(
    memory_bytes: int | None, gpu_memory_bytes: int | None, gpus: Sequence[Device], least: Mapping[str, int]
) -> dict[str, int]:
    """Return the limits of all models by device: the settings, or most of the memory that is free now.

    `least` are the bytes of the largest model: without settings, a limit is not below them.
    """
    limits = {}
    for gpu in gpus:
        free = int(gpu.free_bytes * (1 - GPU_RESERVE_FRACTION))
        limits[gpu.name] = max(free, least.get(gpu.name, 0)) if gpu_memory_bytes is None else gpu_memory_bytes
    free = int(get_free_memory(gpu=False) * (1 - RAM_RESERVE_FRACTION))
    limits[RAM] = max(free, least.get(RAM, 0)) if memory_bytes is None else memory_bytes
    return limits
