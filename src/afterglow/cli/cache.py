"""`afterglow cache`: what is kept on disk of what was computed; clear, pin, verify, export and import it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from afterglow import registry
from afterglow.chat.missing import first_words
from afterglow.closing import Closing
from afterglow.engine import cache as kept
from afterglow.engine import disk_view
from afterglow.engine.cache import Stored
from afterglow.engine.disk_archive import export_archive, import_archive
from afterglow.engine.disk_view import StoredConversation
from afterglow.errors import AfterglowError, ModelNotFound
from afterglow.llama.model import Model, ModelSettings
from afterglow.paths import cache_directory

SHOWN = 50  # characters of a conversation's beginning
MOST = 30  # conversations in a table; `--all` shows more
UNITS = (("d", 86_400), ("h", 3600), ("min", 60))

app = typer.Typer(help="What is kept on disk of what was computed.")

Directory = Annotated[
    Path | None, typer.Option(help="Another directory than afterglow's own.", show_default=False, file_okay=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
ModelName = Annotated[
    str | None, typer.Argument(help="A name, a path, or the beginning of a digest. None: all.", show_default=False)
]
Id = Annotated[str, typer.Argument(help="The beginning of an id that `afterglow cache` shows.")]


@app.callback(invoke_without_command=True)
def cache(
    context: typer.Context,
    directory: Directory = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help=f"More than {MOST} conversations.")] = False,
) -> None:
    """What is kept on disk of what was computed; without a command: show it."""
    context.obj = directory or cache_directory("prefix")
    if context.invoked_subcommand is not None:
        return
    models, found = holding(context.obj)
    if as_json:
        typer.echo(json.dumps(as_values(context.obj, models, found)))
    elif not models:
        typer.echo(f"nothing is kept in {context.obj}")
    else:
        show(models, found if everything else found[:MOST], len(found))


@app.command()
def clear(
    context: typer.Context,
    model: ModelName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget what is kept, pinned or not: of one model, or all."""
    models = digests(context.obj, model)
    nbytes = sum(one.nbytes for one in stored(context.obj) if one.model in models)
    if not yes and nbytes:
        typer.confirm(f"Forget {decimal(nbytes)}?", abort=True, err=True)
    freed = disk_view.clear(context.obj, models) if models else 0
    typer.echo(f"{decimal(freed)} are free now", err=True)


@app.command()
def pin(context: typer.Context, id: Id) -> None:
    """Never let go of a conversation on disk, however full it is."""
    found = disk_view.pin(context.obj, id)
    typer.echo(f"pinned {found.id}: {found.entries:,} tokens", err=True)


@app.command()
def unpin(context: typer.Context, id: Id) -> None:
    """Take a pin back."""
    found = disk_view.pin(context.obj, id, pinned=False)
    typer.echo(f"{found.id} may go again", err=True)


@app.command()
def verify(context: typer.Context, as_json: AsJson = False) -> None:
    """Check every byte of every file. What is broken is removed; nothing else depends on it."""
    result = kept.verify(context.obj)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        typer.echo(f"{result.checked:,} files checked, {result.broken:,} were broken and are gone")


@app.command("export")
def export_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A new file.", dir_okay=False)],
    model: Annotated[str | None, typer.Option(help="Only of this model.", show_default=False)] = None,
) -> None:
    """Write what is kept into one file. Whoever has it can read what was said."""
    count = export_archive(context.obj, file, digests(context.obj, model))
    typer.echo(f"{count:,} segments and checkpoints in {file} ({decimal(file.stat().st_size)})", err=True)


@app.command("import")
def import_(
    context: typer.Context, file: Annotated[Path, typer.Argument(help="What `export` wrote.", dir_okay=False)]
) -> None:
    """Take in what `export` wrote, on this machine or another. Only from somebody you trust: answers come of it."""
    typer.echo(f"{import_archive(context.obj, file):,} segments and checkpoints taken in", err=True)


# --- what it is about


def stored(directory: Path) -> list[Stored]:
    """What a directory holds by model; nothing where it is not there yet."""
    return kept.stored(directory) if directory.exists() else []


