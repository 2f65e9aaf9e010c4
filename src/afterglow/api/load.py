"""`load()`: from a name or a path to a model that can be used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from afterglow import registry
from afterglow.api.model import Model
from afterglow.engine.host.build import DraftSource, EngineSpec, find_projector
from afterglow.engine.host.lifecycle import Lifecycle, LoadHook, LoadState
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.checks import check_integer
from afterglow.llama.gguf.footprint import count_layers_that_fit
from afterglow.llama.gguf.header import read_header
from afterglow.llama.gguf.probe import ensure_safe
from afterglow.llama.library.devices import get_free_memory
from afterglow.llama.model import ModelSettings, ProgressCallback
from afterglow.llama.projector import ProjectorSettings
from afterglow.llama.settings import CacheType, ContextSettings
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.paths import get_cache_directory

SCORING_SEQUENCES = 1  # sequence that answers leave alone, for scoring texts beside them
GPU_BATCH_ROWS = 16_384  # rows of a decode: between two of them a GPU has nothing to do
DEFAULT_RECURRENT_SNAPSHOTS = 4  # of recurrent states, where something guesses ahead


def load(
    model: str | os.PathLike[str],
    *,
    context: int = 4096,
    sequences: int = 4,
    gpu_layers: int | None = None,
    threads: int | None = None,
    cache_type_k: CacheType = "f16",
    cache_type_v: CacheType = "f16",
    flash_attention: bool | None = None,
    kv_unified: bool = False,
    mmap: bool = True,
    mlock: bool = False,
    chat_template: str | None = None,
    disk_cache: bool | None = None,
    draft: str | os.PathLike[str] | None = None,
    projector: str | os.PathLike[str] | Literal[False] | None = None,
    projector_settings: ProjectorSettings | None = None,
    media_policy: MediaPolicy = INLINE_ONLY,
    strip_media: bool = False,
    engine: EngineSettings | None = None,
    state: LoadState | str = LoadState.ACTIVE,
    fetch: bool = False,
    progress: ProgressCallback | None = None,
    hooks: Sequence[LoadHook] = (),
) -> Model:
    """Load a model by name (`afterglow models` lists them) or by path.

    `context` is how many tokens one request can hold, `sequences` how many requests run at once and how many
    conversations stay in memory. `gpu_layers` None puts as many layers on a GPU as fit, if there is one.
    `chat_template` takes the place of the model's own. `draft` guesses ahead where that is faster: "mtp" for the
    model's own heads, or a smaller model of the same vocabulary, by name or path. `projector` is the file that lets it
    take pictures or sound; without one, a `*mmproj*.gguf` beside the model is taken where there is exactly one (False:
    none). One that cannot be used leaves text working: `media_trouble` says why. `media` says where pictures and sounds
    may come from and how large they may be; by default messages contain them. With `strip_media`, those that the model
    cannot take are left out with a warning, and not refused. What was computed is kept on `disk` for the next time,
    unless that is False or the variable AFTERGLOW_DISK_CACHE says `off`. With `fetch`, a known model that is not here yet is
    downloaded.

    >>> with afterglow.load("smollm2", context=512) as small:
    ...     small.count_tokens("How many tokens is this?")
    6
    """
    path, drafting = resolve_model_path(model, fetch=fetch), _resolve_draft(draft, fetch=fetch)
    memory = replace(
        build_context_settings(context, sequences, threads),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attention,
        kv_unified=kv_unified,
    )
    recipe = build_engine_spec(
        path,
        ModelSettings(mmap=mmap, mlock=mlock),
        memory,
        apply_disk_cache(engine or EngineSettings(), str(path), disk_cache),
        gpu_layers=gpu_layers,
        draft=drafting,
        projector=projector,
        projector_settings=projector_settings,
    )
    lifecycle = build_lifecycle(recipe, hooks)
    try:  # what guesses for it may not fit where the model itself did
        advance_to(LoadState(state), lifecycle, progress)
        return Model(
            lifecycle,
            str(model),
            recipe.engine_settings,
            chat_template,
            drafting,
            media_policy,
            strip_media=strip_media,
        )
    except BaseException:
        lifecycle.close()
        raise


# --- which files


def resolve_model_path(model: str | os.PathLike[str], *, fetch: bool) -> Path:
    """The file of a model, once it is known that loading it cannot end the program."""
    path = registry.resolve(Path(model) if isinstance(model, os.PathLike) else model, fetch=fetch)
    ensure_safe(path)
    return path


def _resolve_draft(draft: str | os.PathLike[str] | None, *, fetch: bool) -> DraftSource | None:
    """What guesses: the model's heads, or the file of a smaller model."""
    if draft is None or draft == "mtp":
        return None if draft is None else "mtp"
    return resolve_model_path(draft, fetch=fetch)


