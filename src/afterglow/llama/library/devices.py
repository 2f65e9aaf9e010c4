"""Compute devices of the loaded library, and their free memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from afterglow.llama.library.loader import get_library

DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}
CGROUP_DIRECTORY = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One compute device."""

    name: str
    description: str
    kind: str
    backend: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Free bytes of each device. `shares_ram`: the memory of the GPUs is part of the RAM."""

    ram_bytes: int
    gpu_bytes: tuple[int, ...] = ()
    shares_ram: bool = False


def list_devices() -> list[Device]:
    """Return every device of the loaded library, including the CPU."""
    library = get_library()
    symbols, decode_string = library.symbols, library.decode_string
    devices = []
    for index in range(symbols.ggml_backend_dev_count()):
        pointer = symbols.ggml_backend_dev_get(index)
        free, total = library.ffi.new("size_t *"), library.ffi.new("size_t *")
        symbols.ggml_backend_dev_memory(pointer, free, total)
        device = Device(
            name=decode_string(symbols.ggml_backend_dev_name(pointer)),
            description=decode_string(symbols.ggml_backend_dev_description(pointer)),
            kind=DEVICE_KINDS.get(symbols.ggml_backend_dev_type(pointer), "other"),
            backend=decode_string(symbols.ggml_backend_reg_name(symbols.ggml_backend_dev_backend_reg(pointer))),
            free_bytes=free[0],
            total_bytes=total[0],
        )
        devices.append(device)
    return devices


def measure_memory() -> MachineMemory:
    """Return the free memory of each device now."""
    gpus = [device for device in list_devices() if "gpu" in device.kind]
    return MachineMemory(
        ram_bytes=get_free_memory(gpu=False),
        gpu_bytes=tuple(device.free_bytes for device in gpus),
        shares_ram=any(device.kind == "integrated gpu" or device.backend in ("Metal", "MTL") for device in gpus),
    )


def get_free_memory(*, gpu: bool) -> int:
    """Return the free bytes of all GPUs together, or of this machine within the limits of its container."""
    if gpu:
        return sum(device.free_bytes for device in list_devices() if "gpu" in device.kind)
    return min(psutil.virtual_memory().available, _get_container_free_bytes())


def _get_container_free_bytes() -> int:
    try:
        limit = (CGROUP_DIRECTORY / "memory.max").read_text().strip()
        used = (CGROUP_DIRECTORY / "memory.current").read_text()
    except OSError:
        return 2**63
    return 2**63 if limit == "max" else max(0, int(limit) - int(used))
