"""A model's way from a file to a context and back: COLD, WARM (weights in RAM), ACTIVE (on the device, with a context).

Every transition builds the new before it lets go of the old, so a failed one leaves the previous state usable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from afterglow.closing import Closing
from afterglow.engine.recipe import open_projector
from afterglow.errors import Closed, LoadVetoed, WrongState
from afterglow.llama.context import Context
from afterglow.llama.model import Model, ModelSettings, Progress
from afterglow.llama.projector import Projector, ProjectorSettings
from afterglow.llama.settings import ContextSettings


class Stage(StrEnum):
    """Where a model is between its file and its use.

    >>> model.state is Stage.ACTIVE, model.state == "active"
    (True, True)
    """

    COLD = "cold"
    WARM = "warm"
    ACTIVE = "active"


LoadHook = Callable[[Path, Stage], str | None]
"""Asked before a model is loaded for a stage; a returned text is the reason to refuse."""


class Lifecycle(Closing):
    """Owns the weights and the context of one model.

    >>> lifecycle = Lifecycle(path, ModelSettings(), ContextSettings())
    >>> lifecycle.activate()
    >>> lifecycle.stage
    <Stage.ACTIVE: 'active'>
    """

    def __init__(
        self,
        path: Path,
        model: ModelSettings,
        context: ContextSettings,
        *,
        hooks: Sequence[LoadHook] = (),
        projector: Path | None = None,
        projecting: ProjectorSettings | None = None,
    ) -> None:
        """`projector` is the file that lets it take pictures or sound, loaded as `projecting` says."""
        self.path = path
        self.projector_path = projector
        self.projecting = projecting or ProjectorSettings()
        self.projector: Projector | None = None  # while ACTIVE
        self.projector_trouble = ""  # why there is none
        self.model_settings = model
        self.context_settings = context
        self.hooks = list(hooks)
        self._lock = threading.RLock()
        self._stage = Stage.COLD
        self._closed = False
        self._model: Model | None = None
        self._context: Context | None = None

    @property
    def stage(self) -> Stage:
        """Where the model is. Takes no lock: readable from any thread at any moment."""
        return self._stage

    @property
    def model(self) -> Model:
        """The weights; `WrongState` while COLD."""
        if (model := self._model) is None:
            raise self._unavailable("the model's vocabulary and metadata", Stage.WARM)
        return model

    @property
    def context(self) -> Context:
        """The context; `WrongState` unless ACTIVE."""
        if (context := self._context) is None:
            raise self._unavailable("computing", Stage.ACTIVE)
        return context

    def warm(self, progress: Progress | None = None) -> None:
        """COLD → WARM: load the weights into RAM, nothing on a GPU."""
        with self._lock:
            self.require("warm", Stage.COLD)
            self._model = self._load(Stage.WARM, progress)
            self._stage = Stage.WARM

    def activate(self, progress: Progress | None = None) -> None:
        """COLD or WARM → ACTIVE: weights where they compute, and a context."""
        with self._lock:
            self.require("activate", Stage.COLD, Stage.WARM)
            old = self._model
            model = old if old is not None and not self._uses_gpu else self._load(Stage.ACTIVE, progress)
            try:
                self._context = Context(model, self.context_settings)
            except BaseException:
                if model is not old:
                    model.close()
                raise
            self.projector, self.projector_trouble = open_projector(model, self.projector_path, self.projecting)
            self._model, self._stage = model, Stage.ACTIVE
            if old is not None and old is not model:
                old.close()

    def deactivate(self) -> None:
        """ACTIVE → WARM: give back the context and the GPU, keep the weights in RAM."""
        with self._lock:
            self.require("deactivate", Stage.ACTIVE)
            old, context = self.model, self.context
            model = self._load(Stage.WARM, None) if self._uses_gpu else old
            self._model, self._context, self._stage = model, None, Stage.WARM
            self._release_projector()
            context.close()
            if old is not model:
                old.close()

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: give everything back."""
        with self._lock:
            self.require("unload", Stage.WARM, Stage.ACTIVE)
            self._release()

    def close(self) -> None:
        """Give everything back for good. Closing twice is allowed."""
        with self._lock:
            self._release()
            self._closed = True

    @property
    def _uses_gpu(self) -> bool:
        return self.model_settings.gpu_layers != 0

    def _load(self, stage: Stage, progress: Progress | None) -> Model:
        for hook in self.hooks:
            if reason := hook(self.path, stage):
                raise LoadVetoed(str(self.path), reason)
        settings = self.model_settings
        if stage is Stage.WARM:
            settings = replace(settings, gpu_layers=0)
        return Model.load(self.path, settings, progress=progress)

    def _release_projector(self) -> None:
        projector, self.projector, self.projector_trouble = self.projector, None, ""
        if projector is not None:
            projector.close()

    def _release(self) -> None:
        self._release_projector()
        model, self._model, self._context, self._stage = self._model, None, None, Stage.COLD
        if model is not None:
            model.close()  # closes the context, its child

    def require(self, call: str, *stages: Stage) -> None:
        """`WrongState` unless the model is in one of these stages; `Closed` after `close`."""
        if self._closed:
            raise Closed("model")
        if self._stage not in stages:
            raise WrongState(call, self._stage.value, " or ".join(stage.value for stage in stages))

    def _unavailable(self, call: str, needed: Stage) -> Closed | WrongState:
        return Closed("model") if self._closed else WrongState(call, self._stage.value, needed.value)