def resolve_projector(model: Path, projector: str | os.PathLike[str] | Literal[False] | None) -> Path | None:
    """The file that lets a model see or hear: the one that was named, or the only one beside the model's."""
    if projector is None or projector is False:
        return find_projector(model) if projector is None else None
    return Path(projector).expanduser()


# --- how they are loaded


def build_context_settings(context: int, sequences: int, threads: int | None) -> ContextSettings:
    """Memory for so many requests at once of so many tokens each, and for scoring texts beside them.

    >>> memory_for(1024, sequences=3, threads=1).cells
    4096
    """
    slots = check_integer("sequences", sequences, 1, 255) + SCORING_SEQUENCES
    return ContextSettings(
        cells=slots * check_integer("context", context, 1, 2**31 // 256),
        sequences=slots,
        outputs=max(64, slots),
        threads=count_usable_cores() if threads is None else threads,
    )


def build_engine_spec(
    path: Path,
    model_settings: ModelSettings,
    context_settings: ContextSettings,
    engine_settings: EngineSettings,
    *,
    gpu_layers: int | None,
    draft: DraftSource | None,
    projector: str | os.PathLike[str] | Literal[False] | None,
    projector_settings: ProjectorSettings | None = None,
) -> EngineSpec:
    """How an engine is made on a file, with everything decided that was left open."""
    context_settings = replace(context_settings, recurrent_snapshots=count_recurrent_snapshots(draft, engine_settings))
    layers = count_fitting_layers(path, context_settings) if gpu_layers is None else gpu_layers
    if layers and draft != "mtp":  # heads want a hidden state of every row, which is as much again as the batch
        context_settings = replace(context_settings, batch=max(context_settings.batch, GPU_BATCH_ROWS))
    return EngineSpec(
        path=path,
        model_settings=replace(model_settings, gpu_layers=layers, mtp=draft == "mtp"),
        context_settings=context_settings,
        engine_settings=engine_settings,
        reserved_sequences=SCORING_SEQUENCES,
        draft=draft,
        projector_path=resolve_projector(path, projector),
        projector_settings=projector_settings
        or ProjectorSettings(use_gpu=layers != 0, threads=context_settings.threads),
    )


def count_recurrent_snapshots(draft: DraftSource | None, settings: EngineSettings) -> int:
    """Wrong guesses that recurrent memory must be able to drop. Each takes as much as the state itself, for every
    sequence, so only where somebody asked for guesses."""
    if settings.speculation == "off" or settings.deterministic:
        return 0
    if isinstance(settings.speculation, int):
        return settings.speculation
    return 0 if draft is None else DEFAULT_RECURRENT_SNAPSHOTS


def apply_disk_cache(settings: EngineSettings, label: str, disk_cache: bool | None = None) -> EngineSettings:
    """The settings with a place on disk for what was computed, where nothing says otherwise.

    >>> kept(EngineSettings(), "tiny", disk=False).disk_directory is None
    True
    """
    wanted = (
        os.environ.get("AFTERGLOW_DISK_CACHE", "on").lower() not in ("off", "0", "false", "no")
        if disk_cache is None
        else disk_cache
    )
    if not wanted or settings.disk_cache_directory is not None:
        return settings
    return replace(settings, disk_cache_directory=get_cache_directory("prefix"), disk_cache_label=label)


def count_usable_cores() -> int:
    """Cores this process may use; hyper-threads only slow matrix products down, so they do not count."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def count_fitting_layers(path: Path, settings: ContextSettings) -> int:
    """How many layers to put on the GPUs of this machine; 0 where there is none."""
    free = get_free_memory(gpu=True)
    return count_layers_that_fit(read_header(path), settings, free) if free else 0


# --- how far


def build_lifecycle(spec: EngineSpec, hooks: Sequence[LoadHook]) -> Lifecycle:
    """The way of a model from its file to a context, not yet begun."""
    return Lifecycle(
        spec.path,
        spec.model_settings,
        spec.context_settings,
        hooks=hooks,
        projector_path=spec.projector_path,
        projector_settings=spec.projector_settings,
    )


def advance_to(state: LoadState, lifecycle: Lifecycle, progress: ProgressCallback | None) -> None:
    """Bring a model that is COLD to where it should be."""
    match state:
        case LoadState.WARM:
            lifecycle.warm(progress)
        case LoadState.ACTIVE:
            lifecycle.activate(progress)
