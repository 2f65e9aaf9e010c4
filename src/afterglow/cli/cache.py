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
from afterglow.chat.miss_reasons import find_first_user_text
from afterglow.closeable import Closeable
from afterglow.engine.inspect import cache as kept
from afterglow.engine.inspect import disk
from afterglow.engine.inspect.archive import export_archive, import_archive
from afterglow.engine.inspect.cache import StoredModel
from afterglow.engine.inspect.disk import StoredConversation
from afterglow.errors import AfterglowError, ModelNotFound
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.paths import get_cache_directory

MAX_PREVIEW_CHARACTERS = 50  # characters of a conversation's beginning
MAX_CONVERSATIONS_SHOWN = 30  # conversations in a table; `--all` shows more
TIME_UNITS_SECONDS = (("d", 86_400), ("h", 3600), ("min", 60))

app = typer.Typer(help="What is kept on disk of what was computed.")

DirectoryOption = Annotated[
    Path | None, typer.Option(help="Another directory than afterglow's own.", show_default=False, file_okay=False)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="For scripts.")]
ModelNameArgument = Annotated[
    str | None, typer.Argument(help="A name, a path, or the beginning of a digest. None: all.", show_default=False)
]
CacheIdArgument = Annotated[str, typer.Argument(help="The beginning of an id that `afterglow cache` shows.")]


@app.callback(invoke_without_command=True)
def cache(
    context: typer.Context,
    directory: DirectoryOption = None,
    as_json: JsonFlag = False,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"More than {MAX_CONVERSATIONS_SHOWN} conversations.")
    ] = False,
) -> None:
    """What is kept on disk of what was computed; without a command: show it."""
    context.obj = directory or get_cache_directory("prefix")
    if context.invoked_subcommand is not None:
        return
    models, found = list_contents(context.obj)
    if as_json:
        typer.echo(json.dumps(to_json(context.obj, models, found)))
    elif not models:
        typer.echo(f"nothing is kept in {context.obj}")
    else:
        print_tables(models, found if show_all else found[:MAX_CONVERSATIONS_SHOWN], len(found))


