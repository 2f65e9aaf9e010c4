"""The arguments and flags of the commands: what they take, and what `--help` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- which model

ModelArgument = Annotated[
    str | None, typer.Argument(help="A name from `afterglow models`, or a path.", show_default=False)
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="A name or a path.")]
ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Names from `afterglow models`, or paths. NAME=MODEL serves it under that name.",
        show_default=False,
    ),
]

# --- how it is loaded

ContextOption = Annotated[int | None, typer.Option(min=64, help="Tokens the whole conversation may take.")]
SequencesOption = Annotated[int | None, typer.Option(min=1, max=255, help="Answers that are made at once.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Default: the processor's cores.")]
GpuLayersOption = Annotated[int | None, typer.Option(min=0, help="Layers on the GPU. Default: as many as fit.")]
ChatTemplateOption = Annotated[
    Path | None, typer.Option(help="A file with a chat template, instead of the model's own.")
]
ProjectorOption = Annotated[
    Path | None,
    typer.Option(help="The file that lets the model see or hear. Default: the only one beside it.", show_default=False),
]
StripMediaOption = Annotated[bool | None, typer.Option("--strip-media", help="Leave out what the model cannot take.")]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="What guesses ahead: `mtp`, or a smaller model; NAME=DRAFT for one model. Can be given several times.",
        show_default=False,
    ),
]
SpeculationOption = Annotated[
    str | None, typer.Option(help="auto: guess ahead as far as it pays; off; or so many tokens.")
]
PinSystemPromptsOption = Annotated[bool | None, typer.Option("--pin-system", help="Never let go of system prompts.")]
RamCacheBytesOption = Annotated[
    str | None, typer.Option(help="Of what is kept in RAM outside of memory, such as 4GiB.")
]
DiskCacheBytesOption = Annotated[str | None, typer.Option(help="Of all that is kept on disk, such as 20GiB.")]
MaxTokenGapOption = Annotated[
    float | None, typer.Option(help="Seconds between tokens that other prompts should not exceed.")
]
DeterministicOption = Annotated[
    bool | None, typer.Option("--deterministic", help="Same answers whatever else runs; slower in company.")
]

# --- what is asked

PromptArgument = Annotated[str, typer.Argument(help="What to ask. `-` reads standard input.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")]
SchemaOption = Annotated[Path | None, typer.Option(help="A JSON schema that the answer must satisfy.")]
ImageOption = Annotated[
    list[Path] | None,
    typer.Option("--image", help="A picture to ask about. Can be given several times.", show_default=False),
]
AudioOption = Annotated[
    list[Path] | None,
    typer.Option("--audio", help="A sound to ask about. Can be given several times.", show_default=False),
]
SystemOption = Annotated[str | None, typer.Option(help="What the model should know before the conversation.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="The longest answer, in tokens.")]
TemperatureOption = Annotated[float | None, typer.Option(min=0, help="0 always takes the most likely token.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
ReasoningOption = Annotated[str | None, typer.Option(help="on, off, a number of tokens, or an effort such as low.")]

# --- how it is shown

MarkdownOption = Annotated[bool | None, typer.Option(help="Draw answers as markdown.")]
StatsOption = Annotated[bool | None, typer.Option(help="Say after each answer what it took.")]

# --- who may ask a server, and how much

HostOption = Annotated[str | None, typer.Option(help="Where to listen. Default: 127.0.0.1, this machine only.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Default: 8080; 0: any that is free.")]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option("--api-key", help="Only who has this key may ask. Can be given several times.", show_default=False),
]
ApiKeyFileOption = Annotated[
    Path | None, typer.Option("--api-key-file", help="A file with one key in each line.", show_default=False)
]
AllowOriginOption = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Web pages of this origin may ask; `*`: all.", show_default=False),
]
QueueOption = Annotated[int | None, typer.Option(min=0, help="Answers that may wait; more get 429.")]
LazyOption = Annotated[bool | None, typer.Option("--lazy", help="Load a model when it is first asked for.")]
ShutdownSecondsOption = Annotated[float | None, typer.Option(min=0, help="For running answers, once told to end.")]
MediaHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--media-host",
        help="Pictures and sounds may be fetched from this host; `*`: from any. Can be given several times.",
        show_default=False,
    ),
]
MediaDirectoryOption = Annotated[
    Path | None,
    typer.Option("--media-directory", help="Pictures and sounds in it may be named.", show_default=False),
]
MaxMediaBytesOption = Annotated[int | None, typer.Option(min=1, help="Of a picture or a sound. Default: 20 MiB.")]
MaxPixelsOption = Annotated[int | None, typer.Option(min=1, help="Of a picture. Default: 32 million.")]
