"""From a model file, or a context, to an engine with everything that guesses for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from afterglow.engine.calibration import calibrate
from afterglow.engine.draft_model import DraftModel, check_vocabularies
from afterglow.engine.drafting import Drafter
from afterglow.engine.engine import Engine
from afterglow.engine.llama import LlamaBackend
from afterglow.engine.mtp_backend import MtpBackend, MtpDrafter
from afterglow.engine.settings import EngineSettings
from afterglow.engine.speculation import LONGEST
from afterglow.errors import AfterglowError
from afterglow.llama.context import Context
from afterglow.llama.model import Model, ModelSettings
from afterglow.llama.probe import PART
from afterglow.llama.projector import Projector, ProjectorSettings
from afterglow.llama.settings import ContextSettings

logger = logging.getLogger("afterglow")
Draft: TypeAlias = Path | Literal["mtp"]
"""What guesses beside the lookup: another model's file, or the model's own heads."""
DRAFT_SHARE = 0.125  # of what may be kept in RAM, for the states of a draft model: it is a fraction of the model's size


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaEngine:
    """Makes an engine on a model file, wherever it is called: the recipe that travels to a child process."""

    path: Path
    model: ModelSettings = field(default_factory=ModelSettings)
    context: ContextSettings = field(default_factory=ContextSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    reserved: int = 0  # sequences of the context that the engine leaves alone, for scoring texts beside the answers
    draft: Draft | None = None
    projector: Path | None = None
    projecting: ProjectorSettings = field(default_factory=ProjectorSettings)

    def __call__(self) -> Engine:
        settings = replace(self.model, mtp=True) if self.draft == "mtp" else self.model
        model = Model.load(self.path, settings)
        try:
            context = Context(model, self.context)
            sequences = context.sequences - self.reserved
            projector, trouble = open_projector(model, self.projector, self.projecting)
            engine = make_engine(
                context, self.engine, draft=self.draft, sequences=sequences, projector=projector, owning=True
            )
            engine.looking.trouble_at_load = trouble
            return engine
        except BaseException:
            model.close()
            raise


def make_engine(
    context: Context,
    settings: EngineSettings,
    *,
    draft: Draft | None = None,
    sequences: int | None = None,
    projector: Projector | None = None,
    owning: bool = False,
) -> Engine:
    """An engine on the first `sequences` of a context, or all. `owning`: the model is closed with it."""
    drafters: list[Drafter] = []
    backend: LlamaBackend
    if draft == "mtp" and settings.speculation != "off":
        paired = _with_heads(context, sequences, projector)
        backend = paired
        drafters.append(MtpDrafter(paired.session))
    else:
        backend = LlamaBackend(context, sequences, projector=projector)
        if draft is not None and draft != "mtp" and settings.speculation != "off":
            settings, own = _shared_budget(settings, draft)
            drafters.append(_draft_model(draft, context, backend.capabilities.sequences, own))
    backend.owning = owning
    try:
        engine = Engine(backend, settings, drafters)
        if engine.drafting.names and context.model.info.causal:
            calibrate(backend, engine.memory.costs.steps)
        return engine
    except BaseException:
        for drafter in drafters:
            drafter.close()
        raise


def open_projector(
    model: Model, path: Path | None, settings: ProjectorSettings | None = None
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


def beside(path: Path) -> Path | None:
    """The projector that lies beside a model's file, where it can be no other model's: there is one of each."""
    files = [one for one in path.parent.glob("*.gguf") if one.is_file()]
    projectors = [one for one in files if "mmproj" in one.name]
    models = {PART.sub("", one.name) for one in files if one not in projectors}
    return projectors[0] if len(projectors) == 1 and models == {PART.sub("", path.name)} else None


def _with_heads(context: Context, sequences: int | None, projector: Projector | None) -> MtpBackend:
    heads = Context(context.model, replace(context.settings, rollback=0), mtp_of=context)
    snapshots = context.max_rollback if context.memory.kind in ("recurrent", "hybrid") else LONGEST
    try:  # without snapshots wrong guesses are undone by replay, however many there are
        return MtpBackend(
            context, heads, sequences, n_draft_max=min(LONGEST, snapshots or LONGEST), projector=projector
        )
    except BaseException:
        heads.close()
        raise


def _shared_budget(settings: EngineSettings, draft: Path) -> tuple[EngineSettings, EngineSettings]:
    """The settings of the engine and of its draft model: what may be kept in RAM is over both."""
    total = settings.ram_limit
    share = int(total * DRAFT_SHARE)
    return replace(settings, ram_bytes=total - share), replace(settings, ram_bytes=share, disk_name=str(draft))


def _draft_model(path: Path, target: Context, sequences: int, own: EngineSettings) -> DraftModel:
    """Load the smaller model with memory for the same sequences; `InvalidArgument` where its tokens are others."""
    model = Model.load(path, replace(target.model.settings, mtp=False))
    try:
        check_vocabularies(target.model.vocabulary, model.vocabulary)
        backend = LlamaBackend(Context(model, replace(target.settings, rollback=0)), sequences)
        backend.owning = True
        return DraftModel(backend, own, model.info.nbytes / max(target.model.info.nbytes, 1))
    except BaseException:
        model.close()
        raise
