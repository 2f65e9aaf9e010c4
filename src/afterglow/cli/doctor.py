"""`afterglow doctor`: what a bug report needs, gathered without trusting the library that may be broken."""

from __future__ import annotations

import json
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from afterglow import registry
from afterglow.errors import AfterglowError
from afterglow.llama.library import cpu
from afterglow.llama.library.devices import list_devices
from afterglow.llama.library.loader import get_library
from afterglow.paths import get_cache_directory
from afterglow.version import __version__

REPORTED_CPU_FEATURES = (
    "avx",
    "avx2",
    "avx512f",
    "avx512_vnni",
    "fma",
    "f16c",
    "bmi2",
    "amx_int8",
    "neon",
    "asimd",
    "sve",
)
REPORTED_PACKAGES = ("cffi", "numpy", "gguf", "blake3", "xllamacpp", "llama-cpp-py-sync", "huggingface-hub")
GPU_TOOLS = {"nvidia-smi": "cuda", "rocm-smi": "rocm", "sycl-ls": "sycl", "vulkaninfo": "vulkan"}
SELF_TEST_TIMEOUT_SECONDS = 60
BYTES_PER_GIB = 1024**3

Fact = tuple[str, str]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what afterglow runs on, and test it. Paste the output into a bug report."""
    facts = [*collect_versions(), *collect_machine()]
    try:
        facts += [*collect_library(), *collect_devices()]
        tested = run_self_test()
    except AfterglowError as error:
        facts.append(("library", str(error)))
        tested = {"library": "cannot be opened"}
    healthy = all(outcome == "ok" for outcome in tested.values())
    if as_json:
        print(json.dumps({"facts": dict(facts), "self_test": tested, "healthy": healthy}))
    else:
        print_report(facts, tested)
    raise typer.Exit(0 if healthy else 1)


def print_report(facts: list[Fact], self_test: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    for name, outcome in self_test.items():
        mark = "[green]ok[/]" if outcome == "ok" else f"[red]failed[/] {outcome}"
        table.add_row(f"self-test {name}", mark)
    Console().print(table)


def collect_versions() -> Iterator[Fact]:
    yield "afterglow", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for package in REPORTED_PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def collect_machine() -> Iterator[Fact]:
    features = cpu.get_features()
    known = (
        "the system does not tell" if features is None else " ".join(f for f in REPORTED_CPU_FEATURES if f in features)
    )
    yield "processor", f"{cpu.get_architecture()}, {psutil.cpu_count(logical=False)} cores, {known}"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / BYTES_PER_GIB:.1f} of {memory.total / BYTES_PER_GIB:.1f} GiB free"
    yield "models in", str(registry.models_directory())
    yield "cache in", str(get_cache_directory(""))
    yield "models", ", ".join(model.name for model in registry.list_installed()) or "none yet: `afterglow models pull`"


def collect_library() -> Iterator[Fact]:
    opened = get_library()
    yield "llama.cpp", opened.build
    yield "library", f"{opened.location.path} ({opened.location.reason})"
    yield "compiled for", opened.decode_string(opened.symbols.llama_print_system_info()).strip(" |\n")
    yield "MTP", "available" if opened.supports_mtp else "not exported by this build"


def collect_devices() -> Iterator[Fact]:
    found = list_devices()
    for device in found:
        room = f"{device.free_bytes / BYTES_PER_GIB:.1f} of {device.total_bytes / BYTES_PER_GIB:.1f} GiB free"
        yield f"device {device.name}", f"{device.description} ({device.kind}, {device.backend}, {room})"
    unused = [extra for tool, extra in GPU_TOOLS.items() if shutil.which(tool) and has_gpu(tool)]
    if unused and not any("gpu" in device.kind for device in found):
        yield "GPU", f"present but unused: install it with pip install 'afterglow[{unused[0]}]' (Python 3.12 or newer)"
    elif not any("gpu" in device.kind for device in found):
        yield "GPU", "none found"


def has_gpu(tool: str) -> bool:
    """Whether the vendor's own tool sees a GPU: it is often installed where there is none."""
    try:
        return subprocess.run([tool], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run_self_test() -> dict[str, str]:
    """The outcome of the self-test's checks, or how its process ended."""
    command = [sys.executable, "-m", "afterglow.cli.selftest"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"process": f"took longer than {SELF_TEST_TIMEOUT_SECONDS} s"}
    if child.returncode < 0:
        return {"process": f"ended by {signal.Signals(-child.returncode).name}"}
    try:
        outcome: dict[str, str] = json.loads(child.stdout)
    except ValueError:
        return {"process": (child.stderr.strip().splitlines() or ["printed nothing"])[-1]}
    return outcome
