"""Under which conditions something was measured: the machine, the build, and who else used the cores."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import psutil

from afterglow.llama.library.loader import get_library
from afterglow.version import __version__


def now() -> dict[str, object]:
    """The conditions at this moment, as plain values."""
    return {
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "build": get_library().build,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "busy_percent": psutil.cpu_percent(interval=0.5),  # of others: nothing of ours runs now
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
