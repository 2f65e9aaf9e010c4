"""Load states of a model: COLD (file only), WARM (weights in RAM), ACTIVE (an engine runs on the device).

`ThreadLifecycle` loads the weights into this process and runs the engine in a thread. `ProcessLifecycle` loads only the
vocabulary here and runs the engine in a child process. Every transition builds the new state before it releases the old
one, so a failed transition leaves the model usable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.build import EngineSpec, build_engine, load_adapters, open_projector
from afterglow.engine.host.owner import OwnerProcess
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.remote_calls import EngineInfo
from afterglow.engine.host.replicas import ReplicaGroup
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.counters import StoreReport
from afterglow.errors import Closed, EngineCrashed, LoadVetoed, WrongState
from afterglow.llama.context import LlamaContext
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.probe import list_split_files
from afterglow.llama.model import LlamaModel, ModelInfo, ModelSettings, ProgressCallback


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


class Lifecycle(Closeable, ABC):
    """Owns the weights and the engine of one model, and moves them between the load states."""

    def __init__(self, spec: EngineSpec, hooks: Sequence[LoadHook] = ()) -> None:
        """A new lifecycle is COLD."""
        self.spec = spec
        self.owner = OwnerProcess("model")
        self.hooks = list(hooks)
        self._lock = threading.RLock()  # held during transitions
        self._state = LoadState.COLD  # ACTIVE also after a crash of the engine
        self._closed = False
        self._model: LlamaModel | None = None
        self._info: EngineInfo | None = None
        self._host: EngineHost | None = None  # one that has given up stays until its successor runs
        self._earlier_restarts = 0  # restarts that replaced hosts have counted

    # --- properties

    @property
    def state(self) -> LoadState:
        """Current state. Takes no lock, so any thread can read it during a transition."""
        has_crashed = (host := self._host) is not None and not host.is_ready
        return LoadState.CRASHED if self._state is LoadState.ACTIVE and has_crashed else self._state

    @property
    def model(self) -> LlamaModel:
        """Weights, or only their vocabulary and metadata. Raises `WrongState` while COLD."""
        self.owner.check()
        if (model := self._model) is None:
            raise self._build_unavailable_error("reading the vocabulary or metadata", LoadState.WARM)
        return model

    @property
    def info(self) -> EngineInfo:
        """Limits of the engine. Raises `WrongState` unless the model is or was ACTIVE since it was loaded."""
        if (info := self._info) is None:
            raise self._build_unavailable_error("computing", LoadState.ACTIVE)
        return info

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """Facts about the model."""

    @property
    def restarts(self) -> int:
        """Number of engines started after a crash."""
        return self._earlier_restarts + (0 if (host := self._host) is None else host.restarts)

    @property
    def needs_restart(self) -> bool:
        """Whether the engine crashed and does not restart by itself: a thread, or a child that failed several times."""
        return (host := self._host) is not None and host.has_given_up

    def get_host(self) -> EngineHost:
        """Return the host of the engine; start a new engine if the last one crashed. Raises unless ACTIVE."""
        self.owner.check()
        if self.needs_restart:
            self.restart()
        if (host := self._host) is None:
            raise self._build_unavailable_error("computing", LoadState.ACTIVE)
        return host

    # --- transitions

    def warm(self, progress: ProgressCallback | None = None) -> None:
        """COLD → WARM: load the weights into RAM, none on a GPU."""
        self.owner.check()
        with self._lock:
            self.require("warm", LoadState.COLD)
            self._run_hooks(LoadState.WARM)
            self._model = self._load_warm(progress)
            self._state = LoadState.WARM

    def activate(self, progress: ProgressCallback | None = None) -> None:
        """COLD or WARM → ACTIVE: load the weights onto the device and start the engine. CRASHED: start a new engine."""
        self.owner.check()
        with self._lock:
            if self.state is LoadState.CRASHED:
                return self.restart()
            self.require("activate", LoadState.COLD, LoadState.WARM)
            self._activate(progress)
            self._state = LoadState.ACTIVE

    def restart(self) -> None:
        """Start a new engine unless another thread did. If that fails, the state stays CRASHED."""
        with self._lock:
            if self._host is not None and self._host.has_given_up:
                earlier_restarts = self.restarts
                self._restart(self._host)
                self._earlier_restarts = earlier_restarts + 1

    def deactivate(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> StoreReport | None:
        """ACTIVE → WARM: stop the engine and release the device; the weights stay in RAM.

        The engine has `store_timeout` seconds to write its prefix cache to disk. Returns what it wrote, or None if it
        had crashed.
        """
        self.owner.check()
        with self._lock:
            self.require("deactivate", LoadState.ACTIVE)
            report = self._deactivate(store_timeout)
            self._state = LoadState.WARM
            return report

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: release everything."""
        self.owner.check()
        with self._lock:
            self.require("unload", LoadState.WARM, LoadState.ACTIVE)
            self._release()

    def close(self) -> None:
        """Release everything permanently. May be called twice. Has no effect in a fork of the process."""
        if not self.owner.is_current:
            return
        with self._lock:
            self._release()
            self._closed = True

    def require(self, call: str, *states: LoadState) -> None:
        """Raise `WrongState` unless the model is in one of these states, or `Closed` after `close`."""
        self.owner.check()
        if self._closed:
            raise Closed("model")
        if self._state not in states:
            raise WrongState(call, self._state.value, " or ".join(allowed.value for allowed in states))

    def _run_hooks(self, state: LoadState) -> None:
        for hook in self.hooks:
            if reason := hook(self.spec.path, state):
                raise LoadVetoed(str(self.spec.path), reason)

    def _release(self) -> None:
        self._stop_engine()
        model, self._model, self._info, self._state = self._model, None, None, LoadState.COLD
        if model is not None:
            model.close()
            return_free_memory()

    def _build_unavailable_error(self, call: str, needed: LoadState) -> Closed | WrongState:
        # ACTIVE without what was asked for: another thread is in a transition.
        is_closed = self._closed or self._state is LoadState.ACTIVE
        return Closed("model") if is_closed else WrongState(call, self._state.value, needed.value)

    @abstractmethod
    def _load_warm(self, progress: ProgressCallback | None) -> LlamaModel: ...

    @abstractmethod
    def _activate(self, progress: ProgressCallback | None) -> None: ...

    @abstractmethod
    def _restart(self, crashed: EngineHost) -> None: ...

    @abstractmethod
    def _deactivate(self, store_timeout: float) -> StoreReport | None: ...

    @abstractmethod
    def _stop_engine(self) -> None: ...


