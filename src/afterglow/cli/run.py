"""`afterglow run`: one response to one prompt. `afterglow perplexity`: perplexity of a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from afterglow.api.conversation import Conversation
from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions, GenerationOptions, select_options
from afterglow.cli import options
from afterglow.cli.display import choose_display, format_statistics, show_response
from afterglow.cli.loop_guard import LoopGuard, exit_on_loop, guard_deltas
from afterglow.cli.open_model import open_model
from afterglow.cli.settings import load_command_settings
from afterglow.errors import InvalidArgument

CHAT_ONLY_PARAMETERS = (
    "schema",
    "system",
    "reasoning",
    "chat_template",
    "projector",
    "strip_media",
    "image",
    "audio",
    "stats",
)


@options.accept_settings([*options.GENERATION_OPTIONS, "loop_guard", *options.MODEL_OPTIONS])
def run(
    command: typer.Context,
    prompt: options.PromptArgument,
    model: options.ModelOption = None,
    raw: options.RawOption = False,
    schema: options.SchemaOption = None,
    image: options.ImageOption = None,
    audio: options.AudioOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics to standard error.")] = False,
) -> None:
    """Print the response to one prompt."""
    settings = load_command_settings(command)
    console = Console(stderr=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw:
        reject_chat_options(command)
    generation_options = settings.generation_options
    if schema is not None:
        generation_options["response_format"] = read_response_format(schema)
    with open_model(settings, console) as loaded, exit_on_loop():
        if raw:
            return continue_text(loaded, text, generation_options, LoopGuard(enabled=settings.loop_guard))
        conversation = Conversation(loaded, system=settings.system, **generation_options)
        deltas = conversation.stream_deltas(text, images=image or (), audio=audio or ())
        show_response(guard_deltas(deltas, enabled=settings.loop_guard), choose_display(Console(), markdown=False))
        if stats and conversation.last_response is not None:
            console.print(format_statistics(conversation.last_response), highlight=False, soft_wrap=True)


def reject_chat_options(command: typer.Context) -> None:
    """Raise `InvalidArgument` for flags that have no effect without the chat template."""
    for name in CHAT_ONLY_PARAMETERS:
        if command.params[name] not in (None, False, [], ()):
            raise InvalidArgument(f"--{name.replace('_', '-')}", "cannot be used with --raw")


def continue_text(model: Model, text: str, generation_options: ChatGenerationOptions, guard: LoopGuard) -> None:
    """Print the completion of `text`, without the chat template."""
    completion_options = select_options(GenerationOptions, generation_options)
    completion_options["overflow"] = "refuse"  # the setting is for conversations
    completion_options["sampling"] = model.sampling_defaults.sampling
    for piece in model.stream(text, **completion_options):
        print(piece, end="", flush=True)
        guard.add(piece)
    print()


def read_response_format(path: Path) -> dict[str, object]:
    """Read a JSON schema file as a response format."""
    try:
        schema = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("schema", f"{path} cannot be read: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@options.accept_settings(options.CONTEXT_OPTIONS)
def perplexity(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Text file. `-` reads standard input.")],
    model: options.ModelOption = None,
) -> None:
    """Print the perplexity of a text: 1 is certainty, the vocabulary size is chance."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, ValueError) as error:
        raise InvalidArgument("file", f"{file} cannot be read: {error}") from None
    with open_model(load_command_settings(command), Console(stderr=True)) as loaded:
        score = loaded.logprobs(text)
    windows = "1 window" if score.windows == 1 else f"{score.windows} windows"
    print(f"{score.perplexity:.4f} over {len(score.tokens):,} tokens in {windows}")
