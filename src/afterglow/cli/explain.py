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
from afterglow.chat.missing import explain_words
from afterglow.cli import cache, options
from afterglow.cli.opening import local_path, template_text
from afterglow.cli.settings import settings_of
from afterglow.engine import disk_view
from afterglow.errors import InvalidArgument
from afterglow.llama.model import Model, ModelSettings
from afterglow.paths import cache_directory


def explain(
    command: typer.Context,
    prompt_file: Annotated[
        Path,
        typer.Argument(help="A text, or JSON: a list of messages, or a body with `messages`. `-`: standard input."),
    ],
    model: options.ModelFlag = None,
    chat_template: options.Template = None,
    directory: cache.Directory = None,
    as_json: cache.AsJson = False,
) -> None:
    """Say what of a prompt is kept on disk, where it parts from what is kept, and why that is likely."""
    chosen = settings_of(command)
    path = local_path(chosen.model)
    with Model.load(path, ModelSettings(vocabulary_only=True)) as loaded:
        vocabulary = loaded.vocabulary
        written = read(prompt_file)
        if isinstance(written, str):
            tokens = vocabulary.tokenize(written, bos=True)
        else:
            with Chat(vocabulary, template_text(chosen.chat_template) or loaded.chat_template()) as talk:
                tokens = list(talk.plan(written.pop("messages"), options_of(written)).prompt.tokens)
        if not tokens:
            raise InvalidArgument("prompt_file", "has no token")
        found = nearest(directory or cache_directory("prefix"), path, tokens)
        at = found.explanation.shared

        def text(some: Any) -> str:
            return vocabulary.detokenize([token for token in some if token >= 0], special=True).decode(
                "utf-8", "replace"
            )

        words = explain_words(
            found.explanation, before=text(tokens[:at]), ours=text(tokens[at:]), theirs=text(found.theirs)
        )
    if as_json:
        typer.echo(json.dumps({**asdict(found.explanation), **asdict(words)}))
    else:
        typer.echo(words.sentence)


def nearest(directory: Path, path: Path, tokens: list[int]) -> disk_view.Nearest:
    """What is kept of this model and has most in common with the prompt."""
    models = [one.model for one in cache.stored(directory) if one.name == str(path)]
    ids = np.asarray(tokens, dtype=np.int64)
    return disk_view.nearest(directory, models, ids) if models else disk_view.nothing(ids)


def read(path: Path) -> str | dict[str, Any]:
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


def options_of(written: dict[str, Any]) -> ChatOptions:
    """What of a request's body makes its prompt; sampling does not."""
    effort = written.get("reasoning", written.get("reasoning_effort"))
    return ChatOptions(
        tools=written.get("tools") or (), reasoning=effort, arguments=written.get("chat_template_kwargs") or {}
    )