@app.command()
def clear(
    context: typer.Context,
    model: ModelNameArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget what is kept, pinned or not: of one model, or all."""
    models = find_digests(context.obj, model)
    nbytes = sum(one.nbytes for one in list_stored_models(context.obj) if one.model in models)
    if not yes and nbytes:
        typer.confirm(f"Forget {decimal(nbytes)}?", abort=True, err=True)
    freed = disk.clear(context.obj, models) if models else 0
    typer.echo(f"{decimal(freed)} are free now", err=True)


@app.command()
def pin(context: typer.Context, id: CacheIdArgument) -> None:
    """Never let go of a conversation on disk, however full it is."""
    found = disk.pin(context.obj, id)
    typer.echo(f"pinned {found.id}: {found.entries:,} tokens", err=True)


@app.command()
def unpin(context: typer.Context, id: CacheIdArgument) -> None:
    """Take a pin back."""
    found = disk.pin(context.obj, id, pinned=False)
    typer.echo(f"{found.id} may go again", err=True)


@app.command()
def verify(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Check every byte of every file. What is broken is removed; nothing else depends on it."""
    result = kept.verify_files(context.obj)
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
    count = export_archive(context.obj, file, find_digests(context.obj, model))
    typer.echo(f"{count:,} segments and checkpoints in {file} ({decimal(file.stat().st_size)})", err=True)


@app.command("import")
def import_(
    context: typer.Context, file: Annotated[Path, typer.Argument(help="What `export` wrote.", dir_okay=False)]
) -> None:
    """Take in what `export` wrote, on this machine or another. Only from somebody you trust: answers come of it."""
    typer.echo(f"{import_archive(context.obj, file):,} segments and checkpoints taken in", err=True)


# --- what it is about


def list_stored_models(directory: Path) -> list[StoredModel]:
    """What a directory holds by model; nothing where it is not there yet."""
    return kept.list_stored_models(directory) if directory.exists() else []


def list_contents(directory: Path) -> tuple[list[StoredModel], list[StoredConversation]]:
    """The models and the conversations in a directory."""
    return list_stored_models(directory), disk.list_conversations(directory) if directory.exists() else []


def find_digests(directory: Path, model: str | None) -> set[str]:
    """Which models in a directory are meant."""
    found = list_stored_models(directory)
    if model is None:
        return {one.model for one in found}
    names = {model}
    with contextlib.suppress(AfterglowError):
        names.add(str(registry.resolve(model)))
    chosen = {one.model for one in found if one.name in names or get_display_name(one) == model}
    chosen |= {one.model for one in found if len(model) >= 6 and one.model.startswith(model.lower())}
    if not chosen:
        known = ", ".join(sorted({get_display_name(one) for one in found})) or "nothing"
        raise ModelNotFound(model, f"{directory} has {known}")
    return chosen


def get_display_name(model: StoredModel) -> str:
    """What people call a model."""
    known = {str(one.path): one.name for one in registry.list_installed()}
    return known.get(model.name) or Path(model.name).stem or model.model[:12]


class PromptPreviews(Closeable):
    """The first words of conversations, in the vocabulary of their model's file; token ids where that is not here."""

    def __init__(self, models: Iterable[StoredModel]) -> None:
        self._model_files = {one.model: Path(one.name) for one in models if one.name}
        self._vocabularies: dict[Path, LlamaModel | None] = {}

    def render(self, conversation: StoredConversation) -> str:
        """What a conversation begins with."""
        model = self._load_vocabulary(self._model_files.get(conversation.model, Path()))
        tokens = [token for token in conversation.first_entries if token >= 0]  # the others are pictures
        if model is None or any(token >= model.vocabulary.size for token in tokens):
            return " ".join(map(str, conversation.first_entries[:8]))
        return model.vocabulary.detokenize(tokens, special=True).decode("utf-8", "replace")

    def close(self) -> None:
        for model in self._vocabularies.values():
            if model is not None:
                model.close()

    def _load_vocabulary(self, path: Path) -> LlamaModel | None:
        if path not in self._vocabularies:
            try:
                self._vocabularies[path] = LlamaModel.load(path, ModelSettings(vocab_only=True))
            except AfterglowError:
                self._vocabularies[path] = None
        return self._vocabularies[path]


# --- how it is shown


def to_json(directory: Path, models: list[StoredModel], conversations: list[StoredConversation]) -> dict[str, Any]:
    """Everything, for scripts."""
    with PromptPreviews(models) as beginnings:
        return {
            "directory": str(directory),
            "models": [{**asdict(one), "name": get_display_name(one), "file": one.name} for one in models],
            "conversations": [{**asdict(one), "begins": beginnings.render(one)} for one in conversations],
        }


def print_tables(models: list[StoredModel], conversations: list[StoredConversation], total: int) -> None:
    """Two tables: models, and conversations by their first words."""
    console = Console(highlight=False)
    names = {one.model: get_display_name(one) for one in models}
    table = _make_table("model", "tokens", "bytes", "age", "digest")
    for one in models:
        table.add_row(
            names[one.model], f"{one.entries:,}", decimal(one.nbytes), format_age(one.idle_seconds), one.model[:12]
        )
    console.print(table, markup=False)
    console.print()
    table = _make_table("conversation", "tokens", "bytes", "age", "hits", "saved", "id", "model")
    with PromptPreviews(models) as beginnings:
        for conversation in conversations:
            words = " ".join(find_first_user_text(beginnings.render(conversation)).split())
            shown = words if len(words) <= MAX_PREVIEW_CHARACTERS else words[:MAX_PREVIEW_CHARACTERS] + "…"
            table.add_row(shown, *_format_numbers(conversation), names[conversation.model])
    console.print(table, markup=False)
    if total > len(conversations):
        console.print(f"and {total - len(conversations):,} more: --all shows them")


def _format_numbers(conversation: StoredConversation) -> tuple[str, ...]:
    pinned = " pinned" if conversation.pinned else ""
    saved = f"{conversation.seconds_saved:,.1f} s"
    return (
        f"{conversation.entries:,}",
        decimal(conversation.nbytes),
        format_age(conversation.idle_seconds),
        f"{conversation.hits:,}",
        saved,
        conversation.id + pinned,
    )


def _make_table(first_column: str, *other_columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first_column, overflow="fold")
    for other in other_columns:
        numeric = other not in ("id", "model", "digest")
        table.add_column(other, justify="right" if numeric else "left", no_wrap=True)
    return table


def format_age(seconds: float) -> str:
    """A time that people can read.

    >>> span(7300), span(12)
    ('2 h', '12 s')
    """
    for unit, length in TIME_UNITS_SECONDS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{int(seconds)} s"
