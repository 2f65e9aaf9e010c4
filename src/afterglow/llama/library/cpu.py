"""CPU architecture, instruction sets and cores, as the operating system reports them. Independent of llama.cpp."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path


def get_architecture() -> str:
    """Return the CPU architecture under one name per family: `x86_64`, `aarch64`, or the system's name."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def get_features() -> frozenset[str] | None:
    """Return the instruction sets of this CPU in lower case, or None if the system does not report them.

    >>> isinstance(get_features(), frozenset | None)
    True
    """
    if sys.platform == "linux":
        return _read_linux_features(Path("/proc/cpuinfo"))
    if sys.platform == "darwin":
        keys = ["machdep.cpu.features", "machdep.cpu.leaf7_features"]
        result = subprocess.run(["sysctl", "-n", *keys], capture_output=True, text=True, check=False)
        return frozenset(result.stdout.lower().replace("avx1.0", "avx").split()) or None
    return None


def _read_linux_features(cpuinfo: Path) -> frozenset[str] | None:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.lower().split())
    return None


def list_usable_cores() -> set[int]:
    """Return the numbers of the logical cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
