"""`afterglow cache`: list, clear, pin, verify, export and import the prefix cache on disk."""

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
from afterglow.chat.replay_disk import remove_replays
from afterglow.chat.summaries import remove_summaries
from afterglow.closeable import Closeable
from afterglow.engine.inspect import cache as inspect_cache
from afterglow.engine.inspect import disk
from afterglow.engine.inspect.archive import export_archive, import_archive
from afterglow.engine.inspect.cache import StoredModel
from afterglow.engine.inspect.disk import StoredConversation
from afterglow.errors import AfterglowError, ModelNotFound
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.paths import get_cache_directory

MAX_PREVIEW_CHARACTERS = 50
MAX_CONVERSATIONS_SHOWN = 30  # without `--all`
TIME_UNITS_SECONDS = (("d", 86_400), ("h", 3600), ("min", 60))

app = typer.Typer(help="Manage the prefix cache on disk.", add_completion=False)

DirectoryOption = Annotated[
    Path | None, typer.Option(help="Cache directory. Default: afterglow's own.", show_default=False, file_okay=False)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelNameArgument = Annotated[
    str | None, typer.Argument(help="Model name, path, or prefix of a digest. Default: all models.", show_default=False)
]
CacheIdArgument = Annotated[str, typer.Argument(help="Prefix of a conversation id shown by `afterglow cache`.")]


@app.callback(invoke_without_command=True)
def cache(
    context: typer.Context,
    directory: DirectoryOption = None,
    as_json: JsonFlag = False,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"Show all conversations, not only the first {MAX_CONVERSATIONS_SHOWN}.")
    ] = False,
) -> None:
    """Manage the prefix cache on disk. Without a command, list its contents."""
    context.obj = directory or get_cache_directory("prefix")
    if context.invoked_subcommand is not None:
        return
    models = list_stored_models(context.obj)
    conversations = disk.list_conversations(context.obj) if context.obj.exists() else []
    if as_json:
        typer.echo(json.dumps(to_json(context.obj, models, conversations)))
    elif not models:
        typer.echo(f"the cache in {context.obj} is empty")
    else:
        shown = conversations if show_all else conversations[:MAX_CONVERSATIONS_SHOWN]
        print_tables(models, shown, len(conversations))


@app.command()
def clear(
    context: typer.Context,
    model: ModelNameArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete the cache of one model or of all models, including pinned conversations.

    The sampled tokens of responses are deleted for all models.
    """
    digests = find_digests(context.obj, model)
    nbytes = sum(stored.nbytes for stored in list_stored_models(context.obj) if stored.model in digests)
    if not yes and nbytes:
        typer.confirm(f"Delete {decimal(nbytes)}?", abort=True, err=True)
    freed = disk.clear(context.obj, digests) if digests else 0
    remove_replays(context.obj)
    remove_summaries(context.obj)
    typer.echo(f"deleted {decimal(freed)}", err=True)


@app.command()
def pin(context: typer.Context, id: CacheIdArgument) -> None:
    """Pin a conversation: it is never evicted from disk."""
    conversation = disk.pin(context.obj, id)
    typer.echo(f"pinned {conversation.id}: {conversation.entries:,} tokens", err=True)


@app.command()
def unpin(context: typer.Context, id: CacheIdArgument) -> None:
    """Unpin a conversation: it can be evicted again."""
    conversation = disk.pin(context.obj, id, pinned=False)
    typer.echo(f"unpinned {conversation.id}", err=True)


@app.command()
def verify(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Verify the checksums of all files and remove damaged ones. Other files do not depend on them."""
    result = inspect_cache.verify_files(context.obj)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        typer.echo(f"checked {result.checked:,} files, removed {result.broken:,} damaged ones")


@app.command("export")
def export_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Archive to create.", dir_okay=False)],
    model: Annotated[str | None, typer.Option(help="Export only this model.", show_default=False)] = None,
) -> None:
    """Export the cache to one archive file. The archive reveals the cached conversations."""
    count = export_archive(context.obj, file, find_digests(context.obj, model))
    typer.echo(f"exported {count:,} blocks and checkpoints to {file} ({decimal(file.stat().st_size)})", err=True)


@app.command("import")
def import_(
    context: typer.Context, file: Annotated[Path, typer.Argument(help="Archive written by `export`.", dir_okay=False)]
) -> None:
    """Import an archive from any machine. Only import archives you trust: responses depend on their contents."""
    typer.echo(f"imported {import_archive(context.obj, file):,} blocks and checkpoints", err=True)


