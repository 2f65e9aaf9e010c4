"""Builds engines: from a model file or a context to an engine with its drafters and projector."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from blake3 import blake3

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.speculation.calibration import (
    calibrate,
    calibrate_prefill,
    load_costs,
    load_step_costs,
    store_costs,
    store_step_costs,
)
from afterglow.engine.speculation.draft_model import DraftModel, check_vocabularies
from afterglow.engine.speculation.mtp.backend import MtpBackend, MtpDrafter
from afterglow.engine.speculation.speculator import Drafter
from afterglow.engine.types.adapters import Adapter
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS, EngineSettings
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.formats import SPLIT_FILE_NAME
from afterglow.llama.kv_probe import compute_probe_key
from afterglow.llama.library.devices import list_devices
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel, ModelSettings, ProgressCallback
from afterglow.llama.projector import Projector, ProjectorSettings
from afterglow.llama.settings import ROPE_OPTIONS, ContextSettings
from afterglow.llama.trial import limit_memory, try_model
from afterglow.llama.zero_pages import drop_zero_pages
from afterglow.paths import get_cache_directory

logger = logging.getLogger("afterglow")
DraftSource: TypeAlias = Path | Literal["mtp"]
"""Drafter beside the n-gram drafter: the file of a draft model, or the MTP heads of the model itself."""
DRAFT_RAM_SHARE = 0.125  # of the RAM tier, for the state of a draft model: it is a fraction of the model's size


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Builds an engine from a model file when called. It can be pickled, so a child process can call it."""

    path: Path
    model_settings: ModelSettings = field(default_factory=ModelSettings)
    context_settings: ContextSettings = field(default_factory=ContextSettings)
    engine_settings: EngineSettings = field(default_factory=EngineSettings)
    draft: DraftSource | None = None
    projector_path: Path | None = None
    projector_settings: ProjectorSettings = field(default_factory=ProjectorSettings)
    adapters: tuple[Adapter, ...] = ()
    trust: bool = False  # the files were loaded before: load them without a trial
    is_trial: bool = False  # this load is the trial of the model: the process that runs it may crash
    step_costs: StepCosts | None = None  # of an earlier engine; None: calibrate

    def __call__(self, progress: ProgressCallback | None = None) -> Engine:
        settings = replace(self.model_settings, mtp=True) if self.draft == "mtp" else self.model_settings
        model = self._try_model(settings, progress) if self.is_trial else self._load_model(settings, progress)
        try:
            with drop_zero_pages():  # also those that probing the memory has written
                return self._build_engine(model)
        except BaseException:
            model.close()
            raise

    def _build_engine(self, model: LlamaModel) -> Engine:
        context = LlamaContext(model, self.context_settings)
        projector, projector_error = open_projector(
            model, self.projector_path, self.projector_settings, trust=self.trust
        )
        return build_engine(
            context,
            self.engine_settings,
            draft=self.draft,
            projector=projector,
            projector_error=projector_error,
            adapters=load_adapters(model, self.adapters, trust=self.trust),
            owns_model=True,
            trust=self.trust,
            step_costs=self.step_costs,
        )

    def _load_model(self, settings: ModelSettings, progress: ProgressCallback | None) -> LlamaModel:
        return LlamaModel.load(self.path, settings, progress=progress, trust=self.trust or self.is_trial)

    def _try_model(self, settings: ModelSettings, progress: ProgressCallback | None) -> LlamaModel:
        """Load a model for the first time, use it, and record that it works."""
        size = sum(file.stat().st_size for file in probe.list_split_files(self.path))
        # The driver of a GPU reserves more address space than any limit.
        has_gpu = any("gpu" in device.kind for device in list_devices())
        with contextlib.nullcontext() if has_gpu else limit_memory(size):
            model = self._load_model(settings, progress)
            try:
                try_model(model, size)
            except BaseException:
                model.close()
                raise
        probe.record_proven(self.path)
        return model

    def build_restart_spec(self, engine: Engine) -> EngineSpec:
        """Return the spec for a restart after `engine`, which skips what is known by now: trials and calibration."""
        return replace(self, trust=True, is_trial=False, step_costs=engine.prefix_cache.cost_model.step_costs)


def build_engine(
    context: LlamaContext,
    settings: EngineSettings,
    *,
    draft: DraftSource | None = None,
    projector: Projector | None = None,
    projector_error: str = "",
    adapters: Mapping[str, LoraAdapter] | None = None,
    owns_model: bool = False,
    trust: bool = False,
    step_costs: StepCosts | None = None,
) -> Engine:
    """Build an engine on a context. With `owns_model`, closing the engine closes the model.

    `projector_error` is why there is no projector. `trust` loads a draft model without a trial. `step_costs` are known
    decode times; None calibrates.
    """
    _check_grid(context, settings)
    drafters: list[Drafter] = []
    backend: LlamaBackend
    if draft == "mtp" and settings.speculation != "off":
        backend = mtp_backend = _build_mtp_backend(context, projector, adapters)
        drafters.append(MtpDrafter(mtp_backend.session))
    else:
        backend = LlamaBackend(context, projector=projector, adapters=adapters)
        if draft is not None and draft != "mtp" and settings.speculation != "off":
            total = settings.ram_cache_limit  # the engine and its draft model share it
            share = int(total * DRAFT_RAM_SHARE)
            draft_settings = replace(settings, ram_cache_bytes=share, disk_cache_label=str(draft))
            settings = replace(settings, ram_cache_bytes=total - share)
            drafters.append(_load_draft_model(draft, context, draft_settings, trust))
    backend.owns_model = owns_model
    try:
        engine = Engine(backend, settings, drafters)
        engine.media_scheduler.projector_error = projector_error
        if context.model.info.is_causal:
            measure_costs(engine, backend)
        if step_costs is not None:
            engine.prefix_cache.cost_model.step_costs = step_costs
        elif engine.speculator.drafter_names and context.model.info.is_causal:
            measure_step_costs(backend, engine.prefix_cache.cost_model.step_costs)
        if not settings.deterministic:
            backend.adapt_threads()
            backend.pad_rows()
        return engine
    except BaseException:
        for drafter in drafters:
            drafter.close()
        raise


