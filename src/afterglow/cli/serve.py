"""`afterglow serve`: models for programs on this machine, over HTTP, as OpenAI's clients know them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import typer

from afterglow.cli import options, served
from afterglow.cli.settings import settings_of
from afterglow.errors import InvalidArgument


def serve(
    command: typer.Context,
    models: options.Models = None,
    host: options.Host = None,
    port: options.Port = None,
    api_key: options.Keys = None,
    api_key_file: options.KeyFile = None,
    allow_origin: options.Origins = None,
    sequences: options.Sequences = None,
    queue: options.Queue = None,
    lazy: options.Lazy = None,
    shutdown_seconds: options.ShutdownSeconds = None,
    media_host: options.MediaHosts = None,
    media_directory: options.MediaDirectory = None,
    max_media_bytes: options.MaxMediaBytes = None,
    max_pixels: options.MaxPixels = None,
    context: options.Context = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = None,
    chat_template: options.Template = None,
    draft: options.Drafts = None,
    speculation: options.Speculation = None,
    projector: options.Projector = None,
    strip_media: options.StripMedia = None,
    pin_system: options.PinSystem = None,
    ram_bytes: options.RamBytes = None,
    disk_bytes: options.DiskBytes = None,
    gap: options.Gap = None,
    deterministic: options.Deterministic = None,
) -> None:
    """Serve models over HTTP, as OpenAI's clients know them.

    Each has an engine in a process of its own. Ctrl-C ends it: running answers are finished, a second one ends them.
    """
    chosen = settings_of(
        command,
        draft=",".join(draft or ()) or None,
        api_keys=(*(api_key or ()), *keys_in(api_key_file)) or None,
        allow_origins=allow_origin or None,
        media_hosts=media_host or None,
    )
    logging.getLogger("afterglow.server").addHandler(logging.StreamHandler(sys.stderr))
    served.serve_models(dict(map(named, models or [chosen.model])), chosen)


def named(model: str) -> tuple[str, str]:
    """The name that a model is served under, and where it is.

    >>> named("big=qwen"), named("/models/small.gguf")
    (('big', 'qwen'), ('small', '/models/small.gguf'))
    """
    name, equals, place = model.partition("=")
    if equals and name and "/" not in name:
        return name, place
    return (Path(model).stem, model) if model.endswith(".gguf") and ":" not in model else (model, model)


def keys_in(path: Path | None) -> list[str]:
    """The keys in a file, one in each line."""
    if path is None:
        return []
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise InvalidArgument("--api-key-file", f"{path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InvalidArgument("--api-key-file", f"{path} has no keys")
    return keys
