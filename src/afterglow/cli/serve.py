"""`afterglow serve`: models for programs on this machine, over HTTP, as OpenAI's clients know them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from afterglow.cli import chat
from afterglow.cli.opening import local_path, template_text
from afterglow.cli.settings import Settings, settings
from afterglow.engine.recipe import Draft
from afterglow.engine.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.server.roster import Roster
from afterglow.server.run import bind
from afterglow.server.run import serve as run_server
from afterglow.server.service import Service
from afterglow.serving import ServedSettings

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Names from `afterglow models`, or paths. NAME=MODEL serves it under that name.",
        show_default=False,
    ),
]
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
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help="What guesses ahead: `mtp`, or a smaller model; NAME=DRAFT for one model. Can be given several times.",
        show_default=False,
    ),
]

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


def serve(
    models: Models = None,
    host: Annotated[str | None, typer.Option(help="Where to listen. Default: 127.0.0.1, this machine only.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default: 8080; 0: any that is free.")] = None,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    allow_origin: Origins = None,
    sequences: Annotated[int | None, typer.Option(min=1, max=255, help="Answers that are made at once.")] = None,
    queue: Annotated[int | None, typer.Option(min=0, help="Answers that may wait; more get 429.")] = None,
    lazy: Annotated[bool | None, typer.Option("--lazy", help="Load a model when it is first asked for.")] = None,
    shutdown_seconds: Annotated[
        float | None, typer.Option(min=0, help="For running answers, once told to end.")
    ] = None,
    media_host: MediaHosts = None,
    media_directory: MediaDirectory = None,
    max_media_bytes: Annotated[
        int | None, typer.Option(min=1, help="Of a picture or a sound. Default: 20 MiB.")
    ] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Of a picture. Default: 32 million.")] = None,
    context: chat.Context = None,
    threads: chat.Threads = None,
    gpu_layers: chat.GpuLayers = None,
    chat_template: chat.Template = None,
    draft: Drafts = None,
    projector: chat.Projector = None,
    strip_media: chat.StripMedia = None,
    pin_system: Annotated[bool | None, typer.Option("--pin-system", help="Never let go of system prompts.")] = None,
) -> None:
    """Serve models over HTTP, as OpenAI's clients know them.

    Each has an engine in a process of its own. Ctrl-C ends it: running answers are finished, a second one ends them.
    """
    keys = (*(api_key or ()), *keys_in(api_key_file)) or None
    chosen = settings(
        sequences=sequences,
        context=context,
        threads=threads,
        gpu_layers=gpu_layers,
        chat_template=chat_template,
        draft=",".join(draft) if draft else None,
        projector=projector,
        strip_media=strip_media,
        pin_system=pin_system,
        server={
            "host": host,
            "port": port,
            "api_keys": keys,
            "allow_origins": tuple(allow_origin) if allow_origin else None,
            "queue": queue,
            "lazy": lazy,
            "shutdown_seconds": shutdown_seconds,
            "media_hosts": tuple(media_host) if media_host else None,
            "media_directory": media_directory,
            "max_media_bytes": max_media_bytes,
            "max_pixels": max_pixels,
        },
    )
    logging.getLogger("afterglow.server").addHandler(logging.StreamHandler(sys.stderr))
    console = Console(stderr=True, highlight=False)
    paths = {name: local_path(model) for name, model in map(named, models or [chosen.model])}
    if chosen.projector is not None and len(paths) > 1:
        raise InvalidArgument("--projector", "is for one model: put each model's projector beside its file")
    listener = bind(chosen.server)
    common = served_settings(chosen)
    own = {name: replace(common, draft=what) for name, what in drafts(chosen.draft, paths).items()}
    with listener, Service(Roster(paths, common, own), chosen.server) as service:
        if not chosen.server.lazy:
            with console.status(f"loading {', '.join(paths)}"):
                service.roster.load_all()
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        run_server(service, listener, lambda: announce(console, address, list(paths), bool(chosen.server.api_keys)))


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
        engine=EngineSettings(pin_system=chosen.pin_system),
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


def announce(console: Console, address: str, names: list[str], locked: bool) -> None:
    """Where it listens, and something to try."""
    key = ' -H "Authorization: Bearer $KEY"' if locked else ""
    body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    console.print(f"[bold]{', '.join(names)}[/] at [bold]{address}[/]  [dim]Ctrl-C ends[/]", soft_wrap=True)
    console.print("[dim]try[/]", soft_wrap=True)
    example = f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"  {example}", soft_wrap=True, markup=False)
