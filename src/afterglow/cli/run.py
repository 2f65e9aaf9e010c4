"""`afterglow run`: one prompt, one answer; and `afterglow perplexity`: how likely a text is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from afterglow.cli import options
from afterglow.cli.chat import answer_options
from afterglow.cli.opening import open_model
from afterglow.cli.settings import settings_of
from afterglow.cli.showing import page_for, show, statistics
from afterglow.conversation import Conversation
from afterglow.errors import InvalidArgument
from afterglow.model import Model

TALKING = ("schema", "system", "reasoning", "chat_template", "projector", "strip_media", "image", "audio", "stats")


def run(
    command: typer.Context,
    prompt: options.Prompt,
    model: options.ModelFlag = None,
    raw: options.Raw = False,
    schema: options.Schema = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    reasoning: options.Reasoning = None,
    context: options.Context = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = None,
    chat_template: options.Template = None,
    projector: options.Projector = None,
    strip_media: options.StripMedia = None,
    image: options.Images = None,
    audio: options.Audio = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error what it took.")] = False,
) -> None:
    """Answer one prompt on standard output, and end."""
    chosen = settings_of(command)
    console = Console(stderr=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw:
        refuse_talking(command)
    asked = answer_options(chosen) | ({} if schema is None else {"response_format": schema_format(schema)})
    with open_model(chosen, console) as loaded:
        if raw:
            return continue_text(loaded, text, asked)
        conversation = Conversation(loaded, system=chosen.system, **asked)
        show(conversation.deltas(text, images=image or (), audio=audio or ()), page_for(Console(), markdown=False))
        if stats and conversation.last is not None:
            console.print(statistics(conversation.last), highlight=False, soft_wrap=True)


def refuse_talking(command: typer.Context) -> None:
    """Flags that say something about a conversation: a text that is continued is none."""
    for name in TALKING:
        if command.params[name] not in (None, False, [], ()):
            raise InvalidArgument(f"--{name.replace('_', '-')}", "is about conversations: leave it or --raw out")


def continue_text(model: Model, text: str, asked: dict[str, Any]) -> None:
    """Write what follows `text`, without the chat template."""
    plain = {name: value for name, value in asked.items() if name != "reasoning"}
    for piece in model.stream(text, **plain):
        print(piece, end="", flush=True)
    print()


def schema_format(path: Path) -> dict[str, object]:
    """A file with a JSON schema, as a response format."""
    try:
        schema = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("schema", f"{path} cannot be read: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def perplexity(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="A text file; `-` reads standard input.")],
    model: options.ModelFlag = None,
    context: options.Context = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = None,
) -> None:
    """Say how well the model predicts a text: 1 is certainty, the vocabulary's size is a blind guess."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, ValueError) as error:
        raise InvalidArgument("file", f"{file} cannot be read: {error}") from None
    with open_model(settings_of(command), Console(stderr=True)) as loaded:
        score = loaded.logprobs(text)
    windows = "1 window" if score.windows == 1 else f"{score.windows} windows"
    print(f"{score.perplexity:.4f} over {len(score.tokens):,} tokens in {windows}")
