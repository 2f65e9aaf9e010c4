"""`afterglow chat`: talk to a model in the terminal, or pipe one question in and get the answer out."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console

from afterglow.cli import options
from afterglow.cli.media import Named
from afterglow.cli.opening import open_model
from afterglow.cli.settings import Settings, settings_of
from afterglow.cli.showing import page_for, show
from afterglow.cli.talk import Talk
from afterglow.conversation import Conversation


def chat(
    command: typer.Context,
    model: options.Model = None,
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
    markdown: options.Markdown = None,
    stats: options.Stats = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends; /help lists the commands.

    With something piped in, it is taken as one question: echo "Why is the sky blue?" | afterglow chat
    """
    chosen = settings_of(command)
    console = Console(stderr=not sys.stdout.isatty())
    question = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if question == "":
        return
    with open_model(chosen, console) as loaded:
        conversation = Conversation(loaded, system=chosen.system, **answer_options(chosen))
        if question is None:
            console.print(f"[bold]{chosen.model}[/]  [dim]/help lists the commands, Ctrl-D ends[/]", highlight=False)
            given: list[Named] = [("image", path) for path in image or ()]
            Talk(conversation, chosen, console, [*given, *(("audio", path) for path in audio or ())]).run()
        else:
            deltas = conversation.deltas(question, images=image or (), audio=audio or ())
            show(deltas, page_for(console, markdown=chosen.markdown))


def answer_options(chosen: Settings) -> dict[str, Any]:
    """The settings that every answer has."""
    return {
        "max_tokens": chosen.max_tokens,
        "temperature": chosen.temperature,
        "seed": chosen.seed,
        "reasoning": switch(chosen.reasoning),
    }


def switch(value: bool | int | str | None) -> bool | int | str | None:
    """`on`, `off` and numbers as flags and environment variables write them."""
    if not isinstance(value, str):
        return value
    return int(value) if value.isdigit() else {"on": True, "off": False}.get(value, value)