class ThreadLifecycle(Lifecycle):
    """Weights and engine in this process; the engine has its own thread.

    >>> with ThreadLifecycle(EngineSpec(path=path)) as lifecycle:
    ...     lifecycle.activate()
    ...     lifecycle.state
    <LoadState.ACTIVE: 'active'>
    """

    def __init__(self, spec: EngineSpec, hooks: Sequence[LoadHook] = ()) -> None:
        super().__init__(spec, hooks)
        self._engine_resources = contextlib.ExitStack()  # projector, context and engine
        self._context: LlamaContext | None = None

    @property
    def context(self) -> LlamaContext:
        """Context of the engine. Raises `WrongState` unless ACTIVE."""
        if (context := self._context) is None:
            raise self._build_unavailable_error("computing", LoadState.ACTIVE)
        return context

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model. Raises `WrongState` while COLD."""
        return self.model.info

    def _load_warm(self, progress: ProgressCallback | None) -> LlamaModel:
        return LlamaModel.load(self.spec.path, replace(self.spec.model_settings, gpu_layers=0), progress=progress)

    def _activate(self, progress: ProgressCallback | None) -> None:
        old = self._model
        with contextlib.ExitStack() as stack:
            if old is None or self._uses_gpu:
                self._run_hooks(LoadState.ACTIVE)
                model = LlamaModel.load(self.spec.path, self.spec.model_settings, progress=progress)
                stack.callback(model.close)
            else:
                model = old
            self._start_engine(model)
            stack.pop_all()
        self._model = model
        if old is not None and old is not model:
            old.close()

    def _start_engine(self, model: LlamaModel) -> None:
        spec = self.spec
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(LlamaContext(model, spec.context_settings))
            projector, error = open_projector(model, spec.projector_path, spec.projector_settings)
            if projector is not None:
                stack.enter_context(projector)
            adapters = load_adapters(model, spec.adapters)
            for adapter in adapters.values():
                stack.enter_context(adapter)
            host = stack.enter_context(
                EngineThread(
                    lambda: build_engine(
                        context,
                        spec.engine_settings,
                        draft=spec.draft,
                        projector=projector,
                        projector_error=error,
                        adapters=adapters,
                    )
                )
            )
            self._info = host.call(remote_calls.get_engine_info)
            self._context, self._host, self._engine_resources = context, host, stack.pop_all()

    def _restart(self, crashed: EngineHost) -> None:
        """Replace the crashed engine and its context: the state of the old context is unknown."""
        self._engine_resources.close()
        self._start_engine(self.model)

    def _deactivate(self, store_timeout: float) -> StoreReport | None:
        old = self.model
        if self._uses_gpu:
            self._run_hooks(LoadState.WARM)
        model = self._load_warm(None) if self._uses_gpu else old
        host = self._host
        assert isinstance(host, EngineThread)
        host.close(store_timeout)
        self._stop_engine()
        self._model = model
        if old is not model:
            old.close()
        return host.store_report

    def _stop_engine(self) -> None:
        self._host = self._context = None
        self._engine_resources.close()

    @property
    def _uses_gpu(self) -> bool:
        return self.spec.model_settings.gpu_layers != 0


class ProcessLifecycle(Lifecycle):
    """Engine in a child process, and the vocabulary in this process.

    A crash of the engine ends only the child. WARM: the vocabulary is loaded, and the operating system reads the
    weights into its page cache.

    >>> with ProcessLifecycle(EngineSpec(path=path)) as lifecycle:
    ...     lifecycle.activate()
    ...     lifecycle.state
    <LoadState.ACTIVE: 'active'>
    """

    def __init__(self, spec: EngineSpec, hooks: Sequence[LoadHook] = (), *, replicas: int = 1) -> None:
        """`replicas` is the number of child processes, each with an engine."""
        super().__init__(spec, hooks)
        self._replicas = replicas
        self._reload_factory: Callable[[], Engine] | None = None  # while WARM: skips what the last engine found out

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model. Raises `WrongState` unless the model is or was ACTIVE since it was loaded."""
        return self.info.model

    def _load_warm(self, progress: ProgressCallback | None) -> LlamaModel:
        model = LlamaModel.load(self.spec.path, ModelSettings(vocab_only=True), progress=progress)
        self._start_reading_weights()
        return model

    def _start_reading_weights(self) -> None:
        with contextlib.suppress(OSError):  # the file is gone; the next load says so
            for path in list_split_files(self.spec.path):
                start_reading(path)

    def _activate(self, progress: ProgressCallback | None) -> None:
        self._run_hooks(LoadState.ACTIVE)
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(self._start_process(progress))
            model = self._model
            if model is None:  # while the child loads the weights
                model = LlamaModel.load(self.spec.path, ModelSettings(vocab_only=True), trust=True)
                stack.callback(model.close)
            host = self._add_replicas(first)
            stack.callback(host.close)
            info = host.call(remote_calls.get_engine_info)
            self._info = replace(info, sequences=info.sequences * self._replicas)
            stack.pop_all()
        self._model, self._host = model, host

    def _add_replicas(self, first: EngineProcess) -> EngineProcess | ReplicaGroup:
        """Return the host of all replicas, when they are ready."""
        if self._replicas > 1:
            return ReplicaGroup(first, self._replicas)
        first.wait_until_ready()
        return first

    def _start_process(self, progress: ProgressCallback | None) -> EngineProcess:
        """Start the engine. The load of a new file in the child is its trial: a crash there is an invalid model."""
        if self._reload_factory is not None or probe.is_proven(self.spec.path):
            return EngineProcess(self._reload_factory or self.spec, progress=progress, wait=False)
        probe.check_headers(self.spec.path)
        try:
            return EngineProcess(replace(self.spec, is_trial=True), progress=progress)
        except EngineCrashed:
            probe.ensure_safe(self.spec.path)  # raises `InvalidModel` with the reason, if the file is the cause
            raise

    def _restart(self, crashed: EngineHost) -> None:
        """Start a new host. The vocabulary stays open: other threads may be using it."""
        self._host = self._add_replicas(EngineProcess(self.spec))
        crashed.close()

    def _deactivate(self, store_timeout: float) -> StoreReport | None:
        host = self._host
        assert isinstance(host, EngineProcess | ReplicaGroup)
        host.close(store_timeout)
        self._stop_engine()
        self._reload_factory = host.restart_factory
        self._start_reading_weights()
        return host.store_report

    def _stop_engine(self) -> None:
        host, self._host = self._host, None
        self._reload_factory = None
        if host is not None:
            self._earlier_restarts += host.restarts
            host.close()


def return_free_memory() -> None:
    """Return free heap memory to the operating system. glibc keeps it otherwise, and each reload adds to it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent in other C libraries
        if trim is not None:
            trim(0)


def start_reading(path: Path) -> None:
    """Ask the operating system to read a file into its page cache."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
