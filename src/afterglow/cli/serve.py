"""`afterglow serve`: models for programs on this machine, over HTTP, as OpenAI's clients know them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from socket import socket

import typer
from rich.console import Console

from afterglow.cli import options
from afterglow.cli.opening import local_path, template_text
from afterglow.cli.settings import Settings, settings_of
from afterglow.engine.recipe import Draft
from afterglow.errors import InvalidArgument
from afterglow.server.roster import Roster
from afterglow.server.run import bind
from afterglow.server.run import serve as run_server
from afterglow.server.service import Service
from afterglow.serving import ServedSettings


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
    serve_models(dict(map(named, models or [chosen.model])), chosen)


def serve_models(models: Mapping[str, str], chosen: Settings) -> None:
    """Serve models, each under its name, until told to end."""
    console = Console(stderr=True, highlight=False)
    paths = {name: local_path(model) for name, model in models.items()}
    if chosen.projector is not None and len(paths) > 1:
        raise InvalidArgument("--projector", "is for one model: put each model's projector beside its file")
    with bind(chosen.server) as listener, Service(roster_of(paths, chosen), chosen.server) as service:
        if not chosen.server.lazy:
            with console.status(f"loading {', '.join(paths)}"):
                service.roster.load_all()
        address = address_of(listener)
        run_server(service, listener, lambda: announce(console, address, list(paths), bool(chosen.server.api_keys)))


def roster_of(paths: Mapping[str, Path], chosen: Settings) -> Roster:
    """The models, loaded alike but for what guesses for each."""
    common = served_settings(chosen)
    own = {name: replace(common, draft=draft) for name, draft in drafts(chosen.draft, paths).items()}
    return Roster(paths, common, own)


def served_settings(chosen: Settings) -> ServedSettings:
    """How the models are loaded."""
    return ServedSettings(
        disk=chosen.disk,
        context=chosen.context,
        sequences=chosen.sequences,
        gpu_layers=chosen.gpu_layers,
        threads=chosen.threads,
        chat_template=template_text(chosen.chat_template),
        projector=chosen.projector,
        media=chosen.server.media,
        strip_media=chosen.strip_media,
        engine=chosen.engine,
    )


def drafts(text: str | None, names: Collection[str]) -> dict[str, Draft]:
    """What guesses for which model: `text` is `mtp` or a model for all, or NAME=DRAFT for one; several with commas.

    >>> drafts("mtp,small=mtp", ["big", "small"])
    {'big': 'mtp', 'small': 'mtp'}
    """
    found: dict[str, Draft] = {}
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    for part in sorted(parts, key=lambda part: "=" in part):  # those for all first
        name, equals, what = part.partition("=")
        if not equals or "/" in name:
            name, what = "", part
        if name and name not in names:
            raise InvalidArgument("--draft", f"{name!r} is not served; there are {', '.join(names)}")
        draft: Draft = "mtp" if what == "mtp" else local_path(what)
        found |= dict.fromkeys([name] if name else names, draft)
    return found


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


def address_of(listener: socket) -> str:
    """Where a socket listens, as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def announce(console: Console, address: str, names: list[str], locked: bool) -> None:
    """Where it listens, and something to try."""
    key = ' -H "Authorization: Bearer $KEY"' if locked else ""
    body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    console.print(f"[bold]{', '.join(names)}[/] at [bold]{address}[/]  [dim]Ctrl-C ends[/]", soft_wrap=True)
    console.print("[dim]try[/]", soft_wrap=True)
    example = f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"  {example}", soft_wrap=True, markup=False)
