"""`afterglow explain`: how much of a prompt is cached on disk, and why not more."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from afterglow.api.load import read_chat_template
from afterglow.chat.chat import Chat, ChatOptions
from afterglow.chat.miss_reasons import explain_miss
from afterglow.cli import cache, options
from afterglow.cli.open_model import resolve_or_pull
from afterglow.cli.settings import load_command_settings
from afterglow.cli.standard_input import read_standard_input
from afterglow.engine.inspect import disk
from afterglow.errors import InvalidArgument
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.paths import get_cache_directory


@options.accept_settings(["chat_template"])
def explain(
    command: typer.Context,
    prompt_file: Annotated[
        Path,
        typer.Argument(help="Text file, or JSON: a list of messages or a request body. `-` reads standard input."),
    ],
    model: options.ModelOption = None,
    directory: cache.DirectoryOption = None,
    as_json: cache.JsonFlag = False,
) -> None:
    """Explain how much of a prompt is cached on disk, where it diverges from the cache, and the likely reason."""
    settings = load_command_settings(command)
    path = resolve_or_pull(settings.model)
    with LlamaModel.load(path, ModelSettings(vocab_only=True)) as loaded:
        vocabulary = loaded.vocabulary
        prompt = read_prompt(prompt_file)
        if isinstance(prompt, str):
            tokens = vocabulary.tokenize(prompt, add_special=True)
        else:
            with Chat(vocabulary, read_chat_template(settings.chat_template) or loaded.get_chat_template()) as chat:
                tokens = list(chat.plan(prompt.pop("messages"), parse_chat_options(prompt)).prompt.tokens)
        if not tokens:
            raise InvalidArgument("prompt_file", "has no tokens")
        nearest = find_nearest_prefix(directory or get_cache_directory("prefix"), path, tokens)

        def detokenize(entries: Iterable[int]) -> str:
            text_tokens = [entry for entry in entries if entry >= 0]
            return vocabulary.detokenize(text_tokens, special=True).decode("utf-8", "replace")

        shared = nearest.explanation.shared_entries
        report = explain_miss(
            nearest.explanation,
            shared_text=detokenize(tokens[:shared]),
            prompt_text=detokenize(tokens[shared:]),
            cached_text=detokenize(nearest.cached_entries),
        )
    if as_json:
        typer.echo(json.dumps({**asdict(nearest.explanation), **asdict(report)}))
    else:
        typer.echo(report.message)


def find_nearest_prefix(directory: Path, path: Path, tokens: list[int]) -> disk.NearestPrefix:
    """Return the stored prefix of this model that shares most entries with the prompt."""
    models = [stored.model for stored in cache.list_stored_models(directory) if stored.name == str(path)]
    entries = np.asarray(tokens, dtype=np.int64)
    return disk.find_nearest(directory, models, entries) if models else disk.build_miss(entries)


def read_prompt(path: Path) -> str | dict[str, Any]:
    """Read a prompt: plain text, or a conversation as a JSON list or an object with `messages`."""
    try:
        text = read_standard_input() if str(path) == "-" else path.read_text()
    except (OSError, ValueError) as error:
        raise InvalidArgument("prompt_file", f"{path} cannot be read: {error}") from None
    if path.suffix != ".json" and text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        if path.suffix != ".json":
            return text
        raise InvalidArgument("prompt_file", f"{path} is not JSON: {error}") from None
    body = {"messages": value} if isinstance(value, list) else value
    if not isinstance(body, dict) or "messages" not in body:
        raise InvalidArgument("prompt_file", "must be text, a list of messages, or an object with `messages`")
    return body


def parse_chat_options(body: dict[str, Any]) -> ChatOptions:
    """Parse the fields of a request body that affect the prompt."""
    effort = body.get("reasoning", body.get("reasoning_effort"))
    return ChatOptions(
        tools=body.get("tools") or (), reasoning=effort, chat_template_kwargs=body.get("chat_template_kwargs") or {}
    )
