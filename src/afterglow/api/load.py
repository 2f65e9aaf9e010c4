"""`load()`: resolves a name or path to model files, chooses settings, and builds a `Model`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias, Unpack, cast

from afterglow import registry
from afterglow.api.adapters import read_adapters
from afterglow.api.fit import Companions, FitPlan, add_snapshots, plan_fit
from afterglow.api.model import Model
from afterglow.api.options import (
    LoadOptions,
    SamplingOptions,
    build_context_settings,
    build_model_settings,
    check_options,
    count_usable_cores,
    document_options,
    select_fields,
)
from afterglow.api.quantization import choose_quantization
from afterglow.engine.host.build import DraftSource, EngineSpec, find_projector
from afterglow.engine.host.lifecycle import Lifecycle, LoadHook, LoadState, ProcessLifecycle, ThreadLifecycle
from afterglow.engine.kvcache.objects.client import check_store_url, read_key
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, InvalidModel, LoadError
from afterglow.llama.gguf.footprint import ModelFacts
from afterglow.llama.gguf.header import read_header
from afterglow.llama.gguf.probe import check_headers, ensure_safe, is_proven, list_split_files
from afterglow.llama.library.devices import MachineMemory, measure_memory
from afterglow.llama.model import ProgressCallback
from afterglow.llama.projector import ProjectorSettings
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.paths import get_cache_directory
from afterglow.registry import OllamaDefinition

HOSTS = ("thread", "process")
DEFAULT_RECURRENT_SNAPSHOTS = 4  # of recurrent state, if a drafter is loaded
FirstState: TypeAlias = Literal["active", "warm", "cold"] | LoadState
FIRST_STATES = (LoadState.ACTIVE, LoadState.WARM, LoadState.COLD)


@document_options(LoadOptions)
def load(
    model: str | os.PathLike[str],
    *,
    host: Literal["thread", "process"] = "thread",
    name: str | None = None,
    projector_settings: ProjectorSettings | None = None,
    media_policy: MediaPolicy = INLINE_ONLY,
    sampling_defaults: SamplingOptions | None = None,
    engine: EngineSettings | None = None,
    state: FirstState = "active",
    fetch: bool = False,
    progress: ProgressCallback | None = None,
    hooks: Sequence[LoadHook] = (),
    **options: Unpack[LoadOptions],
) -> Model:
    """Load a model by name or path and return it, ready for use. `afterglow models` lists the names.

    Close the model after use, or load it in a `with` statement.

    Args:
        model: Name of a known model, or path of a GGUF file.
        host: Where the engine runs: in a "thread" of this process, or in a child "process". A crash of the child only
            fails the requests in flight, and busy Python threads do not slow it down.
        name: Name of the model in results and errors. None: `model`.
        projector_settings: Settings of the projector.
        media_policy: Where images and audio may come from and how large they may be. By default they must be inside the
            messages.
        sampling_defaults: Sampling options of requests that do not set them, e.g. `{"temperature": 0.5}`. They override
            those of the model file; `Model.sampling_defaults` has the result.
        engine: All settings of the engine. An option that is also a setting of the engine replaces it.
        state: First load state: "active", "warm" or "cold".
        fetch: Download a known model that is not on this machine.
        progress: Called with the loaded fraction, from 0 to 1. Returning False cancels the load.
        hooks: Called before the model is loaded; each may reject the load.
        options: Options of weights, context, prefix cache, speculation and media: see `LoadOptions`.

    Options that are not set are chosen so that the model fits into the free memory: `Model.fit` has them, with the
    reasons. Raises `InvalidArgument` or `OutOfMemory` before anything is loaded, or `ModelNotFound` or `InvalidModel`;
    the last three are `LoadError`s.

    >>> with afterglow.load("smollm2", context=512) as small:
    ...     small.count_tokens("How many tokens is this?")
    6
    """
    if not isinstance(model, str | os.PathLike):
        raise InvalidArgument("model", f"must be a name or a path, not {model!r}")
    if host not in HOSTS:
        raise InvalidArgument("host", f"must be {' or '.join(HOSTS)}, not {host!r}")
    if state not in FIRST_STATES:
        raise InvalidArgument("state", f"must be one of {', '.join(FIRST_STATES)}, not {state!r}")
    for keyword, value, kind in (
        ("engine", engine, EngineSettings),
        ("media_policy", media_policy, MediaPolicy),
        ("projector_settings", projector_settings, ProjectorSettings),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidArgument(keyword, f"must be {kind.__name__}, not {value!r}")
    checked = check_options(LoadOptions, options, others=inspect.signature(load).parameters)
    sampling = check_options(SamplingOptions, sampling_defaults or {})
    chat_template = read_chat_template(checked["chat_template"])
    draft = resolve_draft(checked["draft"], fetch=fetch)
    path = resolve_model_path(model, fetch=fetch, needs_trial=host == "thread")
    definition = registry.read_ollama_definition(str(model))
    if definition is not None:
        checked = add_ollama_layers(definition, checked)
    engine_settings = build_engine_settings(engine, checked, options, label=str(path))
    plan = plan_load(path, checked, engine_settings, draft=draft)
    spec = build_engine_spec(
        path, checked, engine_settings, draft=draft, projector_settings=projector_settings, plan=plan
    )
    lifecycle = build_lifecycle(spec, hooks, host=host, replicas=checked["replicas"])
    try:
        advance_to(LoadState(state), lifecycle, progress)
        return Model(
            lifecycle,
            str(model) if name is None else name,
            chat_template=chat_template,
            media_policy=media_policy,
            strip_media=checked["strip_media"],
            replay=checked["replay"],
            ollama_parameters=None if definition is None else definition.parameters,
            default_lora=[] if definition is None else list(name_adapters(definition)),
            sampling_defaults=sampling,
            shorten_embeddings=checked["shorten_embeddings"],
            reranker=checked["reranker"],
            fit=plan,
        )
    except BaseException:
        lifecycle.close()
        raise


# --- files


def resolve_model_path(model: str | os.PathLike[str], *, fetch: bool, needs_trial: bool = True) -> Path:
    """Return the file of a model, after a check of its header and, if needed, a trial that it cannot crash a process.

    An engine in a child process needs no trial before: its own load is the trial.
    """
    path = registry.resolve(
        Path(model) if isinstance(model, os.PathLike) else model, fetch=fetch, choose=choose_quantization
    )
    if needs_trial:
        ensure_safe(path)
    elif not is_proven(path):
        check_headers(path)
    return path


def add_ollama_layers(definition: OllamaDefinition, options: LoadOptions) -> LoadOptions:
    """Return the options with what Ollama stores with its model: context, projector, adapters. Given ones win."""
    if options["context"] is None and definition.context is not None:
        trained = read_facts(definition.path).hyperparameters.trained_context
        options = {**options, "context": min(definition.context, trained or definition.context)}
    if options["projector"] is None and definition.projector is not None:
        options = {**options, "projector": definition.projector}
    adapters = name_adapters(definition)
    try:
        read_adapters(definition.path, adapters)
    except LoadError as error:
        raise InvalidModel(str(definition.path), f"its layer `adapter` cannot be used: {error}") from None
    return {**options, "adapters": {**adapters, **options["adapters"]}}


def name_adapters(definition: OllamaDefinition) -> dict[str, tuple[str, float]]:
    """Return the adapters of a model of Ollama as the option `adapters`, with the scale 1."""
    names = ["ollama", *(f"ollama-{number}" for number in range(2, len(definition.adapters) + 1))]
    return {name: (str(path), 1.0) for name, path in zip(names, definition.adapters, strict=False)}


def resolve_draft(draft: str | os.PathLike[str] | None, *, fetch: bool) -> DraftSource | None:
    """Return the source of draft tokens: the MTP heads of the model, or the file of a draft model."""
    if draft is None or draft == "mtp":
        return None if draft is None else "mtp"
    return resolve_model_path(draft, fetch=fetch)


def resolve_projector(model: Path, projector: str | os.PathLike[str] | Literal[False] | None) -> Path | None:
    """Return the projector file: the given one, the one pulled with the model, or the only one next to its file."""
    if projector is None or projector is False:
        return registry.find_projector_of(model) or find_projector(model) if projector is None else None
    return Path(projector).expanduser()


def read_chat_template(template: str | os.PathLike[str] | None) -> str | None:
    """Return a chat template that is given as text or as the path of a file; None without one."""
    if isinstance(template, str) and "{" not in template:
        reason = f"has no variable, so that it would be every prompt: pass a `Path` to read a file, not {template!r}"
        raise InvalidArgument("chat_template", reason)
    if template is None or isinstance(template, str):
        return template
    try:
        return Path(template).expanduser().read_text()
    except (OSError, ValueError) as error:
        raise InvalidArgument("chat_template", f"{template} cannot be read: {error}") from None


# --- settings


def plan_load(
    path: Path,
    options: LoadOptions,
    engine_settings: EngineSettings,
    *,
    draft: DraftSource | None = None,
    memory: MachineMemory | None = None,
) -> FitPlan:
    """Choose the options that are not set, from the headers of the files and the free memory, by default of now.

    The plan is that of one replica.
    """
    memory = memory or measure_memory()
    if options["replicas"] > 1:
        memory = divide_among_replicas(memory, options, count_shared_bytes(path, options, memory))
    projector = resolve_projector(path, options["projector"])
    companions = Companions(
        draft=read_facts(draft) if isinstance(draft, Path) else None,
        uses_mtp=draft == "mtp",
        projector_bytes=count_tensor_bytes(projector) if projector is not None else 0,
        adapter_bytes=sum(count_tensor_bytes(Path(file).expanduser()) for file, _ in options["adapters"].values()),
        recurrent_snapshots=count_recurrent_snapshots(draft, engine_settings),
    )
    if options["ram_cache_bytes"] is None:
        options = {**options, "ram_cache_bytes": engine_settings.ram_cache_bytes}
    return plan_fit(read_facts(path), options, memory, companions)


def count_shared_bytes(path: Path, options: LoadOptions, memory: MachineMemory) -> int:
    """Return the bytes of the weights if replicas share them: mapped files are in RAM once."""
    is_shared = options["mmap"] and not memory.gpu_bytes
    return sum(file.stat().st_size for file in list_split_files(path)) if is_shared else 0


def divide_among_replicas(memory: MachineMemory, options: LoadOptions, shared_bytes: int) -> MachineMemory:
    """Return the memory of one replica: what all share, and an equal part of the rest.

    >>> from afterglow.api.options import check_options
    >>> options = check_options(LoadOptions, {"replicas": 2})
    >>> divide_among_replicas(MachineMemory(ram_bytes=100), options, shared_bytes=40).ram_bytes
    70
    """
    replicas, rest = options["replicas"], max(0, memory.ram_bytes - shared_bytes)
    return replace(
        memory,
        ram_bytes=min(memory.ram_bytes, shared_bytes) + rest // replicas,
        gpu_bytes=tuple(nbytes // replicas for nbytes in memory.gpu_bytes),
    )


def read_facts(path: Path) -> ModelFacts:
    """Read what the headers of a model say about its memory."""
    return ModelFacts([read_header(file) for file in list_split_files(path)])


def count_tensor_bytes(path: Path) -> int:
    """Return the bytes of the tensors of a file; 0 if it cannot be read, which is reported when it is loaded."""
    try:
        return sum(tensor.nbytes for tensor in read_header(path).tensors)
    except (InvalidModel, OSError):
        return 0


def build_engine_spec(
    path: Path,
    options: LoadOptions,
    engine_settings: EngineSettings,
    *,
    draft: DraftSource | None,
    projector_settings: ProjectorSettings | None = None,
    plan: FitPlan | None = None,
) -> EngineSpec:
    """Return the spec of an engine from checked options, with all unset values chosen by `plan` or a new one."""
    check_draft(draft, engine_settings)
    plan = plan or plan_load(path, options, engine_settings, draft=draft)
    options = cast(LoadOptions, {**options, **plan.options})
    if options["threads"] is None:
        options["threads"] = max(1, count_usable_cores() // options["replicas"])
    snapshots = count_recurrent_snapshots(draft, engine_settings)
    context_settings = add_snapshots(build_context_settings(options), snapshots)
    model_settings = build_model_settings(options)
    return EngineSpec(
        path=path,
        model_settings=replace(model_settings, mtp=draft == "mtp"),
        context_settings=context_settings,
        engine_settings=replace(engine_settings, ram_cache_bytes=options["ram_cache_bytes"]),
        draft=draft,
        projector_path=resolve_projector(path, options["projector"]),
        adapters=read_adapters(path, options["adapters"]),
        projector_settings=projector_settings
        or ProjectorSettings(use_gpu=model_settings.gpu_layers != 0, threads=context_settings.threads),
    )


def check_draft(draft: DraftSource | None, settings: EngineSettings) -> None:
    """Raise `InvalidArgument` if a drafter would have no effect."""
    if draft is None:
        return
    name = "mtp" if draft == "mtp" else "draft"
    if settings.deterministic:
        raise InvalidArgument("draft", "has no effect: deterministic mode does not speculate")
    if settings.speculation == "off":
        raise InvalidArgument("draft", 'has no effect: speculation is "off"')
    if settings.drafters is not None and name not in settings.drafters:
        raise InvalidArgument("draft", f"has no effect: `drafters` is {settings.drafters}, without {name!r}")


def count_recurrent_snapshots(draft: DraftSource | None, settings: EngineSettings) -> int:
    """Return how many draft tokens recurrent memory must be able to roll back.

    Each snapshot takes as much memory as the recurrent state itself, for every sequence, so the default without a
    drafter is 0.
    """
    if settings.speculation == "off" or settings.deterministic:
        return 0
    if isinstance(settings.speculation, int):
        return settings.speculation
    return 0 if draft is None else DEFAULT_RECURRENT_SNAPSHOTS


def build_engine_settings(
    base: EngineSettings | None, options: LoadOptions, given: Container[str], *, label: str
) -> EngineSettings:
    """Return `base`, or the defaults, with the options whose names are `given`, and with the disk cache directory."""
    values = {name: value for name, value in select_fields(EngineSettings, options).items() if name in given}
    if values.get("shared_cache") is not None:
        values["shared_cache"] = check_store_url(values["shared_cache"])
    if values.get("shared_cache_key_file") is not None:
        values["shared_cache_key_file"] = Path(values["shared_cache_key_file"])
        read_key(values["shared_cache_key_file"])
    settings = replace(base or EngineSettings(), **values)
    if settings.ram_cache_bytes == 0:  # every tier is filled from RAM
        stores = {
            "disk_cache": options["disk_cache"],
            "disk_cache_directory": settings.disk_cache_directory,
            "shared_cache": settings.shared_cache,
        }
        for name in (name for name, value in stores.items() if value):
            raise InvalidArgument(name, "has no effect: `ram_cache_bytes` is 0, so that nothing is stored")
    is_shared = options["replicas"] > 1 or settings.shared_cache is not None
    settings = replace(settings, write_through=settings.write_through or is_shared)
    return apply_disk_cache(settings, label, options["disk_cache"])


def apply_disk_cache(settings: EngineSettings, label: str, disk_cache: bool | None = None) -> EngineSettings:
    """Return the settings with the default disk cache directory, unless the disk cache is off.

    `disk_cache` None reads the environment variable AFTERGLOW_DISK_CACHE.

    >>> apply_disk_cache(EngineSettings(), "tiny", disk_cache=False).disk_cache_directory is None
    True
    """
    enabled = (
        os.environ.get("AFTERGLOW_DISK_CACHE", "on").lower() not in ("off", "0", "false", "no")
        if disk_cache is None
        else disk_cache
    )
    if not enabled or settings.disk_cache_directory is not None:
        return settings
    return replace(settings, disk_cache_directory=get_cache_directory("prefix"), disk_cache_label=label)


# --- lifecycle


def build_lifecycle(
    spec: EngineSpec, hooks: Sequence[LoadHook], *, host: Literal["thread", "process"], replicas: int = 1
) -> Lifecycle:
    """Return the lifecycle of a model whose engine, or engines, run in this host."""
    if host == "process":
        return ProcessLifecycle(spec, hooks, replicas=replicas)
    if replicas > 1:
        raise InvalidArgument("replicas", f'is {replicas}, but an engine in a thread has none: use host="process"')
    return ThreadLifecycle(spec, hooks)


def advance_to(state: LoadState, lifecycle: Lifecycle, progress: ProgressCallback | None) -> None:
    """Move a COLD model to a load state."""
    match state:
        case LoadState.WARM:
            lifecycle.warm(progress)
        case LoadState.ACTIVE:
            lifecycle.activate(progress)
