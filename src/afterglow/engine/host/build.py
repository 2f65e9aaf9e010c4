"""From a model file, or a context, to an engine with everything that guesses for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.speculation.calibration import calibrate
from afterglow.engine.speculation.draft_model import DraftModel, check_vocabularies
from afterglow.engine.speculation.mtp.backend import MtpBackend, MtpDrafter
from afterglow.engine.speculation.speculator import Drafter
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS, EngineSettings
from afterglow.errors import AfterglowError
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf.probe import SPLIT_FILE_NAME
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.projector import Projector, ProjectorSettings
from afterglow.llama.settings import ContextSettings

logger = logging.getLogger("afterglow")
DraftSource: TypeAlias = Path | Literal["mtp"]
"""What guesses beside the lookup: another model's file, or the model's own heads."""
DRAFT_RAM_SHARE = (
    0.125  # of what may be kept in RAM, for the states of a draft model: it is a fraction of the model's size
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Makes an engine on a model file, wherever it is called: the recipe that travels to a child process."""

    path: Path
    model_settings: ModelSettings = field(default_factory=ModelSettings)
    context_settings: ContextSettings = field(default_factory=ContextSettings)
    engine_settings: EngineSettings = field(default_factory=EngineSettings)
    reserved_sequences: int = (
        0  # sequences of the context that the engine leaves alone, for scoring texts beside the answers
    )
    draft: DraftSource | None = None
    projector_path: Path | None = None
    projector_settings: ProjectorSettings = field(default_factory=ProjectorSettings)

    def __call__(self) -> Engine:
        settings = replace(self.model_settings, mtp=True) if self.draft == "mtp" else self.model_settings
        model = LlamaModel.load(self.path, settings)
        try:
            context = LlamaContext(model, self.context_settings)
            sequences = context.sequences - self.reserved_sequences
            projector, trouble = open_projector(model, self.projector_path, self.projector_settings)
            engine = build_engine(
                context,
                self.engine_settings,
                draft=self.draft,
                sequences=sequences,
                projector=projector,
                owns_model=True,
            )
            engine.media_scheduler.projector_error = trouble
            return engine
        except BaseException:
            model.close()
            raise


def build_engine(
    context: LlamaContext,
    settings: EngineSettings,
    *,
    draft: DraftSource | None = None,
    sequences: int | None = None,
    projector: Projector | None = None,
    owns_model: bool = False,
) -> Engine:
    """An engine on the first `sequences` of a context, or all. `owning`: the model is closed with it."""
    drafters: list[Drafter] = []
    backend: LlamaBackend
    if draft == "mtp" and settings.speculation != "off":
        paired = _build_mtp_backend(context, sequences, projector)
        backend = paired
        drafters.append(MtpDrafter(paired.session))
    else:
        backend = LlamaBackend(context, sequences, projector=projector)
        if draft is not None and draft != "mtp" and settings.speculation != "off":
            settings, own = _split_ram_budget(settings, draft)
            drafters.append(_load_draft_model(draft, context, backend.capabilities.sequences, own))
    backend.owns_model = owns_model
    try:
        engine = Engine(backend, settings, drafters)
        if engine.speculator.drafter_names and context.model.info.is_causal:
            calibrate(backend, engine.prefix_cache.cost_model.step_costs)
        return engine
    except BaseException:
        for drafter in drafters:
            drafter.close()
        raise


def open_projector(
    model: LlamaModel, path: Path | None, settings: ProjectorSettings | None = None
) -> tuple[Projector | None, str]:
    """The projector of a file, or why there is none: text works without it, so a warning says so and no error."""
    if path is None:
        return None, ""
    try:
        return Projector.load(model, path, settings), ""
    except AfterglowError as error:
        trouble = f"{error}; text works, pictures and sound are refused"
        logger.warning("the projector %s cannot be used: %s", path, trouble)
        return None, trouble


def find_projector(path: Path) -> Path | None:
    """The projector that lies beside a model's file, where it can be no other model's: there is one of each."""
    files = [one for one in path.parent.glob("*.gguf") if one.is_file()]
    projectors = [one for one in files if "mmproj" in one.name]
    models = {SPLIT_FILE_NAME.sub("", one.name) for one in files if one not in projectors}
    return projectors[0] if len(projectors) == 1 and models == {SPLIT_FILE_NAME.sub("", path.name)} else None


def _build_mtp_backend(context: LlamaContext, sequences: int | None, projector: Projector | None) -> MtpBackend:
    heads = LlamaContext(context.model, replace(context.settings, recurrent_snapshots=0), mtp_target=context)
    snapshots = context.max_rollback if context.memory.kind in ("recurrent", "hybrid") else MAX_DRAFT_TOKENS
    try:  # without snapshots wrong guesses are undone by replay, however many there are
        return MtpBackend(
            context,
            heads,
            sequences,
            n_draft_max=min(MAX_DRAFT_TOKENS, snapshots or MAX_DRAFT_TOKENS),
            projector=projector,
        )
    except BaseException:
        heads.close()
        raise


def _split_ram_budget(settings: EngineSettings, draft: Path) -> tuple[EngineSettings, EngineSettings]:
    """The settings of the engine and of its draft model: what may be kept in RAM is over both."""
    total = settings.ram_cache_limit
    share = int(total * DRAFT_RAM_SHARE)
    return replace(settings, ram_cache_bytes=total - share), replace(
        settings, ram_cache_bytes=share, disk_cache_label=str(draft)
    )


def _load_draft_model(path: Path, target: LlamaContext, sequences: int, settings: EngineSettings) -> DraftModel:
    """Load the smaller model with memory for the same sequences; `InvalidArgument` where its tokens are others."""
    model = LlamaModel.load(path, replace(target.model.settings, mtp=False))
    try:
        check_vocabularies(target.model.vocabulary, model.vocabulary)
        backend = LlamaBackend(LlamaContext(model, replace(target.settings, recurrent_snapshots=0)), sequences)
        backend.owns_model = True
        return DraftModel(backend, settings, model.info.nbytes / max(target.model.info.nbytes, 1))
    except BaseException:
        model.close()
        raise