# --- contents


def list_stored_models(directory: Path) -> list[StoredModel]:
    """Return the models in a cache directory; none if the directory does not exist."""
    return inspect_cache.list_stored_models(directory) if directory.exists() else []


def find_digests(directory: Path, model: str | None) -> set[str]:
    """Return the digests of the models that a name, path or digest prefix selects; all if it is None."""
    stored_models = list_stored_models(directory)
    if model is None:
        return {stored.model for stored in stored_models}
    names = {model}
    with contextlib.suppress(AfterglowError):
        names.add(str(registry.resolve(model)))
    digests = {stored.model for stored in stored_models if stored.name in names or get_display_name(stored) == model}
    digests |= {stored.model for stored in stored_models if len(model) >= 6 and stored.model.startswith(model.lower())}
    if not digests:
        known = ", ".join(sorted({get_display_name(stored) for stored in stored_models})) or "no models"
        raise ModelNotFound(model, f"{directory} has {known}")
    return digests


def get_display_name(model: StoredModel) -> str:
    """Return the registry name of a model, or its file name without suffix, or the start of its digest."""
    names = {str(installed.path): installed.name for installed in registry.list_installed()}
    return names.get(model.name) or Path(model.name).stem or model.model[:12]


class PromptPreviews(Closeable):
    """Text previews of conversations, detokenized with the model file; token ids if the file is not available."""

    def __init__(self, models: Iterable[StoredModel]) -> None:
        self._model_files = {stored.model: Path(stored.name) for stored in models if stored.name}
        self._vocabularies: dict[Path, LlamaModel | None] = {}

    def render(self, conversation: StoredConversation) -> str:
        """Return the first text of a conversation."""
        model = self._load_vocabulary(self._model_files.get(conversation.model, Path()))
        tokens = [token for token in conversation.first_entries if token >= 0]  # negative entries are media
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


# --- output


def to_json(directory: Path, models: list[StoredModel], conversations: list[StoredConversation]) -> dict[str, Any]:
    """Return the contents as JSON values."""
    with PromptPreviews(models) as previews:
        return {
            "directory": str(directory),
            "models": [{**asdict(model), "file": model.name, "name": get_display_name(model)} for model in models],
            "conversations": [
                {**asdict(conversation), "preview": previews.render(conversation)} for conversation in conversations
            ],
        }


def print_tables(models: list[StoredModel], conversations: list[StoredConversation], total: int) -> None:
    """Print a table of models and a table of conversations with previews."""
    console = Console(highlight=False)
    names = {model.model: get_display_name(model) for model in models}
    table = _make_table("model", "tokens", "bytes", "age", "digest")
    for model in models:
        age = format_age(model.idle_seconds)
        table.add_row(names[model.model], f"{model.entries:,}", decimal(model.nbytes), age, model.model[:12])
    console.print(table, markup=False)
    console.print()
    table = _make_table("conversation", "tokens", "bytes", "age", "hits", "saved", "id", "model")
    with PromptPreviews(models) as previews:
        for conversation in conversations:
            text = " ".join(find_first_user_text(previews.render(conversation)).split())
            preview = text if len(text) <= MAX_PREVIEW_CHARACTERS else text[:MAX_PREVIEW_CHARACTERS] + "…"
            table.add_row(
                preview,
                f"{conversation.entries:,}",
                decimal(conversation.nbytes),
                format_age(conversation.idle_seconds),
                f"{conversation.hits:,}",
                f"{conversation.seconds_saved:,.1f} s",
                conversation.id + (" pinned" if conversation.pinned else ""),
                names[conversation.model],
            )
    console.print(table, markup=False)
    if total > len(conversations):
        console.print(f"{total - len(conversations):,} more; use --all to show them")


def _make_table(first_column: str, *other_columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first_column, overflow="fold")
    for column in other_columns:
        is_numeric = column not in ("id", "model", "digest")
        table.add_column(column, justify="right" if is_numeric else "left", no_wrap=True)
    return table


def format_age(seconds: float) -> str:
    """Format a duration in its largest unit.

    >>> format_age(7300), format_age(12)
    ('2 h', '12 s')
    """
    for unit, length in TIME_UNITS_SECONDS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{int(seconds)} s"
