"""`afterglow doctor`: system report for bug reports. Tests the native library in a child process: it may crash."""

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
from afterglow.cli.settings import get_settings_path
from afterglow.errors import AfterglowError
from afterglow.installation import format_install_command
from afterglow.llama.library import cpu
from afterglow.llama.library.devices import list_devices
from afterglow.llama.library.loader import get_library
from afterglow.paths import get_cache_directory, get_data_directory
from afterglow.version import __version__

REPORTED_CPU_FEATURES = (
    *("avx", "avx2", "avx512f", "avx512_vnni", "fma", "f16c", "bmi2", "amx_int8"),
    *("neon", "asimd", "sve"),
)
REPORTED_PACKAGES = ("cffi", "numpy", "gguf", "blake3", "xllamacpp", "llama-cpp-py-sync", "huggingface-hub")
GPU_TOOLS = {"nvidia-smi": "cuda", "rocm-smi": "rocm", "sycl-ls": "sycl", "vulkaninfo": "vulkan"}
SELF_TEST_TIMEOUT_SECONDS = 60
GIB = 1024**3

Fact = tuple[str, str]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, hardware and the result of a self-test, for bug reports."""
    facts = [*collect_versions(), *collect_machine()]
    try:
        facts += [*collect_library(), *collect_devices()]
        self_test = run_self_test()
    except AfterglowError as error:
        facts.append(("library", str(error)))
        self_test = {"library": "cannot be loaded"}
    healthy = all(outcome == "ok" for outcome in self_test.values())
    if as_json:
        print(json.dumps({"facts": dict(facts), "self_test": self_test, "healthy": healthy}))
    else:
        print_report(facts, self_test)
    raise typer.Exit(0 if healthy else 1)


def print_report(facts: list[Fact], self_test: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    for name, outcome in self_test.items():
        status = "[green]ok[/]" if outcome == "ok" else f"[red]failed[/] {outcome}"
        table.add_row(f"self-test {name}", status)
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
    reported = "unknown features"
    if features is not None:
        reported = " ".join(feature for feature in REPORTED_CPU_FEATURES if feature in features)
    yield "processor", f"{cpu.get_architecture()}, {psutil.cpu_count(logical=False)} cores, {reported}"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    yield "models in", str(registry.models_directory())
    yield "cache in", str(get_cache_directory(""))
    yield "data in", str(get_data_directory(""))
    yield "settings in", str(get_settings_path())
    yield "models", ", ".join(model.name for model in registry.list_installed()) or "none: run `afterglow models pull`"


def collect_library() -> Iterator[Fact]:
    library = get_library()
    yield "llama.cpp", library.build
    yield "library", f"{library.location.path} ({library.location.reason})"
    yield "compiled for", library.decode_string(library.symbols.llama_print_system_info()).strip(" |\n")
    yield "MTP", "available" if library.supports_mtp else "not exported by this build"


def collect_devices() -> Iterator[Fact]:
    devices = list_devices()
    for device in devices:
        free_memory = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
        yield f"device {device.name}", f"{device.description} ({device.kind}, {device.backend}, {free_memory})"
    extras = [extra for tool, extra in GPU_TOOLS.items() if shutil.which(tool) and has_gpu(tool)]
    uses_gpu = any("gpu" in device.kind for device in devices)
    if extras and not uses_gpu:
        yield "GPU", f"present but unused: run {format_install_command(extras[0])} (needs Python 3.12 or newer)"
    elif not uses_gpu:
        yield "GPU", "none found"


def has_gpu(tool: str) -> bool:
    """Return whether the vendor's tool finds a GPU. The tool is often installed on machines without one."""
    try:
        return subprocess.run([tool], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run_self_test() -> dict[str, str]:
    """Run the self-test in a child process. Return the outcome of each check, or how the process ended."""
    command = [sys.executable, "-m", "afterglow.cli.selftest"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"process": f"took longer than {SELF_TEST_TIMEOUT_SECONDS} s"}
    if child.returncode < 0:
        return {"process": f"terminated by {signal.Signals(-child.returncode).name}"}
    try:
        outcome: dict[str, str] = json.loads(child.stdout)
    except ValueError:
        return {"process": (child.stderr.strip().splitlines() or ["printed nothing"])[-1]}
    return outcome
