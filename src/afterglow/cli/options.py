"""The arguments and flags of the commands: what they take, and what `--help` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- which model

Model = Annotated[str | None, typer.Argument(help="A name from `afterglow models`, or a path.", show_default=False)]
ModelFlag = Annotated[str | None, typer.Option("--model", "-m", help="A name or a path.")]
Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Names from `afterglow models`, or paths. NAME=MODEL serves it under that name.",
        show_default=False,
    ),
]

# --- how it is loaded

Context = Annotated[int | None, typer.Option(min=64, help="Tokens the whole conversation may take.")]
Sequences = Annotated[int | None, typer.Option(min=1, max=255, help="Answers that are made at once.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: the processor's cores.")]
GpuLayers = Annotated[int | None, typer.Option(min=0, help="Layers on the GPU. Default: as many as fit.")]
Template = Annotated[Path | None, typer.Option(help="A file with a chat template, instead of the model's own.")]
Projector = Annotated[
    Path | None,
    typer.Option(help="The file that lets the model see or hear. Default: the only one beside it.", show_default=False),
]
StripMedia = Annotated[bool | None, typer.Option("--strip-media", help="Leave out what the model cannot take.")]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="What guesses ahead: `mtp`, or a smaller model; NAME=DRAFT for one model. Can be given several times.",
        show_default=False,
    ),
]
Speculation = Annotated[str | None, typer.Option(help="auto: guess ahead as far as it pays; off; or so many tokens.")]
PinSystem = Annotated[bool | None, typer.Option("--pin-system", help="Never let go of system prompts.")]
RamBytes = Annotated[str | None, typer.Option(help="Of what is kept in RAM outside of memory, such as 4GiB.")]
DiskBytes = Annotated[str | None, typer.Option(help="Of all that is kept on disk, such as 20GiB.")]
Gap = Annotated[float | None, typer.Option(help="Seconds between tokens that other prompts should not exceed.")]
Deterministic = Annotated[
    bool | None, typer.Option("--deterministic", help="Same answers whatever else runs; slower in company.")
]

# --- what is asked

Prompt = Annotated[str, typer.Argument(help="What to ask. `-` reads standard input.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")]
Schema = Annotated[Path | None, typer.Option(help="A JSON schema that the answer must satisfy.")]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="A picture to ask about. Can be given several times.", show_default=False),
]
Audio = Annotated[
    list[Path] | None,
    typer.Option("--audio", help="A sound to ask about. Can be given several times.", show_default=False),
]
System = Annotated[str | None, typer.Option(help="What the model should know before the conversation.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="The longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 always takes the most likely token.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Reasoning = Annotated[str | None, typer.Option(help="on, off, a number of tokens, or an effort such as low.")]

# --- how it is shown

Markdown = Annotated[bool | None, typer.Option(help="Draw answers as markdown.")]
Stats = Annotated[bool | None, typer.Option(help="Say after each answer what it took.")]

# --- who may ask a server, and how much

Host = Annotated[str | None, typer.Option(help="Where to listen. Default: 127.0.0.1, this machine only.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Default: 8080; 0: any that is free.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--api-key", help="Only who has this key may ask. Can be given several times.", show_default=False),
]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="A file with one key in each line.", show_default=False)
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Web pages of this origin may ask; `*`: all.", show_default=False),
]
Queue = Annotated[int | None, typer.Option(min=0, help="Answers that may wait; more get 429.")]
Lazy = Annotated[bool | None, typer.Option("--lazy", help="Load a model when it is first asked for.")]
ShutdownSeconds = Annotated[float | None, typer.Option(min=0, help="For running answers, once told to end.")]
MediaHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--media-host",
        help="Pictures and sounds may be fetched from this host; `*`: from any. Can be given several times.",
        show_default=False,
    ),
]
MediaDirectory = Annotated[
    Path | None,
    typer.Option("--media-directory", help="Pictures and sounds in it may be named.", show_default=False),
]
MaxMediaBytes = Annotated[int | None, typer.Option(min=1, help="Of a picture or a sound. Default: 20 MiB.")]
MaxPixels = Annotated[int | None, typer.Option(min=1, help="Of a picture. Default: 32 million.")]
