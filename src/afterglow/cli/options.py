"""Arguments and flags shared by the commands, with their help texts. Flags are spelled like the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- model

ModelArgument = Annotated[
    str | None, typer.Argument(help="Model name from `afterglow models`, or path.", show_default=False)
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Model name or path.")]
ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Model names from `afterglow models`, or paths. NAME=MODEL serves a model under another name.",
        show_default=False,
    ),
]

# --- loading

ContextOption = Annotated[int | None, typer.Option(min=64, help="Context length of a conversation, in tokens.")]
SequencesOption = Annotated[int | None, typer.Option(min=1, max=255, help="Maximum number of concurrent requests.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: one per physical core.")]
GpuLayersOption = Annotated[int | None, typer.Option(min=0, help="Layers on the GPU. Default: as many as fit.")]
ChatTemplateOption = Annotated[
    Path | None, typer.Option(help="File with a chat template that replaces the model's own.")
]
ProjectorOption = Annotated[
    Path | None,
    typer.Option(
        help="Multimodal projector file. Default: the only one in the directory of the model.", show_default=False
    ),
]
StripMediaOption = Annotated[
    bool | None, typer.Option("--strip-media", help="Drop media that the model does not support, with a warning.")
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="Drafter: `mtp` or a smaller model; NAME=DRAFT for one served model. Repeatable.",
        show_default=False,
    ),
]
SpeculationOption = Annotated[
    str | None, typer.Option(help="Draft length: `auto`, `off`, or a fixed number of tokens.")
]
PinSystemPromptsOption = Annotated[
    bool | None, typer.Option("--pin-system-prompts", help="Never evict system prompts from the prefix cache.")
]
RamCacheBytesOption = Annotated[str | None, typer.Option(help="Size of the RAM prefix cache, e.g. 4GiB.")]
DiskCacheBytesOption = Annotated[
    str | None, typer.Option(help="Size of the disk prefix cache of all models, e.g. 20GiB.")
]
MaxTokenGapOption = Annotated[
    float | None, typer.Option(help="Target for the time between tokens while other prompts prefill, in seconds.")
]
DeterministicOption = Annotated[
    bool | None,
    typer.Option("--deterministic", help="Bit-identical output regardless of load; slower with concurrent requests."),
]

# --- request

PromptArgument = Annotated[str, typer.Argument(help="User message. `-` reads standard input.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Complete the text without the chat template.")]
SchemaOption = Annotated[Path | None, typer.Option(help="File with a JSON schema that the response must satisfy.")]
ImageOption = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Image file for the first message. Repeatable.", show_default=False),
]
AudioOption = Annotated[
    list[Path] | None,
    typer.Option("--audio", help="Audio file for the first message. Repeatable.", show_default=False),
]
SystemOption = Annotated[str | None, typer.Option(help="System prompt.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Maximum length of a response, in tokens.")]
TemperatureOption = Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
SeedOption = Annotated[int | None, typer.Option(help="Sampling seed; the same seed gives the same response.")]
ReasoningOption = Annotated[str | None, typer.Option(help="`on`, `off`, a number of tokens, or an effort, e.g. `low`.")]

# --- output

MarkdownOption = Annotated[bool | None, typer.Option(help="Render responses as markdown.")]
StatsOption = Annotated[bool | None, typer.Option(help="Print statistics after each response.")]

# --- server

HostOption = Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1, this machine only.")]
PortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port to listen on. Default: 8080; 0 selects a free port.")
]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", help="API key that clients must send, or its digest `sha256:…`. Repeatable.", show_default=False
    ),
]
ApiKeyFileOption = Annotated[
    Path | None, typer.Option("--api-key-file", help="File with one API key or digest per line.", show_default=False)
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        help="Host name by which clients may address the server, beside loopback; `*`: all. Repeatable.",
        show_default=False,
    ),
]
AllowOriginOption = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="CORS origin allowed to connect; `*`: all. Repeatable.", show_default=False),
]
MaxQueueOption = Annotated[
    int | None, typer.Option(min=0, help="Choices that may wait for a model; more get status 429.")
]
LazyLoadOption = Annotated[
    bool | None, typer.Option("--lazy-load", help="Load a model on its first request instead of at startup.")
]
ShutdownSecondsOption = Annotated[
    float | None, typer.Option(min=0, help="Time for running requests after a signal, in seconds.")
]
StallSecondsOption = Annotated[
    float | None, typer.Option(help="Close a connection whose client accepts no data for this time. Default: 30.")
]
MaxBufferedTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a choice that may wait for a slow client. Default: 4096.")
]
MediaHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--media-host",
        help="Host from which media may be fetched; `*`: every public host. Repeatable.",
        show_default=False,
    ),
]
MediaDirectoryOption = Annotated[
    Path | None,
    typer.Option("--media-directory", help="Directory from which media may be read.", show_default=False),
]
MaxMediaBytesOption = Annotated[
    int | None, typer.Option(min=1, help="Maximum size of one media file. Default: 20 MiB.")
]
MaxImagePixelsOption = Annotated[
    int | None, typer.Option(min=1, help="Maximum pixels of one image. Default: 32 million.")
]
