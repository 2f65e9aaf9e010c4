"""`afterglow models`: list, pull, search, show, remove and locate models.

`pull`, `list`, `show` and `rm` are also commands.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from afterglow import registry
from afterglow.api.quantization import choose_quantization
from afterglow.api.sampling_defaults import build_sampling_defaults
from afterglow.cli.settings import load_settings
from afterglow.cli.show import describe_sampling
from afterglow.llama.gguf.footprint import Hyperparameters, estimate_footprint
from afterglow.llama.gguf.header import read_header
from afterglow.llama.gguf.probe import list_split_files
from afterglow.llama.gguf.summary import count_parameters, find_quantization, list_tensors
from afterglow.llama.settings import ContextSettings
from afterglow.registry import CATALOG, DEFAULT_MODEL, DownloadProgress, HubMatch

NAME_HELP = "Model name from the list, or owner/repo[:QUANT] or owner/repo:file.gguf of a Hugging Face repository."

app = typer.Typer(help="List, pull, show and remove models.", add_completion=False)

ModelNamePositional = Annotated[str, typer.Argument(help=NAME_HELP)]


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List, pull, show and remove models. Without a command, list them."""
    if context.invoked_subcommand is None:
        print_models()


@app.command("list")
def list_models() -> None:
    """List the models of the catalog and those on this machine, including models of other programs."""
    print_models()


@app.command("pull")
def pull_model(name: Annotated[str, typer.Argument(help=NAME_HELP)] = DEFAULT_MODEL) -> None:
    """Download a model if it is not installed, and print its path."""
    typer.echo(pull_with_progress(name))


@app.command("search")
def search_models(words: Annotated[list[str], typer.Argument(metavar="WORDS", help="Words of the name.")]) -> None:
    """Search the Hugging Face hub for repositories with GGUF files, most downloaded first."""
    matches = registry.search_hub(" ".join(words))
    if not matches:
        typer.echo(f"no repository with GGUF files matches {' '.join(words)!r}", err=True)
    rows = [(match.name, describe_downloads(match), match.licence or "-", describe_access(match)) for match in matches]
    print_table(("name", "downloads", "licence", "access"), rows)


@app.command("remove")
def remove_models(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help=NAME_HELP)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete pulled models. Models of other programs cannot be deleted."""
    for model in [registry.find_removable(name) for name in names]:  # all of them exist before one is deleted
        if not yes:
            typer.confirm(f"Delete {model.path} ({decimal(model.size)})?", abort=True, err=True)
        removed = registry.remove(model.name)
        typer.echo(f"removed {removed.path} ({decimal(removed.size)})", err=True)


@app.command("show")
def show_model(
    name: ModelNamePositional = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the size, quantization and context length of a model, and the sampling that applies by default."""
    path, settings = registry.resolve(name), load_settings()
    facts = {"name": name, **collect_facts(path)}
    defaults = build_sampling_defaults(
        read_header(path).metadata,
        registry.read_ollama_parameters(name),
        settings.sampling_defaults,
        context_length=settings.load_options["context"] or get_trained_context(path),
    )
    if as_json:
        return typer.echo(json.dumps({**facts, "sampling": defaults.describe()}))
    rows = [(key.removesuffix("_bytes").replace("_", " "), format_fact(key, value)) for key, value in facts.items()]
    rows += describe_sampling(defaults)
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False, highlight=False)


@app.command("path")
def print_model_path(name: ModelNamePositional) -> None:
    """Print the path of a model on this machine."""
    typer.echo(registry.resolve(name))


def get_trained_context(path: Path) -> int:
    """Return the context length for which a model was trained."""
    return Hyperparameters(read_header(path)).trained_context