def _check_grid(context: LlamaContext, settings: EngineSettings) -> None:
    """Raise `InvalidArgument` if a decode cannot compute a chunk of deterministic mode. That of a model with a sliding
    window has one ubatch."""
    rows, capacity = min(settings.grid, context.settings.cells), context.batch.capacity
    if settings.deterministic and rows > capacity:
        name = "ubatch" if context.memory.kind == "window" else "batch"
        raise InvalidArgument(
            name, f"must be at least {rows} in deterministic mode, the size of a chunk, not {capacity}"
        )


def measure_costs(engine: Engine, backend: LlamaBackend) -> None:
    """Load the costs of prefill and transfers, or measure them. Closing the engine stores what it has learned."""
    cost_model = engine.prefix_cache.cost_model
    path = engine.costs_path = _build_costs_path(backend, "costs")
    if not load_costs(path, cost_model):
        calibrate_prefill(backend, cost_model)
        store_costs(path, cost_model)


def measure_step_costs(backend: LlamaBackend, step_costs: StepCosts) -> None:
    """Calibrate, unless the same model was calibrated lately with the same settings."""
    path = _build_costs_path(backend, "steps")
    if not load_step_costs(path, step_costs):
        calibrate(backend, step_costs)
        store_step_costs(path, step_costs)


def _build_costs_path(backend: LlamaBackend, kind: str) -> Path:
    """Return the file of measurements of a model with its settings on this machine."""
    context = backend.context
    text = f"{compute_probe_key(context)} {context.settings!r} {type(backend).__name__}"
    return get_cache_directory("probed") / f"{kind}-{blake3(text.encode()).hexdigest()[:32]}"


def open_projector(
    model: LlamaModel, path: Path | None, settings: ProjectorSettings | None = None, *, trust: bool = False
) -> tuple[Projector | None, str]:
    """Load the projector, or return why it cannot be used. That is only a warning, because text works without it."""
    if path is None:
        return None, ""
    try:
        return Projector.load(model, path, settings, trust=trust), ""
    except AfterglowError as error:
        reason = f"{error}; text works, images and audio are rejected"
        logger.warning("the projector %s cannot be used: %s", path, reason)
        return None, reason


def load_adapters(model: LlamaModel, adapters: Sequence[Adapter], *, trust: bool = False) -> dict[str, LoraAdapter]:
    """Load the adapters of a model, by name. Closing the model closes them."""
    return {adapter.name: LoraAdapter.load(model, adapter.path, trust=trust) for adapter in adapters}


def find_projector(path: Path) -> Path | None:
    """Return the projector next to a model file, if the folder has exactly one projector and one model."""
    files = [file for file in path.parent.glob("*.gguf") if file.is_file()]
    projectors = [file for file in files if "mmproj" in file.name]
    models = {SPLIT_FILE_NAME.sub("", file.name) for file in files if file not in projectors}
    return projectors[0] if len(projectors) == 1 and models == {SPLIT_FILE_NAME.sub("", path.name)} else None


def _build_mtp_backend(
    context: LlamaContext, projector: Projector | None, adapters: Mapping[str, LoraAdapter] | None
) -> MtpBackend:
    heads = LlamaContext(context.model, replace(context.settings, recurrent_snapshots=0), mtp_target=context)
    # Without snapshots, rejected draft tokens are undone by replay, which has no limit.
    snapshots = context.max_rollback if context.memory.kind in ("recurrent", "hybrid") else 0
    n_draft_max = min(MAX_DRAFT_TOKENS, snapshots or MAX_DRAFT_TOKENS)
    try:
        return MtpBackend(context, heads, n_draft_max=n_draft_max, projector=projector, adapters=adapters)
    except BaseException:
        heads.close()
        raise


def _load_draft_model(path: Path, target: LlamaContext, settings: EngineSettings, trust: bool) -> DraftModel:
    """Load the draft model with the same number of sequences. Raises `InvalidArgument` if its vocabulary differs."""
    model = LlamaModel.load(path, replace(target.model.settings, mtp=False), trust=trust)
    try:
        check_vocabularies(target.model.vocabulary, model.vocabulary)
        defaults = ContextSettings()  # RoPE options are those of the model they are given for
        rope = {name: getattr(defaults, name) for name in ROPE_OPTIONS}
        context_settings = replace(target.settings, recurrent_snapshots=0, **rope)
        backend = LlamaBackend(LlamaContext(model, context_settings))
        backend.owns_model = True
        if not settings.deterministic:
            backend.adapt_threads()
        return DraftModel(backend, settings, model.info.nbytes / max(target.model.info.nbytes, 1))
    except BaseException:
        model.close()
        raise
