"""`load()`: resolves a name or path to model files, chooses settings, and builds a `Model`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from afterglow import registry
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions
from afterglow.engine.host.build import DraftSource, EngineSpec, find_projector
from afterglow.engine.host.lifecycle import Lifecycle, LoadHook, LoadState, ProcessLifecycle, ThreadLifecycle
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.gguf.footprint import count_layers_that_fit
from afterglow.llama.gguf.header import read_header
from afterglow.llama.gguf.probe import ensure_safe
from afterglow.llama.library.devices import get_free_memory
from afterglow.llama.model import ProgressCallback, SplitMode
from afterglow.llama.projector import ProjectorSettings
from afterglow.llama.settings import CacheType, RopeScaling
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.paths import get_cache_directory

GPU_BATCH_ROWS = 16_384  # large decodes, because a GPU is idle between two of them
HOSTS: dict[str, type[Lifecycle]] = {"thread": ThreadLifecycle, "process": ProcessLifecycle}
DEFAULT_RECURRENT_SNAPSHOTS = 4  # of recurrent state, if a drafter is loaded


def load(
    model: str | os.PathLike[str],
    *,
    host: Literal["thread", "process"] = "thread",
    context: int = 4096,
    sequences: int = 4,
    threads: int | None = None,
    gpu_layers: int | None = None,
    split_mode: SplitMode = "layer",
    tensor_split: Sequence[float] = (),
    main_gpu: int = 0,
    mmap: bool = True,
    mlock: bool = False,
    batch: int | None = None,
    ubatch: int | None = None,
    cache_type_k: CacheType = "f16",
    cache_type_v: CacheType = "f16",
    flash_attention: bool | None = None,
    kv_unified: bool = False,
    swa_full: bool = False,
    rope_scaling: RopeScaling = "model",
    rope_freq_base: float = 0.0,
    rope_freq_scale: float = 0.0,
    yarn_orig_ctx: int = 0,
    yarn_ext_factor: float | None = None,
    yarn_attn_factor: float | None = None,
    yarn_beta_fast: float | None = None,
    yarn_beta_slow: float | None = None,
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
    """Load a model by name or path and return it, ready for use. `afterglow models` lists the names.

    Close the model after use, or load it in a `with` statement.

    Args:
        model: Name of a known model, or path of a GGUF file.
        host: Where the engine runs: in a "thread" of this process, or in a child "process". A crash of the child only
            fails the requests in flight, and busy Python threads do not slow it down.
        context: Maximum number of tokens of one request, prompt and completion together.
        sequences: Number of requests that run at the same time, and of conversations that stay in the KV cache.
        threads: Number of CPU threads. None: one per physical core.
        gpu_layers: Number of layers on the GPU; -1 is all. None: as many as fit, if there is a GPU.
        split_mode: How several GPUs share the model: "layer", "row" or "none" (only `main_gpu` is used).
        tensor_split: Share of each GPU, e.g. (3, 1). Empty: by free memory.
        main_gpu: Number of the GPU that computes what is not split.
        mmap: Map the model file into memory instead of reading it.
        mlock: Keep the model in RAM; it is never swapped out.
        batch: Maximum rows of one decode: tokens of all requests together. None: 512, or 16,384 on a GPU.
        ubatch: Maximum rows computed at once, at most `batch`. None: 512. An image of a model with non-causal image
            attention must fit into it.
        cache_type_k: Data type of the keys in the KV cache.
        cache_type_v: Data type of the values in the KV cache.
        flash_attention: Whether to use flash attention. None: if the model and the device support it.
        kv_unified: Share the cells of the KV cache among all sequences, instead of a fixed number for each.
        swa_full: Keep all cells of sliding-window layers instead of only the window. It takes more memory, and prompts
            can continue from any position without a checkpoint.
        rope_scaling: RoPE scaling: "none", "linear", "yarn" or "longrope". "model": as in the model file.
        rope_freq_base: RoPE base frequency. 0: from the model file.
        rope_freq_scale: RoPE frequency scale, e.g. 0.25 for 4 times the trained context. 0: from the model file.
        yarn_orig_ctx: Trained context length for YaRN. 0: from the model file.
        yarn_ext_factor: YaRN extrapolation mix; 0 is full interpolation. None: from the model file.
        yarn_attn_factor: YaRN scale of the attention; needs `yarn_ext_factor=0`. None: from the model file.
        yarn_beta_fast: YaRN correction limit for high frequencies. None: from the model file.
        yarn_beta_slow: YaRN correction limit for low frequencies. None: from the model file.
        chat_template: Jinja chat template that replaces the one of the model.
        disk_cache: Store computed prefixes on disk, so that they outlive the process. None: yes, unless the environment
            variable AFTERGLOW_DISK_CACHE is `off`.
        draft: Drafter for speculative decoding, used if it is faster: "mtp" for the MTP heads of the model, or the name
            or path of a smaller model with the same vocabulary.
        projector: Projector file for images or audio. None: the only `*mmproj*.gguf` next to the model, if there is
            exactly one. False: none. If it cannot be used, text still works and `Model.media_error` says why.
        projector_settings: Settings of the projector.
        media_policy: Where images and audio may come from and how large they may be. By default they must be inside the
            messages.
        strip_media: Drop media that the model does not accept with a warning, instead of an error.
        engine: Settings of the engine: cache sizes, checkpoints, speculation, determinism.
        state: First load state: "active", "warm" or "cold".
        fetch: Download a known model that is not on this machine.
        progress: Called with the loaded fraction, from 0 to 1. Returning False cancels the load.
        hooks: Called before the model is loaded; each may reject the load.

    Raises `ModelNotFound`, `InvalidModel` or `OutOfMemory`; all are `LoadError`s.

    >>> with afterglow.load("smollm2", context=512) as small:
    ...     small.count_tokens("How many tokens is this?")
    6
    """
    path, draft_source = resolve_model_path(model, fetch=fetch), _resolve_draft(draft, fetch=fetch)
    options = LoadOptions(
        context=context,
        sequences=sequences,
        threads=threads,
        gpu_layers=gpu_layers,
        split_mode=split_mode,
        tensor_split=tuple(tensor_split),
        main_gpu=main_gpu,
        mmap=mmap,
        mlock=mlock,
        batch=batch,
        ubatch=ubatch,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attention,
        kv_unified=kv_unified,
        swa_full=swa_full,
        rope_scaling=rope_scaling,
        rope_freq_base=rope_freq_base,
        rope_freq_scale=rope_freq_scale,
        yarn_orig_ctx=yarn_orig_ctx,
        yarn_ext_factor=yarn_ext_factor,
        yarn_attn_factor=yarn_attn_factor,
        yarn_beta_fast=yarn_beta_fast,
        yarn_beta_slow=yarn_beta_slow,
    )
    spec = build_engine_spec(
        path,
        options,
        apply_disk_cache(engine or EngineSettings(), str(path), disk_cache),
        draft=draft_source,
        projector=projector,
        projector_settings=projector_settings,
    )
    if host not in HOSTS:
        raise InvalidArgument("host", f"must be {' or '.join(HOSTS)}, not {host!r}")
    lifecycle = HOSTS[host](spec, hooks)
    try:
        advance_to(LoadState(state), lifecycle, progress)
        return Model(
            lifecycle,
            str(model),
            chat_template=chat_template,
            media_policy=media_policy,
            strip_media=strip_media,
        )
    except BaseException:
        lifecycle.close()
        raise


# --- files


def resolve_model_path(model: str | os.PathLike[str], *, fetch: bool) -> Path:
    """Return the file of a model, after a check that loading it cannot crash the process."""
    path = registry.resolve(Path(model) if isinstance(model, os.PathLike) else model, fetch=fetch)
    ensure_safe(path)
    return path


def _resolve_draft(draft: str | os.PathLike[str] | None, *, fetch: bool) -> DraftSource | None:
    """Return the source of draft tokens: the MTP heads of the model, or the file of a draft model."""
    if draft is None or draft == "mtp":
        return None if draft is None else "mtp"
    return resolve_model_path(draft, fetch=fetch)


def resolve_projector(model: Path, projector: str | os.PathLike[str] | Literal[False] | None) -> Path | None:
    """Return the projector file: the given one, or the only one next to the model file."""
    if projector is None or projector is False:
        return find_projector(model) if projector is None else None
    return Path(projector).expanduser()


# --- settings


def build_engine_spec(
    path: Path,
    options: LoadOptions,
    engine_settings: EngineSettings,
    *,
    draft: DraftSource | None,
    projector: str | os.PathLike[str] | Literal[False] | None,
    projector_settings: ProjectorSettings | None = None,
) -> EngineSpec:
    """Return the spec of an engine, with all unset values chosen."""
    if draft is not None and (engine_settings.speculation == "off" or engine_settings.deterministic):
        reason = "deterministic mode does not speculate" if engine_settings.deterministic else 'speculation is "off"'
        raise InvalidArgument("draft", f"has no effect: {reason}")
    context_settings = replace(
        options.build_context_settings(), recurrent_snapshots=count_recurrent_snapshots(draft, engine_settings)
    )
    gpu_memory = get_free_memory(gpu=True)
    layers = options.gpu_layers
    if layers is None:  # as many as fit; none without a GPU
        layers = count_layers_that_fit(read_header(path), context_settings, gpu_memory) if gpu_memory else 0
    # With MTP heads every row has a hidden state in memory.
    if layers and gpu_memory and options.batch is None and draft != "mtp":
        context_settings = replace(context_settings, batch=max(context_settings.batch, GPU_BATCH_ROWS))
    return EngineSpec(
        path=path,
        model_settings=replace(options.build_model_settings(), gpu_layers=layers, mtp=draft == "mtp"),
        context_settings=context_settings,
        engine_settings=engine_settings,
        draft=draft,
        projector_path=resolve_projector(path, projector),
        projector_settings=projector_settings
        or ProjectorSettings(use_gpu=layers != 0, threads=context_settings.threads),
    )


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


def advance_to(state: LoadState, lifecycle: Lifecycle, progress: ProgressCallback | None) -> None:
    """Move a COLD model to a load state."""
    match state:
        case LoadState.WARM:
            lifecycle.warm(progress)
        case LoadState.ACTIVE:
            lifecycle.activate(progress)
        case LoadState.CRASHED:
            raise InvalidArgument("state", "must be `active`, `warm` or `cold`: a model does not start crashed")
