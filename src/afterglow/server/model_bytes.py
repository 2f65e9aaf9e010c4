"""Memory of served models by device: the limits for all of them, the share of each, and the bytes of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afterglow.api.fit import GPU_RESERVE_FRACTION, RAM_RESERVE_FRACTION, FitPlan
from afterglow.llama.library.devices import Device, MachineMemory, get_free_memory, list_devices, measure_memory
from afterglow.llama.model import ModelSettings
from afterglow.server.model_budget import RAM


def list_gpus() -> list[Device]:
    """Return the GPUs of this machine."""
    return [device for device in list_devices() if "gpu" in device.kind]


def choose_limits(memory_bytes: int | None, gpu_memory_bytes: int | None, gpus: Sequence[Device]) -> dict[str, int]:
    """Return the limits of all models by device: the settings, or most of the memory that is free now."""
    limits = {gpu.name: gpu_memory_bytes or int(gpu.free_bytes * (1 - GPU_RESERVE_FRACTION)) for gpu in gpus}
    limits[RAM] = memory_bytes or int(get_free_memory(gpu=False) * (1 - RAM_RESERVE_FRACTION))
    return limits


def get_memory(limits: Mapping[str, int], gpus: Sequence[Device]) -> MachineMemory:
    """Return the memory that one model may use if no other is loaded."""
    gpu_bytes = tuple(limits[gpu.name] for gpu in gpus)
    return MachineMemory(ram_bytes=limits[RAM], gpu_bytes=gpu_bytes, shares_ram=measure_memory().shares_ram)


def divide_memory(memory: MachineMemory, weight_bytes: Mapping[str, int]) -> dict[str, MachineMemory]:
    """Return the share of each model if all are loaded: its weights, and an equal part of what they leave.

    The weights are on the GPUs if there are any.

    >>> divide_memory(MachineMemory(ram_bytes=100), {"large": 60, "small": 20})["large"].ram_bytes
    70
    """
    shares = {}
    for name, nbytes in weight_bytes.items():
        rest = sum(weight_bytes.values()) - nbytes
        spare = max(0, (sum(memory.gpu_bytes) or memory.ram_bytes) - nbytes - rest)
        share = nbytes + spare // len(weight_bytes)
        total = sum(memory.gpu_bytes)
        shares[name] = MachineMemory(
            ram_bytes=memory.ram_bytes // len(weight_bytes) if total else share,
            gpu_bytes=tuple(gpu * share // total for gpu in memory.gpu_bytes),
            shares_ram=memory.shares_ram,
        )
    return shares


def count_plan_bytes(plan: FitPlan, settings: ModelSettings, gpus: Sequence[Device]) -> dict[str, int]:
    """Return the bytes of a plan by device: weights, KV cache, buffers, the process and the RAM tier."""
    shares = split_over_gpus(settings, gpus)
    return {RAM: plan.ram_bytes, **{device: int(plan.gpu_bytes * share) for device, share in shares.items()}}


def split_over_gpus(settings: ModelSettings, gpus: Sequence[Device]) -> dict[str, float]:
    """Return the share of each GPU in a model: `tensor_split`, or by free memory."""
    if settings.split_mode == "none":
        return {gpu.name: 1.0 for gpu in gpus[settings.main_gpu : settings.main_gpu + 1]}
    weights: list[float] = list(settings.tensor_split) if any(settings.tensor_split) else [g.free_bytes for g in gpus]
    total = sum(weights) or 1.0
    return {gpu.name: weight / total for gpu, weight in zip(gpus, weights, strict=False)}
