"""`afterglow serve`: serve models over HTTP, with the APIs of OpenAI, Anthropic, Ollama and llama-server."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import webbrowser
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from socket import socket

import typer
from rich.console import Console

from afterglow import registry
from afterglow.api.fit import WANTED_CONTEXT_TOKENS, FitPlan
from afterglow.api.load import (
    add_ollama_layers,
    apply_disk_cache,
    build_engine_settings,
    count_shared_bytes,
    load,
    plan_load,
)
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions, build_model_settings
from afterglow.cli import options
from afterglow.cli.fit import build_fit_table, format_summary
from afterglow.cli.open_model import resolve_or_pull
from afterglow.cli.settings import SERVER_FIELDS, Settings, get_flag, load_command_settings
from afterglow.cluster.run import serve_on_ray
from afterglow.engine.host.build import DraftSource
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, OutOfMemory
from afterglow.llama.gguf.probe import list_split_files
from afterglow.llama.library.devices import MachineMemory
from afterglow.paths import get_cache_directory
from afterglow.registry import LocalModel
from afterglow.server.auth import is_loopback_name
from afterglow.server.installed import get_client_name
from afterglow.server.logs import logger, write_logs
from afterglow.server.model_budget import RAM
from afterglow.server.model_bytes import choose_limits, count_plan_bytes, divide_memory, get_memory, list_gpus
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.serve import bind, bind_ollama
from afterglow.server.serve import serve as run_server
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState
from afterglow.server.web.files import explain_disabled_page

NO_CLUSTER_SETTINGS = ("ollama", "allow_reload", "lazy_load", "keep_alive", "memory_bytes", "gpu_memory_bytes")
INSTALLED_KEEP_ALIVE_SECONDS = 300.0  # as in Ollama, of models that are not named on the command line

app = typer.Typer(add_completion=False)


@app.command("serve", cls=options.ServeCommand)
@options.accept_settings([*options.SERVER_OPTIONS, *options.SAMPLING_OPTIONS, "private", *options.MODEL_OPTIONS])
def serve(
    command: typer.Context,
    models: options.ModelsArgument = None,
    open_page: options.OpenPageOption = False,
    ray: options.RayOption = None,
) -> None:
    """Serve models over HTTP, with the APIs of OpenAI, Anthropic, Ollama and llama-server.

    Each model runs in its own engine process. Ctrl-C shuts down after running requests finish; a second Ctrl-C
    cancels them.
    """
    settings = load_command_settings(command)
    os.environ.pop("AFTERGLOW_SERVER_API_KEYS", None)  # the settings have digests; the engines must not inherit keys
    is_verbose = logging.getLogger().level == logging.DEBUG
    with write_logs("debug" if is_verbose else settings.server.log_level, settings.server.log_file):
        arguments = models or list(settings.models) or list_default_models(settings)
        served = dict(resolve_model_argument(argument, settings) for argument in arguments)
        if ray is None:
            serve_models(served, settings, opens_page=open_page)
        else:
            serve_on_cluster(served, settings, ray, opens_page=open_page)


def list_default_models(settings: Settings) -> list[str]:
    """List what is served if no model is named: the default model, or with `ollama` only what clients name."""
    return [] if settings.server.ollama and "model" not in settings.model_fields_set else [settings.model]


def serve_on_cluster(models: Mapping[str, str], settings: Settings, address: str, *, opens_page: bool = False) -> None:
    """Serve one model with replicas on a Ray cluster until a signal arrives."""
    if len(models) != 1:
        raise InvalidArgument("--ray", f"serves one model, not {len(models)}: start one application for each")
    ((name, model),) = models.items()
    check_cluster_settings(name, settings, opens_page=opens_page)
    resolve_or_pull(model)
    console = Console(stderr=True, highlight=False)
    server = choose_server_settings(settings)

    def announce(url: str) -> None:
        print_startup_message(console, url, [name], bool(server.api_keys))

    load_options = build_cluster_options(name, settings)
    serve_on_ray(model, name, address, server, load_options, settings.sampling_defaults, announce)


def check_cluster_settings(name: str, settings: Settings, *, opens_page: bool) -> None:
    """Raise `InvalidArgument` for a setting that cannot apply on a Ray cluster, which keeps its replicas loaded."""
    reason = "cannot be used with --ray"
    if opens_page:
        raise InvalidArgument("--open", reason)
    for field in NO_CLUSTER_SETTINGS:
        if getattr(settings.server, field) != SERVER_FIELDS[field].default:
            raise InvalidArgument(get_flag(field), reason)
    if settings.get_model_table(name).keep_alive not in (None, math.inf):
        raise InvalidArgument(f"models.{name}.keep_alive", reason)


def build_cluster_options(name: str, settings: Settings) -> LoadOptions:
    """Return the options of `load` of the replicas, without `replicas` if that is not set."""
    load_options, table = build_load_options([name], settings)[name], settings.get_model_table(name)
    draft = table.load_options.get("draft", settings.load_options["draft"])
    if "=" not in str(draft):
        load_options["draft"] = draft  # each machine looks up its file
    if "replicas" not in settings.model_fields_set | table.model_fields_set:
        del load_options["replicas"]
    return load_options


def serve_models(models: Mapping[str, str], settings: Settings, *, opens_page: bool = False) -> None:
    """Serve models under their names until a signal arrives. `opens_page`: open the web page in a browser."""
    console = Console(stderr=True, highlight=False)
    disabled = explain_disabled_page(settings.server)
    if opens_page and disabled is not None:
        raise InvalidArgument("--open", disabled)
    paths = {name: resolve_or_pull(model) for name, model in models.items()}
    if settings.load_options["projector"] and len(paths) > 1:
        reason = "applies to one model only: put each projector into the directory of its model"
        raise InvalidArgument("--projector", reason)
    if settings.load_options["adapters"] and len(paths) > 1:
        raise InvalidArgument("--adapter", "applies to one model only: use a table `[models.NAME.adapters]` for each")
    with (
        bind(settings.server) as listener,
        bind_ollama(settings.server) or contextlib.nullcontext() as ollama_listener,
        ServerState(build_model_registry(models, settings), choose_server_settings(settings)) as state,
    ):
        if not settings.server.lazy_load:
            with console.status(f"loading {', '.join(paths)}"):
                loaded = state.models.load_first()
            if later := [name for name in paths if name not in loaded]:
                limit = f"{state.models.limits[RAM] // 1024**2:,} MiB"
                console.print(f"{', '.join(later)}: loaded on demand; all models share {limit} of RAM", soft_wrap=True)
            print_plans(console, state.models)
        address, requires_key = format_server_url(listener), bool(settings.server.api_keys)
        warn_if_open(settings.server)
        print_storage_notice(console, settings)
        ollama_address = None if ollama_listener is None else format_server_url(ollama_listener)
        page = address if disabled is None else None

        def announce() -> None:
            print_startup_message(console, address, list(paths), requires_key, ollama_address, page)
            if opens_page:
                open_in_browser(address)

        run_server(
            state,
            listener,
            announce,
            ollama_listener=ollama_listener,
        )


def choose_server_settings(settings: Settings) -> ServerSettings:
    """Return the settings of the server. A private one keeps the conversations of its web page in memory."""
    server = settings.server
    return server.model_copy(update={"store_conversations": False}) if settings.private else server


def build_model_registry(models: Mapping[str, str | Path], settings: Settings) -> ModelRegistry:
    """Build the registry of the served models with their budget. Raises `OutOfMemory` if a model cannot fit."""
    options_by_name = build_load_options(models, settings)
    for name, model in models.items():
        options_by_name[name] = add_ollama_options(model, options_by_name[name])
    plans, nbytes, limits = plan_budget(models, options_by_name, settings)

    def build_installed(model: LocalModel) -> ServedModel:
        name = get_client_name(model.name)
        table = settings.models.get(model.name)  # under the name in the registry, or that of clients
        own = settings if table is None else settings.model_copy(update={"models": {**settings.models, name: table}})
        own_options = build_load_options([name], own)
        own_options[name]["adapters"] = own.get_model_table(name).load_options.get("adapters", {})
        own_options[name] = add_ollama_options(model.name, own_options[name])
        plan, model_bytes, _ = plan_budget({name: model.name}, own_options, own)
        served = build_served_model(name, model.name, own_options[name], plan[name], model_bytes[name], own)
        keep_alive = INSTALLED_KEEP_ALIVE_SECONDS if served.keep_alive == math.inf else served.keep_alive
        return replace(served, keep_alive=keep_alive, installed=model)

    return ModelRegistry(
        {
            name: build_served_model(name, model, options_by_name[name], plans[name], nbytes[name], settings)
            for name, model in models.items()
        },
        limits,
        aliases=settings.server.aliases,
        build_installed=build_installed if settings.server.ollama else None,
    )


def build_served_model(
    name: str,
    model: str | Path,
    load_options: LoadOptions,
    plan: FitPlan,
    nbytes: Mapping[str, int],
    settings: Settings,
) -> ServedModel:
    """Describe how a model is served, from its options of `load`, how they were chosen, and its bytes."""
    server, table = settings.server, settings.get_model_table(name)

    def open_model() -> Model:
        return load(
            model,
            host="process",
            name=name,
            media_policy=server.media_policy,
            sampling_defaults=settings.sampling_defaults,
            **load_options,
        )

    def change_context(context: int) -> ServedModel:
        unset = dict.fromkeys(plan.chosen)  # chosen again for the other context
        changed: dict[str, LoadOptions] = {name: {**load_options, **unset, "context": context}}  # type: ignore[typeddict-item]
        changed_plan, changed_bytes, _ = plan_budget({name: model}, changed, settings)
        return build_served_model(name, model, changed[name], changed_plan[name], changed_bytes[name], settings)

    return ServedModel(
        open_model,
        nbytes=nbytes,
        plan=plan,
        keep_alive=server.keep_alive if table.keep_alive is None else table.keep_alive,
        pinned=table.pinned,
        path=registry.resolve(model),
        adapters=tuple(load_options["adapters"]),
        definition=registry.read_ollama_definition(str(model)),
        with_context=change_context if server.allow_reload else None,
    )


def add_ollama_options(model: str | Path, load_options: LoadOptions) -> LoadOptions:
    """Return the options of `load` with what Ollama stores with a model of its own."""
    definition = registry.read_ollama_definition(str(model))
    return load_options if definition is None else add_ollama_layers(definition, load_options)


def build_load_options(names: Collection[str], settings: Settings) -> dict[str, LoadOptions]:
    """Return the options of `load` of each model: those of its table, else the common ones."""
    drafts = parse_drafts(settings.load_options["draft"], names)
    options_by_name: dict[str, LoadOptions] = {}
    for name in names:
        table = settings.get_model_table(name).load_options
        draft = parse_drafts(table["draft"], [name]) if "draft" in table else drafts
        options_by_name[name] = {**settings.load_options, **table, "draft": draft.get(name)}
        if settings.private:
            options_by_name[name]["disk_cache"] = False
            options_by_name[name]["shared_cache"] = None
    return options_by_name


def plan_budget(
    models: Mapping[str, str | Path], options_by_name: Mapping[str, LoadOptions], settings: Settings
) -> tuple[dict[str, FitPlan], dict[str, dict[str, int]], dict[str, int]]:
    """Choose the options of each model that are not set, within the memory of all models.

    Returns the plans, the bytes of each model by device, and the limits of all models. If the models fit together with
    a context of `WANTED_CONTEXT_TOKENS` each, they share the memory. Otherwise each may use all of it, and they take
    turns.
    """
    gpus = list_gpus()
    limits = choose_limits(settings.server.memory_bytes, settings.server.gpu_memory_bytes, gpus)
    paths = {name: registry.resolve(model) for name, model in models.items()}

    def plan(name: str, memory: MachineMemory) -> FitPlan:
        engine_settings = build_engine_settings(None, options_by_name[name], options_by_name[name], label="")
        draft: DraftSource | None = options_by_name[name]["draft"]  # type: ignore[assignment]
        try:
            return plan_load(paths[name], options_by_name[name], engine_settings, draft=draft, memory=memory)
        except OutOfMemory as error:
            if settings.server.memory_bytes is None:
                raise
            advice = f"Raise `memory_bytes` to at least {-(-error.needed_bytes // 1024**2):,} MiB, or {error.advice}"
            raise OutOfMemory(error.needed_bytes, error.available_bytes, advice) from None

    memory = get_memory(limits, gpus)
    plans = {name: plan(name, memory) for name in models}
    weights = {name: sum(file.stat().st_size for file in list_split_files(path)) for name, path in paths.items()}
    with contextlib.suppress(OutOfMemory):
        together = {name: plan(name, share) for name, share in divide_memory(memory, weights).items()}
        wanted = {name: min(plans[name].options["context"], WANTED_CONTEXT_TOKENS) for name in models}
        if all(together[name].options["context"] >= wanted[name] for name in models):
            plans = together
    for name in models:
        options_by_name[name].update(plans[name].options)  # type: ignore[typeddict-item]
    nbytes = {}
    for name in models:
        one = count_plan_bytes(plans[name], build_model_settings(options_by_name[name]), gpus)
        shared = count_shared_bytes(paths[name], options_by_name[name], memory)
        replicas = options_by_name[name]["replicas"]
        nbytes[name] = {
            device: count * replicas - (replicas - 1) * shared * (device == RAM) for device, count in one.items()
        }
    return plans, nbytes, limits


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


def resolve_model_argument(argument: str, settings: Settings) -> tuple[str, str]:
    """Return the served name and the model name or path of an argument, which may be the name of a model table."""
    name, model = parse_model_argument(argument)
    table = settings.models.get(argument)
    return (name, model) if table is None else (argument, table.model or argument)


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


def open_in_browser(address: str) -> None:
    """Open the web page in the user's browser, on a thread: some browsers return only when they are closed."""
    threading.Thread(target=webbrowser.open, args=(f"{address}/",), name="afterglow-browser", daemon=True).start()


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
    """Print what was chosen for each model: a table on a terminal, otherwise one line."""
    for name, slot in models.slots.items():
        if (plan := slot.served.plan) is None:
            continue
        if console.is_terminal:
            console.print(f"[bold]{name}[/]", build_fit_table(plan), sep="\n")
        else:
            console.print(f"{name}: {format_summary(plan)}", soft_wrap=True, markup=False)


def print_startup_message(
    console: Console,
    address: str,
    names: list[str],
    requires_key: bool,
    ollama_address: str | None = None,
    page: str | None = None,
) -> None:
    """Print the URL, that of Ollama's port and of the web page, and an example request."""
    key = ' -H "Authorization: Bearer $KEY"' if requires_key else ""
    name = names[0] if names else "MODEL"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    served = ", ".join(names) or "every installed model"
    console.print(f"[bold]{served}[/] at [bold]{address}[/]  [dim]Ctrl-C shuts down[/]", soft_wrap=True)
    if ollama_address is not None:
        console.print(f"Ollama API also at [bold]{ollama_address}[/]", soft_wrap=True)
    if page is not None:
        console.print(f"Chat and prefix tree in a browser: [bold]{page}/[/]", soft_wrap=True)
    console.print("[dim]example request:[/]", soft_wrap=True)
    example = f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"  {example}", soft_wrap=True, markup=False)
