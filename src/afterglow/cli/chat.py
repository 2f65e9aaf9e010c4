"""`afterglow chat`: interactive chat in the terminal, or one answer for piped input."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from afterglow.api.conversation import Conversation
from afterglow.cli import options
from afterglow.cli.display import choose_display, show_response
from afterglow.cli.loop_guard import exit_on_loop, guard_deltas
from afterglow.cli.media import MediaFile
from afterglow.cli.open_model import open_model
from afterglow.cli.repl import Repl
from afterglow.cli.settings import load_command_settings


@options.accept_settings(
    [*options.GENERATION_OPTIONS, "overflow", "markdown", "stats", "private", "loop_guard", *options.MODEL_OPTIONS]
)
def chat(
    command: typer.Context,
    model: options.ModelArgument = None,
    image: options.ImageOption = None,
    audio: options.AudioOption = None,
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
        conversation = Conversation(loaded, system=settings.system, **settings.generation_options)
        if question is None:
            console.print(f"[bold]{settings.model}[/]  [dim]/help lists the commands, Ctrl-D exits[/]", highlight=False)
            files: list[MediaFile] = [("image", path) for path in image or ()]
            files += [("audio", path) for path in audio or ()]
            Repl(conversation, settings, console, files).run()
        else:
            deltas = conversation.stream_deltas(question, images=image or (), audio=audio or ())
            with exit_on_loop():
                guarded = guard_deltas(deltas, enabled=settings.loop_guard)
                show_response(guarded, choose_display(console, markdown=settings.markdown))
