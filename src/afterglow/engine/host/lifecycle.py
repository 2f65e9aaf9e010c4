"""Load states of a model: COLD (file only), WARM (weights in RAM), ACTIVE (on the device, with a context).

Every transition builds the new state before it releases the old one, so a failed transition leaves the model usable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from afterglow.closeable import Closeable
from afterglow.engine.host.build import open_projector
from afterglow.errors import Closed, LoadVetoed, WrongState
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelSettings, ProgressCallback
from afterglow.llama.projector import Projector, ProjectorSettings
from afterglow.llama.settings import ContextSettings


class LoadState(StrEnum):
    """Load state of a model. `load(…, state=…)` chooses the first one; `Model.state` returns the current one.

    `COLD`: nothing is loaded. `WARM`: the weights are in RAM; tokenizing works. `ACTIVE`: the weights are on the device
    and the model can generate. `CRASHED`: the engine of an active model crashed; the next request starts a new one.
    Members compare equal to their strings.

    >>> model.state is LoadState.ACTIVE, model.state == "active"
    (True, True)
    """

    COLD = "cold"
    WARM = "warm"
    ACTIVE = "active"
    CRASHED = "crashed"


LoadHook = Callable[[Path, LoadState], str | None]
"""Called with the path and the target state before a load. A returned text rejects the load with this reason."""


class Lifecycle(Closeable):
    """Owns the weights, the context and the projector of one model.

    >>> with Lifecycle(path, ModelSettings(), ContextSettings()) as lifecycle:
    ...     lifecycle.activate()
    ...     lifecycle.state
    <LoadState.ACTIVE: 'active'>
    """

    def __init__(
        self,
        path: Path,
        model_settings: ModelSettings,
        context_settings: ContextSettings,
        *,
        hooks: Sequence[LoadHook] = (),
        projector_path: Path | None = None,
        projector_settings: ProjectorSettings | None = None,
    ) -> None:
        """`projector_path` is the projector file of a multimodal model; it is loaded with `projector_settings`."""
        self.path = path
        self.projector_path = projector_path
        self.projector_settings = projector_settings or ProjectorSettings()
        self.projector: Projector | None = None  # only while ACTIVE
        self.projector_error = ""  # why the projector cannot be used
        self.model_settings = model_settings
        self.context_settings = context_settings
        self.hooks = list(hooks)
        self._lock = threading.RLock()
        self._state = LoadState.COLD
        self._closed = False
        self._model: LlamaModel | None = None
        self._context: LlamaContext | None = None

    @property
    def state(self) -> LoadState:
        """Current state. Takes no lock, so any thread can read it during a transition."""
        return self._state

    @property
    def model(self) -> LlamaModel:
        """Weights. Raises `WrongState` while COLD."""
        if (model := self._model) is None:
            raise self._build_unavailable_error("reading the vocabulary or metadata", LoadState.WARM)
        return model

    @property
    def context(self) -> LlamaContext:
        """Context. Raises `WrongState` unless ACTIVE."""
        if (context := self._context) is None:
            raise self._build_unavailable_error("computing", LoadState.ACTIVE)
        return context

    def warm(self, progress: ProgressCallback | None = None) -> None:
        """COLD → WARM: load the weights into RAM, none on a GPU."""
        with self._lock:
            self.require("warm", LoadState.COLD)
            self._model = self._load(LoadState.WARM, progress)
            self._state = LoadState.WARM

    def activate(self, progress: ProgressCallback | None = None) -> None:
        """COLD or WARM → ACTIVE: load the weights onto the device and create a context."""
        with self._lock:
            self.require("activate", LoadState.COLD, LoadState.WARM)
            old = self._model
            model = old if old is not None and not self._uses_gpu else self._load(LoadState.ACTIVE, progress)
            try:
                self._context = LlamaContext(model, self.context_settings)
            except BaseException:
                if model is not old:
                    model.close()
                raise
            self._release_projector()  # there is one if a context could not be replaced
            self.projector, self.projector_error = open_projector(model, self.projector_path, self.projector_settings)
            self._model, self._state = model, LoadState.ACTIVE
            if old is not None and old is not model:
                old.close()

    def replace_context(self) -> None:
        """ACTIVE → ACTIVE with a new context: after a crash of the engine, the state of the old one is unknown."""
        with self._lock:
            self.require("replace_context", LoadState.ACTIVE)
            self.context.close()
            self._context, self._state = None, LoadState.WARM  # stays so if the next line raises
            self._context = LlamaContext(self.model, self.context_settings)
            self._state = LoadState.ACTIVE

    def deactivate(self) -> None:
        """ACTIVE → WARM: release the context and GPU memory; the weights stay in RAM."""
        with self._lock:
            self.require("deactivate", LoadState.ACTIVE)
            old, context = self.model, self.context
            model = self._load(LoadState.WARM, None) if self._uses_gpu else old
            self._model, self._context, self._state = model, None, LoadState.WARM
            self._release_projector()
            context.close()
            if old is not model:
                old.close()

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: release everything."""
        with self._lock:
            self.require("unload", LoadState.WARM, LoadState.ACTIVE)
            self._release()

    def close(self) -> None:
        """Release everything permanently. May be called twice."""
        with self._lock:
            self._release()
            self._closed = True

    @property
    def _uses_gpu(self) -> bool:
        return self.model_settings.gpu_layers != 0

    def _load(self, state: LoadState, progress: ProgressCallback | None) -> LlamaModel:
        for hook in self.hooks:
            if reason := hook(self.path, state):
                raise LoadVetoed(str(self.path), reason)
        settings = self.model_settings
        if state is LoadState.WARM:
            settings = replace(settings, gpu_layers=0)
        return LlamaModel.load(self.path, settings, progress=progress)

    def _release_projector(self) -> None:
        projector, self.projector, self.projector_error = self.projector, None, ""
        if projector is not None:
            projector.close()

    def _release(self) -> None:
        self._release_projector()
        model, self._model, self._context, self._state = self._model, None, None, LoadState.COLD
        if model is not None:
            model.close()  # also closes its context

    def require(self, call: str, *states: LoadState) -> None:
        """Raise `WrongState` unless the model is in one of these states, or `Closed` after `close`."""
        if self._closed:
            raise Closed("model")
        if self._state not in states:
            raise WrongState(call, self._state.value, " or ".join(allowed.value for allowed in states))

    def _build_unavailable_error(self, call: str, needed: LoadState) -> Closed | WrongState:
        return Closed("model") if self._closed else WrongState(call, self._state.value, needed.value)
