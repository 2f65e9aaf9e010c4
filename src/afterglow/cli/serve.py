"""`afterglow serve`: serve models over an OpenAI-compatible HTTP API."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from socket import socket

import typer
from rich.console import Console

from afterglow.api.load import apply_disk_cache, load
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions
from afterglow.cli import options
from afterglow.cli.fit import build_fit_table, format_summary
from afterglow.cli.open_model import resolve_or_pull
from afterglow.cli.settings import Settings, load_command_settings
from afterglow.engine.host.build import DraftSource
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.paths import get_cache_directory
from afterglow.server.auth import is_loopback_name
from afterglow.server.logs import logger, write_logs
from afterglow.server.models import ModelRegistry
from afterglow.server.serve import bind
from afterglow.server.serve import serve as run_server
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState


@options.accept_settings([*options.SERVER_OPTIONS, *options.SAMPLING_OPTIONS, "private", *options.MODEL_OPTIONS])
def serve(command: typer.Context, models: options.ModelsArgument = None) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Each model runs in its own engine process. Ctrl-C shuts down after running requests finish; a second Ctrl-C
    cancels them.
    """
    settings = load_command_settings(command)
    os.environ.pop("AFTERGLOW_SERVER_API_KEYS", None)  # the settings have digests; the engines must not inherit keys
    is_verbose = logging.getLogger().level == logging.DEBUG
    with write_logs("debug" if is_verbose else settings.server.log_level, settings.server.log_file):
        serve_models(dict(map(parse_model_argument, models or [settings.model])), settings)


def serve_models(models: Mapping[str, str], settings: Settings) -> None:
    """Serve models under their names until a signal arrives."""
    console = Console(stderr=True, highlight=False)
    paths = {name: resolve_or_pull(model) for name, model in models.items()}
    if settings.load_options["projector"] and len(paths) > 1:
        reason = "applies to one model only: put each projector into the directory of its model"
        raise InvalidArgument("--projector", reason)
    with (
        bind(settings.server) as listener,
        ServerState(build_model_registry(models, settings), settings.server) as state,
    ):
        if not settings.server.lazy_load:
            with console.status(f"loading {', '.join(paths)}"):
                state.models.load_all()
            print_plans(console, state.models)
        address, requires_key = format_server_url(listener), bool(settings.server.api_keys)
        warn_if_open(settings.server)
        print_storage_notice(console, settings)
        run_server(state, listener, lambda: print_startup_message(console, address, list(paths), requires_key))


def build_model_registry(models: Mapping[str, str | Path], settings: Settings) -> ModelRegistry:
    """Build the registry of the served models. Only the drafter can differ between models."""
    drafts = parse_drafts(settings.load_options["draft"], models)

    def open_model(name: str) -> Model:
        load_options: LoadOptions = {**settings.load_options, "draft": drafts.get(name)}
        return load(
            models[name],
            host="process",
            name=name,
            media_policy=settings.server.media_policy,
            sampling_defaults=settings.sampling_defaults,
            **load_options,
        )

    return ModelRegistry({name: functools.partial(open_model, name) for name in models})


def parse_drafts(text: str | os.PathLike[str] | None, names: Collection[str]) -> dict[str, DraftSource]:
    """Parse the drafter of each model: `mtp` or a model for all, or NAME=DRAFT for one, separated by commas.

    >>> parse_drafts("mtp,small=mtp", ["big", "small"])
    {'big': 'mtp', 'small': 'mtp'}
    """
    drafts: dict[str, DraftSource] = {}
    parts = [part.strip() for part in str(text or "").split(",") if part.strip()]
    for part in sorted(parts, key=lambda part: "=" in part):  # NAME=DRAFT overrides the drafter for all
        name, equals, source = part.partition("=")
        if not equals or "/" in name:
            name, source = "", part
        if name and name not in names:
            raise InvalidArgument("--draft", f"{name!r} is not served; the models are {', '.join(names)}")
        draft: DraftSource = "mtp" if source == "mtp" else resolve_or_pull(source)
        drafts |= dict.fromkeys([name] if name else names, draft)
    return drafts


def parse_model_argument(model: str) -> tuple[str, str]:
    """Parse a model argument to the served name and the model name or path.

    >>> parse_model_argument("big=qwen"), parse_model_argument("/models/small.gguf")
    (('big', 'qwen'), ('small', '/models/small.gguf'))
    """
    name, equals, source = model.partition("=")
    if equals and name and "/" not in name:
        return name, source
    return (Path(model).stem, model) if model.endswith(".gguf") and ":" not in model else (model, model)


def format_server_url(listener: socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_open(settings: ServerSettings) -> None:
    """Warn if other machines can reach the server and it requires no key."""
    if not settings.api_keys and not is_loopback_name(settings.host):
        advice = "set --api-key-file or AFTERGLOW_SERVER_API_KEYS, or listen on 127.0.0.1"
        logger.warning("anyone who can reach %s can use this server: %s", settings.host, advice)


def print_storage_notice(console: Console, settings: Settings) -> None:
    """Say on the first run that conversations are stored on disk, and how to turn that off."""
    marker = get_cache_directory("storage-notice-shown")
    directory = apply_disk_cache(EngineSettings(), "", settings.load_options["disk_cache"]).disk_cache_directory
    if directory is None or not settings.load_options["disk_cache_bytes"] or marker.exists():
        return
    message = f"The prefix cache keeps conversations on disk, in {directory}, so that they outlive a restart."
    console.print(f"{message} --private turns that off, `afterglow cache clear` deletes them.", soft_wrap=True)
    with contextlib.suppress(OSError):  # then it is shown again
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def print_plans(console: Console, models: ModelRegistry) -> None:
    """Print what was chosen for each loaded model: a table on a terminal, otherwise one line."""
    for name, slot in models.slots.items():
        plan = None if slot.model is None else slot.model.fit
        if plan is None:
            continue
        if console.is_terminal:
            console.print(f"[bold]{name}[/]", build_fit_table(plan), sep="\n")
        else:
            console.print(f"{name}: {format_summary(plan)}", soft_wrap=True, markup=False)


def print_startup_message(console: Console, address: str, names: list[str], requires_key: bool) -> None:
    """Print the URL and an example request."""
    key = ' -H "Authorization: Bearer $KEY"' if requires_key else ""
    body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    console.print(f"[bold]{', '.join(names)}[/] at [bold]{address}[/]  [dim]Ctrl-C shuts down[/]", soft_wrap=True)
    console.print("[dim]example request:[/]", soft_wrap=True)
    example = f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"  {example}", soft_wrap=True, markup=False)