def holding(directory: Path) -> tuple[list[Stored], list[StoredConversation]]:
    """The models and the conversations in a directory."""
    return stored(directory), disk_view.conversations(directory) if directory.exists() else []


def digests(directory: Path, model: str | None) -> set[str]:
    """Which models in a directory are meant."""
    found = stored(directory)
    if model is None:
        return {one.model for one in found}
    names = {model}
    with contextlib.suppress(AfterglowError):
        names.add(str(registry.resolve(model)))
    chosen = {one.model for one in found if one.name in names or shown_name(one) == model}
    chosen |= {one.model for one in found if len(model) >= 6 and one.model.startswith(model.lower())}
    if not chosen:
        known = ", ".join(sorted({shown_name(one) for one in found})) or "nothing"
        raise ModelNotFound(model, f"{directory} has {known}")
    return chosen


def shown_name(model: Stored) -> str:
    """What people call a model."""
    known = {str(one.path): one.name for one in registry.installed()}
    return known.get(model.name) or Path(model.name).stem or model.model[:12]


class Beginnings(Closing):
    """The first words of conversations, in the vocabulary of their model's file; token ids where that is not here."""

    def __init__(self, models: Iterable[Stored]) -> None:
        self._files = {one.model: Path(one.name) for one in models if one.name}
        self._vocabularies: dict[Path, Model | None] = {}

    def text(self, conversation: StoredConversation) -> str:
        """What a conversation begins with."""
        model = self._model(self._files.get(conversation.model, Path()))
        tokens = [token for token in conversation.first if token >= 0]  # the others are pictures
        if model is None or any(token >= model.vocabulary.size for token in tokens):
            return " ".join(map(str, conversation.first[:8]))
        return model.vocabulary.detokenize(tokens, special=True).decode("utf-8", "replace")

    def close(self) -> None:
        for model in self._vocabularies.values():
            if model is not None:
                model.close()

    def _model(self, path: Path) -> Model | None:
        if path not in self._vocabularies:
            try:
                self._vocabularies[path] = Model.load(path, ModelSettings(vocabulary_only=True))
            except AfterglowError:
                self._vocabularies[path] = None
        return self._vocabularies[path]


# --- how it is shown


def as_values(directory: Path, models: list[Stored], found: list[StoredConversation]) -> dict[str, Any]:
    """Everything, for scripts."""
    with Beginnings(models) as beginnings:
        return {
            "directory": str(directory),
            "models": [{**asdict(one), "name": shown_name(one), "file": one.name} for one in models],
            "conversations": [{**asdict(one), "begins": beginnings.text(one)} for one in found],
        }


def show(models: list[Stored], found: list[StoredConversation], count: int) -> None:
    """Two tables: models, and conversations by their first words."""
    console = Console(highlight=False)
    names = {one.model: shown_name(one) for one in models}
    table = _table("model", "tokens", "bytes", "age", "digest")
    for one in models:
        table.add_row(names[one.model], f"{one.entries:,}", decimal(one.nbytes), span(one.age), one.model[:12])
    console.print(table, markup=False)
    console.print()
    table = _table("conversation", "tokens", "bytes", "age", "hits", "saved", "id", "model")
    with Beginnings(models) as beginnings:
        for conversation in found:
            words = " ".join(first_words(beginnings.text(conversation)).split())
            shown = words if len(words) <= SHOWN else words[:SHOWN] + "…"
            table.add_row(shown, *_numbers(conversation), names[conversation.model])
    console.print(table, markup=False)
    if count > len(found):
        console.print(f"and {count - len(found):,} more: --all shows them")


def _numbers(one: StoredConversation) -> tuple[str, ...]:
    pinned = " pinned" if one.pinned else ""
    saved = f"{one.seconds_saved:,.1f} s"
    return f"{one.entries:,}", decimal(one.nbytes), span(one.age), f"{one.hits:,}", saved, one.id + pinned


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for other in others:
        numeric = other not in ("id", "model", "digest")
        table.add_column(other, justify="right" if numeric else "left", no_wrap=True)
    return table


def span(seconds: float) -> str:
    """A time that people can read.

    >>> span(7300), span(12)
    ('2 h', '12 s')
    """
    for unit, length in UNITS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{int(seconds)} s"