def collect_facts(path: Path) -> dict[str, Any]:
    """Collect what the header of a model file says. A fact that the file does not have is None."""
    headers = [read_header(part) for part in list_split_files(path)]
    metadata = headers[0].metadata
    architecture = metadata.get("general.architecture")
    settings, weights = ContextSettings(), sum(tensor.nbytes for tensor in list_tensors(headers))
    context = estimate_footprint(headers[0], settings).context_bytes
    return {
        "path": str(path),
        "size_bytes": sum(header.file_size for header in headers),
        "title": metadata.get("general.name"),
        "architecture": architecture,
        "parameters": count_parameters(headers),
        "quantization": find_quantization(headers),
        "context_length": metadata.get(f"{architecture}.context_length"),
        "embedding_length": metadata.get(f"{architecture}.embedding_length"),
        "layers": metadata.get(f"{architecture}.block_count"),
        "chat_template": "tokenizer.chat_template" in metadata,
        "license": metadata.get("general.license"),
        "weights_bytes": weights,
        f"memory_with_a_context_of_{settings.cells}_bytes": weights + context,
    }


def format_fact(key: str, value: object) -> str:
    """Return a fact as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int):
        return decimal(value) if key.endswith("_bytes") else f"{value:,}"
    return str(value)


def describe_downloads(match: HubMatch) -> str:
    """Return the number of downloads as text."""
    return "-" if match.downloads is None else f"{match.downloads:,}"


def describe_access(match: HubMatch) -> str:
    """Say whether the terms of a repository must be accepted first."""
    return "gated" if match.gated else "open"


def print_models() -> None:
    """Print the models: a table on a terminal, otherwise one line per model with five tab-separated fields."""
    print_table(("name", "size", "from", "installed", "licence"), build_rows())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows: a table on a terminal, otherwise one line per row with tab-separated fields."""
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column in ("size", "downloads")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def build_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, size, source, installed state and licence of pulled models, the catalog and other programs."""
    installed = registry.list_installed()
    names = {model.name for model in installed}
    for model in installed:
        entry = registry.parse_name(model.name)
        source = entry.source.label if entry else str(model.path.parent)
        yield model.name, decimal(model.size), source, "yes", (entry and entry.licence) or "-"
    for entry in CATALOG.values():
        if entry.name not in names:
            size = "?" if entry.estimated_size is None else decimal(entry.estimated_size)
            size = size if entry.source.size or not entry.estimated_size else f"~{size}"
            state = "yes" if registry.find_pulled(entry) else "no"
            yield entry.name, size, entry.source.label, state, entry.licence or "-"
    for model in registry.discover_models():
        yield model.name, decimal(model.size), model.program, "yes", "-"


def pull_with_progress(name: str) -> Path:
    """Download a model unless it is present, show the progress on stderr, and return its path."""

    def notify(message: str) -> None:
        typer.echo(f"{name}: {message}", err=True)

    with show_progress(name) as progress:
        return registry.pull(name, progress, notify=notify, choose=choose_quantization)


@contextmanager
def show_progress(name: str) -> Iterator[DownloadProgress]:
    """Show download progress on stderr: a bar on a terminal, otherwise a line for each tenth."""
    if not sys.stderr.isatty():
        yield ProgressLines(name)
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ProgressLines:
    """Download progress for logs: one line for each tenth, with the rate and the time left."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.last_tenth, self._clock = name, -1, clock
        self._started: tuple[float, int] | None = None  # an interrupted download starts above 0

    def __call__(self, done: int, total: int | None) -> None:
        """Print a line if a further tenth has been downloaded."""
        self._started = self._started or (self._clock(), done)
        tenth = 10 * done // total if total else 0
        if tenth > self.last_tenth:
            self.last_tenth = tenth
            of_total = f" of {decimal(total)}" if total else ""
            typer.echo(f"{self.name}: {decimal(done)}{of_total}{self._describe_rate(done, total)}", err=True)

    def _describe_rate(self, done: int, total: int | None) -> str:
        start, first = self._started or (0.0, 0)
        seconds = self._clock() - start
        if seconds <= 0 or done <= first:
            return ""
        rate = (done - first) / seconds
        left = f", {timedelta(seconds=round((total - done) / rate))} left" if total and total > done else ""
        return f", {decimal(int(rate))}/s{left}"
