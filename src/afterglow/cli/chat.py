"""`afterglow chat`: talk to a model in the terminal, or pipe one question in and get the answer out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from afterglow.cli.media import Named
from afterglow.cli.opening import open_model
from afterglow.cli.settings import Settings, settings
from afterglow.cli.showing import page_for, show
from afterglow.cli.talk import Talk
from afterglow.conversation import Conversation

Model = Annotated[str | None, typer.Argument(help="A name from `afterglow models`, or a path.", show_default=False)]
System = Annotated[str | None, typer.Option(help="What the model should know before the conversation.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="The longest answer, in tokens.")]
Context = Annotated[int | None, typer.Option(min=64, help="Tokens the whole conversation may take.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: the processor's cores.")]
GpuLayers = Annotated[int | None, typer.Option(min=0, help="Layers on the GPU. Default: as many as fit.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 always takes the most likely token.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Reasoning = Annotated[str | None, typer.Option(help="on, off, a number of tokens, or an effort such as low.")]

Template = Annotated[Path | None, typer.Option(help="A file with a chat template, instead of the model's own.")]
Projector = Annotated[
    Path | None,
    typer.Option(help="The file that lets the model see or hear. Default: the only one beside it.", show_default=False),
]
StripMedia = Annotated[bool | None, typer.Option("--strip-media", help="Leave out what the model cannot take.")]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="A picture to ask about. Can be given several times.", show_default=False),
]
Audio = Annotated[
    list[Path] | None,
    typer.Option("--audio", help="A sound to ask about. Can be given several times.", show_default=False),
]


def chat(
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    reasoning: Reasoning = None,
    context: Context = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = None,
    chat_template: Template = None,
    projector: Projector = None,
    strip_media: StripMedia = None,
    image: Images = None,
    audio: Audio = None,
    markdown: Annotated[bool | None, typer.Option(help="Draw answers as markdown.")] = None,
    stats: Annotated[bool | None, typer.Option(help="Say after each answer what it took.")] = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends; /help lists the commands.

    With something piped in, it is taken as one question: echo "Why is the sky blue?" | afterglow chat
    """
    chosen = settings(
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        reasoning=reasoning,
        context=context,
        threads=threads,
        gpu_layers=gpu_layers,
        chat_template=chat_template,
        projector=projector,
        strip_media=strip_media,
        markdown=markdown,
        stats=stats,
    )
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
