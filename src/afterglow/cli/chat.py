"""`afterglow chat`: interactive chat in the terminal, or one answer for piped input."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console

from afterglow.api.conversation import Conversation
from afterglow.cli import options
from afterglow.cli.display import choose_display, show_response
from afterglow.cli.media import MediaFile
from afterglow.cli.open_model import open_model
from afterglow.cli.repl import Repl
from afterglow.cli.settings import Settings, load_command_settings


@options.accept_options(options.MODEL_OPTIONS)
def chat(
    command: typer.Context,
    model: options.ModelArgument = None,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = None,
    temperature: options.TemperatureOption = None,
    seed: options.SeedOption = None,
    reasoning: options.ReasoningOption = None,
    overflow: options.OverflowOption = None,
    image: options.ImageOption = None,
    audio: options.AudioOption = None,
    markdown: options.MarkdownOption = None,
    stats: options.StatsOption = None,
) -> None:
    """Chat with a model. Ctrl-C stops a response, Ctrl-D exits, /help lists the commands.

    Piped input is one user message: echo "Why is the sky blue?" | afterglow chat
    """
    settings = load_command_settings(command)
    console = Console(stderr=not sys.stdout.isatty())
    question = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if question == "":
        return
    with open_model(settings, console) as loaded:
        conversation = Conversation(
            loaded, system=settings.system, overflow=settings.overflow, **build_generation_options(settings)
        )
        if question is None:
            console.print(f"[bold]{settings.model}[/]  [dim]/help lists the commands, Ctrl-D exits[/]", highlight=False)
            files: list[MediaFile] = [("image", path) for path in image or ()]
            files += [("audio", path) for path in audio or ()]
            Repl(conversation, settings, console, files).run()
        else:
            deltas = conversation.stream_deltas(question, images=image or (), audio=audio or ())
            show_response(deltas, choose_display(console, markdown=settings.markdown))


def build_generation_options(settings: Settings) -> dict[str, Any]:
    """Return the generation options of every response."""
    return {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "reasoning": parse_reasoning(settings.reasoning),
    }


def parse_reasoning(value: bool | int | str | None) -> bool | int | str | None:
    """Parse `on`, `off` and numbers from flags and environment variables."""
    if not isinstance(value, str):
        return value
    return int(value) if value.isdigit() else {"on": True, "off": False}.get(value, value)
