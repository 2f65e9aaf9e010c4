"""What llama.cpp can compute on, and how much memory is free there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from afterglow.llama.library import library

KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device; memory in bytes."""

    name: str
    description: str
    kind: str
    backend: str
    free: int
    total: int


def devices() -> list[Device]:
    """Every device the opened library offers, the processor included."""
    opened = library()
    symbols = opened.symbols
    return [_describe(symbols.ggml_backend_dev_get(index)) for index in range(symbols.ggml_backend_dev_count())]


def _describe(pointer: object) -> Device:
    opened = library()
    symbols = opened.symbols
    free, total = opened.ffi.new("size_t *"), opened.ffi.new("size_t *")
    symbols.ggml_backend_dev_memory(pointer, free, total)
    return Device(
        name=opened.text(symbols.ggml_backend_dev_name(pointer)),
        description=opened.text(symbols.ggml_backend_dev_description(pointer)),
        kind=KINDS.get(symbols.ggml_backend_dev_type(pointer), "other"),
        backend=opened.text(symbols.ggml_backend_reg_name(symbols.ggml_backend_dev_backend_reg(pointer))),
        free=free[0],
        total=total[0],
    )


def free_memory(*, gpu: bool) -> int:
    """Bytes that a context could still take: of all GPUs together, or of this machine within its container."""
    if gpu:
        return sum(device.free for device in devices() if "gpu" in device.kind)
    return min(psutil.virtual_memory().available, _container_free())


def _container_free() -> int:
    try:
        limit, used = (CGROUP / "memory.max").read_text().strip(), (CGROUP / "memory.current").read_text()
    except OSError:
        return 2**63
    return 2**63 if limit == "max" else max(0, int(limit) - int(used))
