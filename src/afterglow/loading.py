"""`load()`: from a name or a path to a model that can be used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from afterglow import registry
from afterglow.engine.lifecycle import Lifecycle, LoadHook, Stage
from afterglow.engine.recipe import Draft, LlamaEngine, beside
from afterglow.engine.settings import EngineSettings
from afterglow.llama.arguments import integer
from afterglow.llama.devices import free_memory
from afterglow.llama.footprint import layers_that_fit
from afterglow.llama.header import read_header
from afterglow.llama.model import ModelSettings, Progress
from afterglow.llama.probe import ensure_safe
from afterglow.llama.projector import ProjectorSettings
from afterglow.llama.settings import CacheType, ContextSettings
from afterglow.media.policy import CLOSED, MediaPolicy
from afterglow.model import Model
from afterglow.paths import cache_directory

SCORING = 1  # sequence that answers leave alone, for scoring texts beside them
GPU_BATCH = 16_384  # rows of a decode: between two of them a GPU has nothing to do
SNAPSHOTS = 4  # of recurrent states, where something guesses ahead


def load(
    model: str | os.PathLike[str],
    *,
    context: int = 4096,
    sequences: int = 4,
    gpu_layers: int | None = None,
    threads: int | None = None,
    key_type: CacheType = "f16",
    value_type: CacheType = "f16",
    flash_attention: bool | None = None,
    unified: bool = False,
    mmap: bool = True,
    mlock: bool = False,
    chat_template: str | None = None,
    disk: bool | None = None,
    draft: str | os.PathLike[str] | None = None,
    projector: str | os.PathLike[str] | Literal[False] | None = None,
    projecting: ProjectorSettings | None = None,
    media: MediaPolicy = CLOSED,
    strip_media: bool = False,
    engine: EngineSettings | None = None,
    state: Stage | str = Stage.ACTIVE,
    fetch: bool = False,
    progress: Progress | None = None,
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
    unless that is False or the variable AFTERGLOW_DISK says `off`. With `fetch`, a known model that is not here yet is
    downloaded.

    >>> with afterglow.load("smollm2", context=512) as small:
    ...     small.count_tokens("How many tokens is this?")
    6
    """
    path, drafting = safe_path(model, fetch=fetch), _draft(draft, fetch=fetch)
    memory = replace(
        memory_for(context, sequences, threads),
        key_type=key_type,
        value_type=value_type,
        flash_attention=flash_attention,
        unified=unified,
    )
    recipe = recipe_for(
        path,
        ModelSettings(mmap=mmap, mlock=mlock),
        memory,
        kept(engine or EngineSettings(), str(path), disk),
        gpu_layers=gpu_layers,
        draft=drafting,
        projector=projector,
        projecting=projecting,
    )
    lifecycle = lifecycle_of(recipe, hooks)
    try:  # what guesses for it may not fit where the model itself did
        raise_to(Stage(state), lifecycle, progress)
        return Model(lifecycle, str(model), recipe.engine, chat_template, drafting, media, strip_media=strip_media)
    except BaseException:
        lifecycle.close()
        raise


# --- which files


def safe_path(model: str | os.PathLike[str], *, fetch: bool) -> Path:
    """The file of a model, once it is known that loading it cannot end the program."""
    path = registry.resolve(Path(model) if isinstance(model, os.PathLike) else model, fetch=fetch)
    ensure_safe(path)
    return path


def _draft(draft: str | os.PathLike[str] | None, *, fetch: bool) -> Draft | None:
    """What guesses: the model's heads, or the file of a smaller model."""
    if draft is None or draft == "mtp":
        return None if draft is None else "mtp"
    return safe_path(draft, fetch=fetch)


def projector_of(model: Path, projector: str | os.PathLike[str] | Literal[False] | None) -> Path | None:
    """The file that lets a model see or hear: the one that was named, or the only one beside the model's."""
    if projector is None or projector is False:
        return beside(model) if projector is None else None
    return Path(projector).expanduser()


# --- how they are loaded


def memory_for(context: int, sequences: int, threads: int | None) -> ContextSettings:
    """Memory for so many requests at once of so many tokens each, and for scoring texts beside them.

    >>> memory_for(1024, sequences=3, threads=1).cells
    4096
    """
    slots = integer("sequences", sequences, 1, 255) + SCORING
    return ContextSettings(
        cells=slots * integer("context", context, 1, 2**31 // 256),
        sequences=slots,
        outputs=max(64, slots),
        threads=usable_cores() if threads is None else threads,
    )


def recipe_for(
    path: Path,
    model: ModelSettings,
    memory: ContextSettings,
    engine: EngineSettings,
    *,
    gpu_layers: int | None,
    draft: Draft | None,
    projector: str | os.PathLike[str] | Literal[False] | None,
    projecting: ProjectorSettings | None = None,
) -> LlamaEngine:
    """How an engine is made on a file, with everything decided that was left open."""
    memory = replace(memory, rollback=needed_rollback(draft, engine))
    layers = fitting_layers(path, memory) if gpu_layers is None else gpu_layers
    if layers and draft != "mtp":  # heads want a hidden state of every row, which is as much again as the batch
        memory = replace(memory, batch=max(memory.batch, GPU_BATCH))
    return LlamaEngine(
        path=path,
        model=replace(model, gpu_layers=layers, mtp=draft == "mtp"),
        context=memory,
        engine=engine,
        reserved=SCORING,
        draft=draft,
        projector=projector_of(path, projector),
        projecting=projecting or ProjectorSettings(gpu=layers != 0, threads=memory.threads),
    )


def needed_rollback(draft: Draft | None, settings: EngineSettings) -> int:
    """Wrong guesses that recurrent memory must be able to drop. Each takes as much as the state itself, for every
    sequence, so only where somebody asked for guesses."""
    if settings.speculation == "off" or settings.deterministic:
        return 0
    if isinstance(settings.speculation, int):
        return settings.speculation
    return 0 if draft is None else SNAPSHOTS


def kept(settings: EngineSettings, name: str, disk: bool | None = None) -> EngineSettings:
    """The settings with a place on disk for what was computed, where nothing says otherwise.

    >>> kept(EngineSettings(), "tiny", disk=False).disk_directory is None
    True
    """
    wanted = os.environ.get("AFTERGLOW_DISK", "on").lower() not in ("off", "0", "false", "no") if disk is None else disk
    if not wanted or settings.disk_directory is not None:
        return settings
    return replace(settings, disk_directory=cache_directory("prefix"), disk_name=name)


def usable_cores() -> int:
    """Cores this process may use; hyper-threads only slow matrix products down, so they do not count."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def fitting_layers(path: Path, settings: ContextSettings) -> int:
    """How many layers to put on the GPUs of this machine; 0 where there is none."""
    free = free_memory(gpu=True)
    return layers_that_fit(read_header(path), settings, free) if free else 0


# --- how far


def lifecycle_of(recipe: LlamaEngine, hooks: Sequence[LoadHook]) -> Lifecycle:
    """The way of a model from its file to a context, not yet begun."""
    return Lifecycle(
        recipe.path,
        recipe.model,
        recipe.context,
        hooks=hooks,
        projector=recipe.projector,
        projecting=recipe.projecting,
    )


def raise_to(stage: Stage, lifecycle: Lifecycle, progress: Progress | None) -> None:
    """Bring a model that is COLD to where it should be."""
    match stage:
        case Stage.WARM:
            lifecycle.warm(progress)
        case Stage.ACTIVE:
            lifecycle.activate(progress)
