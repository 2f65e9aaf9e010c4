"""What `afterglow serve` does once it knows what is wanted: load the models, listen, and say where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from socket import socket

from rich.console import Console

from afterglow.cli.opening import local_path, template_text
from afterglow.cli.settings import Settings
from afterglow.engine.recipe import Draft
from afterglow.errors import InvalidArgument
from afterglow.server.roster import Roster
from afterglow.server.run import bind
from afterglow.server.run import serve as run_server
from afterglow.server.service import Service
from afterglow.serving import ServedSettings


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
