"""`afterglow models`: list, pull, remove, show and locate models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from afterglow import registry
from afterglow.cli.settings import load_settings
from afterglow.cli.show import describe_model
from afterglow.registry import CATALOG, DEFAULT_MODEL, DownloadProgress

NAME_HELP = "Model name from the list, or owner/repo:file.gguf of a Hugging Face repository."

app = typer.Typer(help="List, pull and remove models.")

ModelNamePositional = Annotated[str, typer.Argument(help=NAME_HELP)]


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List, pull and remove models. Without a command, list them."""
    if context.invoked_subcommand is None:
        print_models()


@app.command("list")
def list_models() -> None:
    """List the models of the catalog and those on this machine, including models of other programs."""
    print_models()


@app.command("pull")
def pull_model(name: Annotated[str, typer.Argument(help=NAME_HELP)] = DEFAULT_MODEL) -> None:
    """Download a model if it is not installed, and print its path."""
    with show_progress(name) as progress:
        path = registry.pull(name, progress)
    typer.echo(path)


@app.command("remove")
def remove_model(
    name: ModelNamePositional,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a pulled model. Models of other programs cannot be deleted."""
    model = registry.find_removable(name)
    if not yes:
        typer.confirm(f"Delete {model.path} ({decimal(model.size)})?", abort=True, err=True)
    removed = registry.remove(name)
    typer.echo(f"removed {removed.path} ({decimal(removed.size)})", err=True)


@app.command("path")
def print_model_path(name: ModelNamePositional) -> None:
    """Print the path of a model on this machine."""
    typer.echo(registry.resolve(name))


@app.command("show")
def show_model(name: ModelNamePositional = DEFAULT_MODEL) -> None:
    """Show the file of a model, its context, and the sampling that applies by default."""
    for line in describe_model(name, load_settings()):
        typer.echo(line)


def print_models() -> None:
    """Print the models: a table on a terminal, otherwise one line per model with four tab-separated fields."""
    if not sys.stdout.isatty():
        for row in build_rows():
            typer.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    table.add_column("installed", no_wrap=True)
    for row in build_rows():
        table.add_row(*row)
    Console().print(table, markup=False)


def build_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, size, source and installed state of pulled models, catalog models and models of other programs."""
    installed = registry.list_installed()
    filenames = {model.path.name for model in installed}
    for model in installed:
        entry = registry.parse_name(model.name)
        yield model.name, decimal(model.size), entry.source.label if entry else str(model.path.parent), "yes"
    for entry in CATALOG.values():
        if entry.source.filename not in filenames:
            yield entry.name, decimal(entry.source.size) if entry.source.size else "?", entry.source.label, "no"
    for model in registry.discover_models():
        yield model.name, decimal(model.size), model.program, "yes"


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
    """Download progress for logs: one line for each tenth."""

    def __init__(self, name: str) -> None:
        self.name, self.last_tenth = name, -1

    def __call__(self, done: int, total: int | None) -> None:
        """Print a line if a further tenth has been downloaded."""
        tenth = 10 * done // total if total else 0
        if tenth > self.last_tenth:
            self.last_tenth = tenth
            of_total = f" of {decimal(total)}" if total else ""
            typer.echo(f"{self.name}: {decimal(done)}{of_total}", err=True)
