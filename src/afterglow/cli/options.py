"""Arguments and flags shared by the commands, with their help texts. Flags are spelled like the settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

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

# --- loading: the same flags for every command that loads a model

ChatTemplateOption = Annotated[
    Path | None, typer.Option(help="File with a chat template that replaces the model's own.")
]
LOAD_OPTIONS: dict[str, Any] = {
    "context": Annotated[int | None, typer.Option(min=64, help="Context length of a conversation, in tokens.")],
    "sequences": Annotated[
        int | None, typer.Option(min=1, max=255, help="Maximum number of concurrent requests and cached conversations.")
    ],
    "threads": Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: one per physical core.")],
    "gpu_layers": Annotated[
        int | None, typer.Option(min=-1, help="Layers on the GPU; -1: all. Default: as many as fit.")
    ],
    "split_mode": Annotated[
        str | None, typer.Option(help="How several GPUs share the model: `layer`, `row` or `none`.")
    ],
    "tensor_split": Annotated[
        str | None, typer.Option(help="Share of each GPU, e.g. `3,1`. Default: by free memory.", show_default=False)
    ],
    "main_gpu": Annotated[int | None, typer.Option(min=0, help="GPU that computes what is not split.")],
    "mmap": Annotated[bool | None, typer.Option(help="Map the model file into memory. Default: on.")],
    "mlock": Annotated[bool | None, typer.Option("--mlock", help="Keep the model in RAM; it is never swapped out.")],
    "batch": Annotated[
        int | None, typer.Option(min=1, help="Maximum rows of one decode. Default: 512, or 16,384 on a GPU.")
    ],
    "ubatch": Annotated[int | None, typer.Option(min=1, help="Maximum rows computed at once. Default: 512.")],
    "cache_type_k": Annotated[
        str | None, typer.Option(help="Data type of keys in the KV cache: `f16`, `bf16`, `f32`, `q8_0`, `q4_0`, …")
    ],
    "cache_type_v": Annotated[
        str | None, typer.Option(help="Data type of values in the KV cache. Quantized types need flash attention.")
    ],
    "flash_attention": Annotated[
        bool | None, typer.Option(help="Flash attention. Default: if the model and the device support it.")
    ],
    "kv_unified": Annotated[
        bool | None, typer.Option("--kv-unified", help="Share the cells of the KV cache among all sequences.")
    ],
    "swa_full": Annotated[
        bool | None, typer.Option("--swa-full", help="Keep all cells of sliding-window layers, not only the window.")
    ],
    "rope_scaling": Annotated[
        str | None, typer.Option(help="RoPE scaling: `model`, `none`, `linear`, `yarn` or `longrope`.")
    ],
    "rope_freq_base": Annotated[float | None, typer.Option(min=0, help="RoPE base frequency. 0: from the model.")],
    "rope_freq_scale": Annotated[
        float | None, typer.Option(min=0, help="RoPE frequency scale, e.g. 0.25 for 4 times the trained context.")
    ],
    "yarn_orig_ctx": Annotated[
        int | None, typer.Option(min=0, help="Trained context length for YaRN. 0: from the model.")
    ],
    "yarn_ext_factor": Annotated[float | None, typer.Option(min=0, help="YaRN extrapolation mix.")],
    "yarn_attn_factor": Annotated[
        float | None, typer.Option(min=0, help="YaRN attention scale; needs --yarn-ext-factor 0.")
    ],
    "yarn_beta_fast": Annotated[float | None, typer.Option(min=0, help="YaRN correction limit, high frequencies.")],
    "yarn_beta_slow": Annotated[float | None, typer.Option(min=0, help="YaRN correction limit, low frequencies.")],
}
GENERATION_OPTIONS: dict[str, Any] = {
    "chat_template": ChatTemplateOption,
    "projector": Annotated[
        Path | None,
        typer.Option(
            help="Multimodal projector file. Default: the only one in the directory of the model.", show_default=False
        ),
    ],
    "strip_media": Annotated[
        bool | None, typer.Option("--strip-media", help="Drop media that the model does not support, with a warning.")
    ],
    "draft": Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            help="Drafter: `mtp` or a smaller model. `serve` also takes NAME=DRAFT for one model, repeatable.",
            show_default=False,
        ),
    ],
    "speculation": Annotated[
        str | None, typer.Option(help="Draft length: `auto`, `off`, or a fixed number of tokens.")
    ],
    "pin_system_prompts": Annotated[
        bool | None, typer.Option("--pin-system-prompts", help="Never evict system prompts from the prefix cache.")
    ],
    "ram_cache_bytes": Annotated[str | None, typer.Option(help="Size of the RAM prefix cache, e.g. 4GiB.")],
    "disk_cache_bytes": Annotated[
        str | None, typer.Option(help="Size of the disk prefix cache of all models, e.g. 20GiB.")
    ],
    "max_token_gap": Annotated[
        float | None, typer.Option(help="Target for the time between tokens while other prompts prefill, in seconds.")
    ],
    "deterministic": Annotated[
        bool | None,
        typer.Option(
            "--deterministic", help="Bit-identical output regardless of load; slower with concurrent requests."
        ),
    ],
}
MODEL_OPTIONS = LOAD_OPTIONS | GENERATION_OPTIONS


def accept_options(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds flags to a command. Their values are read from the settings of the command."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*positional: Any, **parameters: Any) -> None:
            own = {name: value for name, value in parameters.items() if name not in options}
            function(*positional, **own)

        signature = inspect.signature(function, eval_str=True)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        flags = [
            inspect.Parameter(name, keyword_only, default=None, annotation=annotation)
            for name, annotation in options.items()
        ]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *flags]
        )
        return command

    return decorate


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
OverflowOption = Annotated[
    str | None,
    typer.Option(
        help="If the conversation exceeds the context: `shift` leaves its oldest turns out of the prompt, "
        "`truncate_middle` those in the middle, `refuse` is an error."
    ),
]
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
