"""`afterglow explain`: what of a prompt is kept on disk, and in plain words why not more."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from afterglow.chat.chat import Chat, ChatOptions
from afterglow.chat.miss_reasons import explain_miss
from afterglow.cli import cache, options
from afterglow.cli.open_model import read_template, resolve_or_pull
from afterglow.cli.settings import load_command_settings
from afterglow.engine.inspect import disk
from afterglow.errors import InvalidArgument
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.paths import get_cache_directory


def explain(
    command: typer.Context,
    prompt_file: Annotated[
        Path,
        typer.Argument(help="A text, or JSON: a list of messages, or a body with `messages`. `-`: standard input."),
    ],
    model: options.ModelOption = None,
    chat_template: options.ChatTemplateOption = None,
    directory: cache.DirectoryOption = None,
    as_json: cache.JsonFlag = False,
) -> None:
    """Say what of a prompt is kept on disk, where it parts from what is kept, and why that is likely."""
    chosen = load_command_settings(command)
    path = resolve_or_pull(chosen.model)
    with LlamaModel.load(path, ModelSettings(vocab_only=True)) as loaded:
        vocabulary = loaded.vocabulary
        written = read_prompt(prompt_file)
        if isinstance(written, str):
            tokens = vocabulary.tokenize(written, add_special=True)
        else:
            with Chat(vocabulary, read_template(chosen.chat_template) or loaded.get_chat_template()) as talk:
                tokens = list(talk.plan(written.pop("messages"), parse_chat_options(written)).prompt.tokens)
        if not tokens:
            raise InvalidArgument("prompt_file", "has no token")
        found = find_nearest_prefix(directory or get_cache_directory("prefix"), path, tokens)
        at = found.explanation.shared_entries

        def text(some: Any) -> str:
            return vocabulary.detokenize([token for token in some if token >= 0], special=True).decode(
                "utf-8", "replace"
            )

        words = explain_miss(
            found.explanation,
            shared_text=text(tokens[:at]),
            prompt_text=text(tokens[at:]),
            cached_text=text(found.cached_entries),
        )
    if as_json:
        typer.echo(json.dumps({**asdict(found.explanation), **asdict(words)}))
    else:
        typer.echo(words.message)


def find_nearest_prefix(directory: Path, path: Path, tokens: list[int]) -> disk.NearestPrefix:
    """What is kept of this model and has most in common with the prompt."""
    models = [one.model for one in cache.list_stored_models(directory) if one.name == str(path)]
    ids = np.asarray(tokens, dtype=np.int64)
    return disk.find_nearest(directory, models, ids) if models else disk.build_miss(ids)


def read_prompt(path: Path) -> str | dict[str, Any]:
    """A prompt: text as it is, or a conversation, which is a JSON list or an object with `messages`."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
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
    written = {"messages": value} if isinstance(value, list) else value
    if not isinstance(written, dict) or "messages" not in written:
        raise InvalidArgument("prompt_file", "must be a text, a list of messages, or an object with `messages`")
    return written


def parse_chat_options(body: dict[str, Any]) -> ChatOptions:
    """What of a request's body makes its prompt; sampling does not."""
    effort = body.get("reasoning", body.get("reasoning_effort"))
    return ChatOptions(
        tools=body.get("tools") or (), reasoning=effort, chat_template_kwargs=body.get("chat_template_kwargs") or {}
    )
