"""`afterglow models`: list, pull and remove models, and say where one is."""

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

from afterglow.registry import (
    CATALOG,
    DEFAULT_MODEL,
    DownloadProgress,
    discover_models,
    find_removable,
    list_installed,
    parse_name,
    pull,
    remove,
    resolve,
)

NAME_HELP = "A name from the list, or owner/repo:file.gguf of a Hugging Face repository."

app = typer.Typer(help="List, pull and remove models.")

ModelNamePositional = Annotated[str, typer.Argument(help=NAME_HELP)]


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List, pull and remove models; without a command: list."""
    if context.invoked_subcommand is None:
        print_models()


@app.command("list")
def list_models() -> None:
    """List the models that are known and those on this machine, other programs' too."""
    print_models()


@app.command("pull")
def pull_model(name: Annotated[str, typer.Argument(help=NAME_HELP)] = DEFAULT_MODEL) -> None:
    """Fetch a model unless it is there already, and print its path."""
    with show_progress(name) as progress:
        path = pull(name, progress)
    typer.echo(path)


@app.command("remove")
def remove_model(
    name: ModelNamePositional, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
) -> None:
    """Delete a pulled model. Files of other programs are refused."""
    model = find_removable(name)
    if not yes:
        typer.confirm(f"Delete {model.path} ({decimal(model.size)})?", abort=True, err=True)
    gone = remove(name)
    typer.echo(f"removed {gone.path} ({decimal(gone.size)})", err=True)


@app.command("path")
def print_model_path(name: ModelNamePositional) -> None:
    """Print where a model is on this machine."""
    typer.echo(resolve(name))


def print_models() -> None:
    """Print the list: a table on a terminal, else a line per model with tabs between its four fields."""
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
    """Name, size, where from and whether it is here: what is pulled, what could be, what other programs have."""
    here = list_installed()
    paths = {model.path.name for model in here}
    for model in here:
        entry = parse_name(model.name)
        yield model.name, decimal(model.size), entry.source.label if entry else str(model.path.parent), "yes"
    for entry in CATALOG.values():
        if entry.source.filename not in paths:
            yield entry.name, decimal(entry.source.size) if entry.source.size else "?", entry.source.label, "no"
    for model in discover_models():
        yield model.name, decimal(model.size), model.program, "yes"


@contextmanager
def show_progress(name: str) -> Iterator[DownloadProgress]:
    """Show the progress on stderr: a bar on a terminal, else a line at each tenth of the way."""
    if not sys.stderr.isatty():
        yield ProgressLines(name)
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ProgressLines:
    """Progress for logs: says little, and nothing twice."""

    def __init__(self, name: str) -> None:
        self.name, self.last_tenth = name, -1

    def __call__(self, done: int, total: int | None) -> None:
        """Print a line where a further tenth has been reached."""
        tenth = 10 * done // total if total else 0
        if tenth > self.last_tenth:
            self.last_tenth = tenth
            whole = f" of {decimal(total)}" if total else ""
            typer.echo(f"{self.name}: {decimal(done)}{whole}", err=True)
