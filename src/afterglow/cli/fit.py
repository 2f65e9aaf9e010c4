"""`afterglow fit`: what would be chosen for a model on this machine, and why, without loading it."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from afterglow import registry
from afterglow.api.fit import FitPlan
from afterglow.api.load import build_engine_settings, plan_load, resolve_draft
from afterglow.api.options import parse_bytes
from afterglow.api.quantization import choose_quantization
from afterglow.cli import options
from afterglow.cli.settings import load_command_settings
from afterglow.errors import InvalidArgument, InvalidModel, ModelNotFound
from afterglow.llama.gguf.header import MAX_HEADER_BYTES, read_header
from afterglow.llama.library.devices import MachineMemory, measure_memory
from afterglow.registry import HubFile

FIRST_HEADER_BYTES = 16 * 1024**2  # contains the header of almost every model


@options.accept_settings(options.MODEL_OPTIONS)
def fit(
    command: typer.Context,
    model: options.ModelArgument = None,
    ram: Annotated[
        str | None, typer.Option(help="Free RAM to plan for, e.g. 16GiB. Default: what is free now.")
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Free memory of a GPU to plan for, e.g. 24GiB. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the context, cache and devices that are chosen for a model, and why. Nothing is loaded.

    Of a model on the hub that is not on this machine, only the header is downloaded. A model in a wheel, e.g. smollm2,
    must be pulled before.
    """
    settings = load_command_settings(command)
    load_options = settings.load_options
    engine_settings = build_engine_settings(None, load_options, ("speculation", "deterministic"), label="")
    draft = resolve_draft(load_options["draft"], fetch=False)
    memory = parse_memory(ram, gpu or [])
    with open_header(settings.model, memory) as path:
        plan = plan_load(path, load_options, engine_settings, draft=draft, memory=memory)
    if as_json:
        return typer.echo(json.dumps({"model": settings.model, **plan.describe()}))
    if sys.stdout.isatty():
        return Console().print(build_fit_table(plan), markup=False, highlight=False)
    for row in iter_rows(plan):
        typer.echo("\t".join(row))


@contextlib.contextmanager
def open_header(name: str, memory: MachineMemory | None = None) -> Iterator[Path]:
    """Yield the file of a model, or a file with the header of a model on the hub.

    Its other parts and its projector are beside it. The quantization is the one that a pull chooses with `memory`.
    """
    path = find_model(name)
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="afterglow-fit-") as directory:
        files = registry.list_hub_files(name, partial(choose_quantization, memory=memory))
        paths = [fetch_header(file, Path(directory)) for file in files]
        yield paths[0]


def find_model(name: str) -> Path | None:
    """Return the file of a model on this machine; None if it can be fetched."""
    try:
        return registry.resolve(name)
    except ModelNotFound:
        if registry.parse_name(name) is None:
            raise
    return None


def fetch_header(file: HubFile, directory: Path) -> Path:
    """Download the header of a file: its first bytes, and more of them if they do not contain it."""
    for nbytes in (FIRST_HEADER_BYTES, MAX_HEADER_BYTES):
        path = registry.fetch_head(file, nbytes, directory)
        with contextlib.suppress(InvalidModel):
            read_header(path)
            break
    return path


def parse_memory(ram: str | None, gpus: list[str]) -> MachineMemory | None:
    """Return the memory that the flags name; None without them: the memory that is free now."""
    if ram is None and not gpus:
        return None
    try:
        gpu_bytes = tuple(parse_bytes(text) for text in gpus)
        ram_bytes = measure_memory().ram_bytes if ram is None else parse_bytes(ram)
    except ValueError:
        raise InvalidArgument("--ram", "and --gpu must be sizes, e.g. 16GiB") from None
    return MachineMemory(ram_bytes=ram_bytes, gpu_bytes=gpu_bytes)


# --- display


def iter_rows(plan: FitPlan) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the lines of a plan as text: what, value, RAM, GPU, why; the sum is the last one."""
    for line in plan.lines:
        yield line.name, line.value, format_bytes(line.ram_bytes), format_bytes(line.gpu_bytes), line.reason
    free = f"{format_bytes(plan.memory.ram_bytes)} RAM"
    if plan.memory.gpu_bytes:
        free += f", {format_bytes(sum(plan.memory.gpu_bytes))} GPU"
    yield "total", "", format_bytes(plan.ram_bytes), format_bytes(plan.gpu_bytes), f"of {free} free"


def build_fit_table(plan: FitPlan) -> Table:
    """Return a plan as a table for a terminal. Without a GPU there is no column for one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("what", "chosen", "RAM", "GPU", "why"):
        if name != "GPU" or plan.memory.gpu_bytes:
            table.add_column(name, justify="right" if name in ("RAM", "GPU") else "left", overflow="fold")
    for name, value, ram, gpu, reason in iter_rows(plan):
        table.add_row(name, value, ram, *([gpu] if plan.memory.gpu_bytes else []), reason)
    return table


def format_summary(plan: FitPlan) -> str:
    """Return a plan as one line.

    >>> from afterglow.api.fit import FitPlan
    >>> options = {"context": 8192, "sequences": 4, "cache_type_k": "f16", "kv_unified": False}
    >>> memory = MachineMemory(ram_bytes=8 * 1024**3)
    >>> format_summary(
    ...     FitPlan(options=options, chosen=frozenset(), lines=(), ram_bytes=1024**3, gpu_bytes=0, memory=memory)
    ... )
    'context 8,192, 4 sequences, KV cache f16, 1.0 GiB of RAM'
    """
    options = plan.options
    sequences = "1 sequence" if options["sequences"] == 1 else f"{options['sequences']} sequences"
    shared = " that share it" if options["kv_unified"] else ""
    gpu = f", {format_bytes(plan.gpu_bytes)} of GPU memory" if plan.gpu_bytes else ""
    text = f"context {options['context']:,}, {sequences}{shared}, KV cache {options['cache_type_k']}"
    return f"{text}, {format_bytes(plan.ram_bytes)} of RAM{gpu}"


def format_bytes(nbytes: int) -> str:
    """Return bytes in MiB or GiB; empty for 0.

    >>> format_bytes(0), format_bytes(300 * 1024**2), format_bytes(3 * 1024**3)
    ('', '300 MiB', '3.0 GiB')
    """
    if not nbytes:
        return ""
    return f"{nbytes / 1024**3:.1f} GiB" if nbytes >= 1024**3 else f"{max(1, round(nbytes / 1024**2)):,} MiB"
