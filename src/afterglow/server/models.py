"""Registry of the served models by name: loads them on demand and unloads them to make room or when they expire.

`ModelSlot` is one model and its load state. `ModelRegistry` owns the budget: it alone decides which models are loaded.
One condition guards the state of all slots. It is held briefly, never during a load or an unload.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

from afterglow.api.fit import FitPlan
from afterglow.api.model import Model
from afterglow.closeable import Closeable
from afterglow.errors import AfterglowError, Closed, InvalidArgument, ModelNotFound, OutOfMemory
from afterglow.registry import LocalModel, OllamaDefinition
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.installed import (
    ModelVariant,
    RequestDefaults,
    VariantFinder,
    build_request_defaults,
    find_installed_model,
    find_name,
    get_client_name,
    list_installed_models,
)
from afterglow.server.logs import get_record, logger
from afterglow.server.metrics import SlotCounters
from afterglow.server.model_budget import ByteMap, ResidentModel, check_fits, choose_first_models, plan_room

OpenModel: TypeAlias = Callable[[], Model]
SlotState: TypeAlias = Literal["not loaded", "loading", "ready", "warm", "unloading", "restarting", "failed"]
RETRY_AFTER_SECONDS = 10.0  # until then, requests for a model that could not be loaded get the same error
STORE_TIMEOUT_SECONDS = 30.0  # for the prefix cache of a model that is unloaded
UNLOAD_TIMEOUT_SECONDS = 30.0  # how long an unload that a client asks for waits for running requests


@dataclass(frozen=True, slots=True)
class ServedModel:
    """How a model is served: the function that loads it, its estimated bytes by device, and when it is unloaded."""

    open_model: OpenModel
    nbytes: ByteMap = field(default_factory=dict)
    keep_alive: float = math.inf  # seconds without a request after which it is unloaded
    pinned: bool = False  # it is never unloaded
    plan: FitPlan | None = None  # how its options were chosen
    path: Path | None = None  # of its file
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters
    installed: LocalModel | None = None  # if it was added because a client named it, not on the command line
    definition: OllamaDefinition | None = None  # what Ollama stores with the model
    with_context: Callable[[int], ServedModel] | None = None  # the same with another context length, if that is allowed


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """What the name of a model in a request stands for."""

    slot: ModelSlot
    variant: ModelVariant | None = None  # None: the served model itself

    @property
    def name(self) -> str:
        """Name of the model in a response."""
        return self.slot.name if self.variant is None else self.variant.name

    @property
    def defaults(self) -> RequestDefaults:
        """What the request has unless it sets it."""
        defaults = self.slot.request_defaults
        return defaults if self.variant is None else self.variant.defaults.fall_back(defaults)


class ModelSlot:
    """One served model, loaded or not. Create it with a `ModelRegistry`."""

    def __init__(self, name: str, served: ServedModel, registry: ModelRegistry) -> None:
        self.name = name
        self.served = served
        self.keep_alive = served.keep_alive  # or what a request asked for
        self.default_lora: tuple[tuple[str, float], ...] = ()  # adapters of requests that name none
        self.request_defaults = build_request_defaults(served.definition)
        self.created = int(time.time())
        self.last_used = time.monotonic()  # end of the last request, or the load
        self.requested_name: str | None = None  # by which a client of Ollama's API used it last
        self.active_requests = 0
        self.counters = SlotCounters()
        self.model: Model | None = None
        self.has_room = False  # its bytes count as taken
        self.is_leaving = False  # it is being unloaded, or will be when its requests have ended
        self._registry = registry
        self._changed = registry.changed
        self._waiters: list[Future[Model]] = []  # requests that wait for the model
        self._loading: Future[Model] | None = None  # the load that runs, or the last one that failed
        self._unloading: Future[None] | None = None  # the unload that runs
        self._reloading: Future[int] | None = None  # the reload that runs
        self._replacement: ServedModel | None = None  # what is loaded after the unload that runs
        self._retry_time = 0.0  # when a failed load may be repeated
        self._closed = False
        self._close_error: AfterglowError = Closed("server")  # of requests after the close
        self._removal: AfterglowError | None = None  # of requests that wait while the model is deleted

    # --- properties

    @property
    def state(self) -> SlotState:
        """Load state.

        `warm`: unloaded; the vocabulary is open and the weights may be in the page cache. `unloading`: it is unloaded
        when its requests have ended. `restarting`: the engine died. `failed`: restarts failed too.
        """
        model, is_loading = self.model, self.is_loading
        if self.is_leaving:
            return "unloading"
        if model is None:
            return "loading" if is_loading else "not loaded"
        if model.is_active:
            return "ready"
        if model.needs_restart:
            return "restarting" if is_loading else "failed"
        if model.has_engine:
            return "restarting"
        return "loading" if is_loading else "warm"

    @property
    def nbytes(self) -> ByteMap:
        """Estimated bytes by device."""
        return self.served.nbytes

    @property
    def is_usable(self) -> bool:
        """Whether requests can be sent to the engine now. An engine that restarts accepts them, too."""
        return self.model is not None and self.model.has_engine and not self.model.needs_restart and not self.is_leaving

    @property
    def expires_at(self) -> float | None:
        """When the model is unloaded unless it is used, by the monotonic clock; None: it does not expire now."""
        if self.served.pinned or self.keep_alive == math.inf or self.active_requests or not self.is_usable:
            return None
        return self.last_used + self.keep_alive

    @property
    def restore_seconds(self) -> float:
        """Mean seconds of a load; 1 if it was never loaded."""
        return self.counters.load_seconds / self.counters.loads if self.counters.loads else 1.0

    @property
    def is_loading(self) -> bool:
        """Whether a load runs or waits for room."""
        return self._loading is not None and not self._loading.done()

    # --- use

    def acquire(self) -> Future[Model]:
        """Return the future model for one request, which must call `release` at its end. Loads it if necessary.

        The model is not unloaded before that. A future that is cancelled before it has a result is not counted.
        """
        with self._changed:
            future: Future[Model] = Future()
            load = self.start_load()
            self._waiters.append(future)
            if load.done():  # the model is loaded, or has failed to load a short time ago
                self._resolve_waiters(load)
            return future

    def release(self, *, is_use: bool = True) -> None:
        """End the use of the model by one request. `is_use` False: it does not prolong the time to live."""
        with self._changed:
            self.active_requests -= 1
            if is_use:
                self.last_used = time.monotonic()
            self._changed.notify_all()

    def try_acquire(self) -> Model | None:
        """Return the model for one request if it is loaded. The request must call `release`."""
        with self._changed:
            if not self.is_usable:
                return None
            self.active_requests += 1
            return self.model

    def set_keep_alive(self, seconds: float | None) -> None:
        """Set the seconds without a request after which the model is unloaded. None: never; 0: after this request.

        It holds until another request sets it or the model is unloaded.
        """
        with self._changed:
            self.keep_alive = math.inf if seconds is None else seconds
            self._changed.notify_all()

    def _hand_out(self, future: Future[Model]) -> None:
        """Give the model to one request, unless it was cancelled."""
        assert self.model is not None
        if future.set_running_or_notify_cancel():
            self.active_requests += 1
            future.set_result(self.model)

    def _resolve_waiters(self, load: Future[Model]) -> None:
        """Give the model, or the error of its load, to all requests that wait for it."""
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if (error := load.exception()) is None:
                self._hand_out(future)
            elif future.set_running_or_notify_cancel():
                future.set_exception(error)

    # --- loading

    def start_load(self) -> Future[Model]:
        """Return the future model; start a load unless it is loaded. All callers share one load.

        After an unload that has begun, the model is loaded again. The error of a failed load is returned for
        `RETRY_AFTER_SECONDS`.
        """
        with self._changed:
            if self._closed:
                raise self._close_error
            if self._loading is not None and (not self._loading.done() or time.monotonic() < self._retry_time):
                return self._loading
            future: Future[Model] = Future()
            future.set_running_or_notify_cancel()  # a request that is cancelled must not cancel the load
            if self.is_usable and self.model is not None:
                future.set_result(self.model)
            else:
                self._loading = future
                # A daemon: neither shutdown nor the exit of the process waits for a load.
                threading.Thread(target=self._load, args=[future], name=f"load-{self.name}", daemon=True).start()
            return future

    def load(self) -> Model:
        """Return the model, loaded if necessary. Blocking."""
        return self.start_load().result()

    def _load(self, future: Future[Model]) -> None:
        try:
            self._registry.make_room(self)
            try:
                model = self._build_model()
            except OutOfMemory:
                if not self._registry.free_memory(self):
                    raise
                model = self._build_model()
        except BaseException as error:  # raised in the requests that wait for it
            if not self._closed:
                logger.error("%s could not be loaded: %s", self.name, error)
            with self._changed:
                self._retry_time = time.monotonic() + RETRY_AFTER_SECONDS
                self.has_room = False
                self._finish_load(future, error)
            return
        with self._changed:
            is_late = self._closed
            if not is_late:
                self.model, self._loading = model, None
                self.last_used = time.monotonic()
                self._finish_load(future, None)
        if is_late:
            model.close()

    def _finish_load(self, future: Future[Model], error: BaseException | None) -> None:
        if not future.done():
            if error is None and self.model is not None:
                future.set_result(self.model)
            else:
                future.set_exception(error)
        self._resolve_waiters(future)
        self._changed.notify_all()

    def _build_model(self) -> Model:
        model, started = self.model, time.monotonic()
        if model is not None and self.is_usable:  # an unload was abandoned while requests waited
            return model
        if model is not None:
            model.activate()  # the vocabulary stays open: other threads may be using it
        else:
            model = self.served.open_model()
        try:
            if model.can_generate:
                prepare(model)
        except BaseException:
            if self.model is None:
                model.close()
            raise
        seconds = time.monotonic() - started
        self.counters.loads += 1
        self.counters.load_seconds += seconds
        logger.info("loaded %s in %.1f s", self.name, seconds)
        return model

    def retry_failed(self) -> None:
        """Load a model whose engine could not be restarted again, in the background."""
        if self.state == "failed" and not self._closed:
            self.start_load()

    # --- unloading

    def start_unload(self) -> Future[None]:
        """Unload the model when its requests have ended: store its prefix cache on disk, then end its engine.

        Requests from now on wait until it is loaded again. All callers share one unload.
        """
        with self._changed:
            if self._unloading is not None and not self._unloading.done():
                return self._unloading
            future: Future[None] = Future()
            if not self.has_room or self.is_loading or self.model is None:
                future.set_result(None)
            else:
                self.is_leaving, self._unloading = True, future
                threading.Thread(target=self._unload, args=[future], name=f"unload-{self.name}", daemon=True).start()
            return future

    def unload(self, timeout: float = UNLOAD_TIMEOUT_SECONDS) -> None:
        """Unload the model. Blocking. Raises status 409 if it is pinned or still busy after `timeout` seconds."""
        if self.served.pinned:
            raise APIError(409, f"{self.name!r} is pinned and never unloaded", param="model", code="model_pinned")
        future = self.start_unload()
        with self._changed:
            is_idle = self._changed.wait_for(lambda: not self.active_requests or future.done(), timeout)
            running = self.active_requests
            if not is_idle:
                self.is_leaving = False  # tells the unload thread to stop waiting
                self._changed.notify_all()
        future.result()
        if not is_idle:
            message = f"{self.name!r} is busy: {running} requests run after {timeout:g} s; retry later"
            raise APIError(409, message, param="model", code="model_busy", retry_after=1)

    def start_reload(self, context: int) -> Future[int]:
        """Load the model again with another context length, which the future returns, when its requests have ended.

        All callers share one reload, which may be for another length. Requests from now on wait for it.
        The future has status 400 if a reload is not allowed, and status 409 if the model stays busy.
        """
        with self._changed:
            if self._reloading is not None and not self._reloading.done():
                return self._reloading
            future: Future[int] = Future()
            self._reloading = future
            future.set_running_or_notify_cancel()  # a request that is cancelled must not cancel the reload
            threading.Thread(
                target=self._reload, args=[future, context], name=f"reload-{self.name}", daemon=True
            ).start()
            return future

    def _reload(self, future: Future[int], context: int) -> None:
        try:
            if self.served.with_context is None:
                raise invalid_request_error("context", f"{self.name!r} may not be loaded with another context length")
            previous, reloaded = self.served, self.served.with_context(context)
            with self._changed:
                self._replacement = replace(
                    previous, open_model=reloaded.open_model, nbytes=reloaded.nbytes, plan=reloaded.plan
                )
            try:
                self.unload()
                with self._changed:
                    old = None if self.is_usable or self.is_loading else self._replace()  # it was not loaded
                    is_replaced = self._replacement is None
            finally:
                with self._changed:
                    self._replacement = None
            if old is not None:
                old.close()
            if not is_replaced:
                raise APIError(409, f"{self.name!r} is in use; retry later", param="model", code="model_busy")
            self._load_or_return_to(previous)
        except BaseException as error:  # raised in the requests that wait for it
            future.set_exception(error)
        else:
            future.set_result(context)

    def _load_or_return_to(self, previous: ServedModel) -> None:
        """Load the model. If that fails, later loads have the context length of before."""
        try:
            self.load()
        except BaseException:
            with self._changed:
                self.served = previous
                self._retry_time = 0.0
            raise

    def _replace(self) -> Model | None:
        """Let the next load have another context length if a reload asks for it; return the model to close."""
        if self._replacement is None:
            return None
        self.served, self._replacement = self._replacement, None
        old, self.model = self.model, None
        return old

    def _unload(self, future: Future[None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self.active_requests and self.is_leaving) or self._closed)
            model = self.model if self.is_leaving and not self._closed else None
        started, old = time.monotonic(), None
        try:
            if model is not None:
                self._release_engine(model, started)
        except BaseException as error:
            logger.exception("%s could not be unloaded", self.name)
            future.set_exception(error)
        with self._changed:
            if model is not None:
                self.has_room, self.keep_alive = model.has_engine, self.served.keep_alive
                self.counters.unloads += 1
                self.counters.unload_seconds += time.monotonic() - started
                if not model.has_engine:
                    old = self._replace()
                    if self._removal is not None:
                        self._refuse_requests(self._removal)
            self.is_leaving = False
            if not future.done():
                future.set_result(None)
            self._changed.notify_all()
        if old is not None:
            old.close()

    def _release_engine(self, model: Model, started: float) -> None:
        report = model.deactivate(STORE_TIMEOUT_SECONDS)
        seconds = time.monotonic() - started
        if report is None:
            logger.warning("unloaded %s in %.1f s: its engine had died, so its KV cache was lost", self.name, seconds)
            return
        stored = f"stored {report.files} files, {report.nbytes / 1e6:.1f} MB, of {report.sequences} sequences"
        lost = "" if report.is_complete else "; the rest of the KV cache was lost"
        dropped = f"; {report.dropped_files} files were dropped" if report.dropped_files else ""
        logger.info(
            "unloaded %s in %.1f s: %s in %.1f s%s%s", self.name, seconds, stored, report.seconds, lost, dropped
        )

    def close(self, error: AfterglowError | None = None) -> None:
        """Close the model without waiting for a load. Waiting requests and later ones get `error`, or else `Closed`."""
        self._refuse_requests(error or self._close_error)
        if self.model is not None:
            self.model.close()

    def remove(self) -> None:
        """Unload and close the model, which is deleted. Blocking. Raises status 409 if it is in use."""
        error = ModelNotFound(self.name, "it was deleted")
        with self._changed:
            self._removal = error
        try:
            self.unload()
        finally:
            with self._changed:
                self._removal = None
        self.close(error)

    def _refuse_requests(self, error: AfterglowError) -> None:
        with self._changed:
            self._closed, self._close_error = True, error
            if self._loading is not None and not self._loading.done():
                self._loading.set_exception(error)
                self._resolve_waiters(self._loading)
            self._changed.notify_all()


def prepare(model: Model) -> None:
    """Do slow one-time work now, so that the first request does not wait for it."""
    _ = model.fingerprint, model.vocabulary.eog_tokens
    with contextlib.suppress(AfterglowError):  # requests report template errors
        model.plan_chat("Hello")


class ModelRegistry(Closeable):
    """All served models and their common budget.

    >>> registry = ModelRegistry({"small": ServedModel(lambda: afterglow.load(path, host="process", name="small"))})
    >>> registry.get_slot("small").state
    'not loaded'
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        limits: ByteMap | None = None,
        *,
        aliases: Sequence[str] = (),
        build_installed: Callable[[LocalModel], ServedModel] | None = None,
    ) -> None:
        """`models` by the name under which they are served. `limits` are the bytes of all models, by device.

        `aliases` are other names, as PATTERN=MODEL.
        With `build_installed`, models on this machine are served as soon as a client names one.

        Raises `OutOfMemory` if a model does not fit beside the pinned ones, or the pinned ones together.
        """
        self.changed = threading.Condition(threading.RLock())
        self.limits = dict(limits or {})
        self._build_installed = build_installed
        self.variants: VariantFinder | None = None
        self.slots = {name: ModelSlot(name, served, self) for name, served in models.items()}
        self._queue: list[ModelSlot] = []  # loads that wait for room, in the order in which they may have it
        self._timer: threading.Thread | None = None
        self._closed = False
        for name, served in models.items():
            pinned = [_describe(slot) for slot in self.slots.values() if slot.served.pinned and slot.name != name]
            check_fits(name, served.nbytes, pinned, self.limits)
        self._aliases = [(pattern.strip(), name.strip()) for pattern, _, name in (a.partition("=") for a in aliases)]
        for pattern, name in self._aliases:
            if name not in self.slots:
                reason = f"of {pattern!r} must be a served model ({', '.join(self.slots)}), not {name!r}"
                raise InvalidArgument("aliases", reason)

    def get_slot(self, name: str | None) -> ModelSlot:
        """Return the slot of a model by its name or an alias. `None` selects the only served model."""
        return self._get_model(name, accepts_unknown=False).slot

    def list_own_slots(self) -> list[ModelSlot]:
        """List the slots of the models that the command line or the settings name, not those that a client named."""
        return [slot for slot in self.slots.values() if slot.served.installed is None]

    def find_slot(self, name: str) -> ModelSlot | None:
        """Return the slot of a model by its name, in any spelling that clients may use."""
        slots = self.slots  # others may replace it
        found = find_name(name, slots)
        return None if found is None else slots[found]

    def find_aliased_slot(self, name: str) -> ModelSlot | None:
        """Return the slot of the model that a name is an alias of."""
        return next((self.slots[model] for pattern, model in self._aliases if fnmatchcase(name, pattern)), None)

    def split_name(self, name: str | None) -> tuple[str | None, str]:
        """Split the requested name of a model into that of a served model and its adapters, e.g. `+style@0.8`.

        A `+` separates adapters only after the name of a served model, or if the only served model has adapters.
        """
        if name is None or name in self.slots or "+" not in name:
            return name, ""
        base, plus, suffix = name.partition("+")
        only = self._get_only_slot()
        has_adapters = only is not None and bool(only.served.adapters)
        return (base, plus + suffix) if self._find_named(base)[0] or has_adapters else (name, "")

    def get_requested_model(self, name: str | None) -> RequestedModel:
        """Return what a request names. If only one model is served, every unknown name selects it, as a hint."""
        return self._get_model(self.split_name(name)[0], accepts_unknown=True)

    def get_requested_slot(self, name: str | None) -> ModelSlot:
        """Return the slot for a request."""
        return self.get_requested_model(name).slot

    def _get_model(self, name: str | None, *, accepts_unknown: bool) -> RequestedModel:
        served, only = ", ".join(self.slots) or "none yet", self._get_only_slot()
        if name is None:
            if only is None:
                message = f"`model` is missing, and there is no default; served models: {served}"
                raise invalid_request_error("model", message, "missing_required_parameter")
            return RequestedModel(only)
        slot, variant = self._find_named(name)
        if slot is None and variant is None and only and accepts_unknown and get_record().accept_hint("model"):
            slot = only
        if slot is None:
            made = f"it is made from {variant.source}, which is not served; " if variant else ""
            raise ModelNotFound(name[:200], f"{made}served models: {served}")
        return RequestedModel(slot, variant)

    def find_variant(self, name: str) -> ModelVariant | None:
        """Return the variant of this name, unless a model is served under it."""
        return None if self.variants is None or self.find_slot(name) is not None else self.variants.find(name)

    def _get_only_slot(self) -> ModelSlot | None:
        """Return the served model if there is one. Models that clients have named before do not count."""
        named = self.list_own_slots()
        return named[0] if len(named) == 1 else None

    def _find_named(self, name: str) -> tuple[ModelSlot | None, ModelVariant | None]:
        """Return the slot of a model by its name, by that of a variant, or by an alias; and the variant."""
        if (slot := self.find_slot(name)) is not None:
            return slot, None
        if (variant := self.find_variant(name)) is not None:
            return self.find_slot(variant.source), variant
        return self.find_aliased_slot(name), None

    # --- installed models

    @property
    def serves_installed(self) -> bool:
        """Whether models on this machine are served as soon as a client names one."""
        return self._build_installed is not None

    def can_add(self, name: str | None) -> bool:
        """Whether no served model has this name, but one on this machine may have it, and would be served."""
        return self.serves_installed and name is not None and self._find_named(name)[0] is None

    def add_named(self, name: str | None) -> None:
        """Serve the model on this machine that a request names, with or without adapters. Blocking.

        Without effect if it is served, or if there is none, or if only the models of the command line are served.
        """
        for base in dict.fromkeys([name, name.partition("+")[0]] if name else []):
            if base and self.can_add(base):
                variant = self.find_variant(base)
                if (model := find_installed_model(variant.source if variant else base)) is not None:
                    self.add_installed(model)
                    return

    def list_variants(self) -> list[tuple[ModelVariant, ModelSlot | None]]:
        """List the variants that requests can name, with the slot of their model if it is served now. Blocking."""
        found = []
        for variant in [] if self.variants is None else self.variants.list_all():
            slot = self.find_slot(variant.source)
            is_known = slot is not None or (self.serves_installed and find_installed_model(variant.source) is not None)
            if is_known and self.find_slot(variant.name) is None:
                found.append((variant, slot))
        return found

    def list_addable(self) -> list[LocalModel]:
        """List the models on this machine that are served as soon as a client names them. Blocking."""
        if not self.serves_installed:
            return []
        paths = {slot.served.path for slot in self.list_own_slots()}  # a file may have several names
        others = [model for model in list_installed_models() if model.path not in paths]
        return [model for model in others if get_client_name(model.name) not in self.slots]

    def add_installed(self, model: LocalModel) -> ModelSlot | None:
        """Return the slot of a model on this machine, added if necessary; None if only named models are served."""
        if self._build_installed is None:
            return None
        served = self._build_installed(model)
        name = get_client_name(model.name)
        with self.changed:
            if name not in self.slots:
                pinned = [_describe(slot) for slot in self.slots.values() if slot.served.pinned]
                check_fits(name, served.nbytes, pinned, self.limits)
                self.slots = {**self.slots, name: ModelSlot(name, served, self)}  # others may iterate
            return self.slots[name]

    def remove(self, slot: ModelSlot) -> None:
        """Unload a model and serve it no more. Blocking. Raises status 409 if it is in use."""
        slot.remove()
        with self.changed:
            self.slots = {name: other for name, other in self.slots.items() if other is not slot}

    def load_first(self) -> list[str]:
        """Load the pinned models and as many of the others as fit, concurrently; return their names."""
        pinned = [name for name, slot in self.slots.items() if slot.served.pinned]
        names = choose_first_models({name: slot.nbytes for name, slot in self.slots.items()}, pinned, self.limits)
        for future in [self.slots[name].start_load() for name in names]:
            future.result()
        return names

    # --- room

    def make_room(self, slot: ModelSlot) -> None:
        """Wait until a model that is to be loaded has room, and unload others for it. The first load is served first.

        Raises `OutOfMemory` if there can be no room.
        """
        with self.changed:
            self._start_timer()
            self._queue.append(slot)
            try:
                self.changed.wait_for(lambda: self._closed or (self._queue[0] is slot and self._take_room(slot)))
            finally:
                self._queue.remove(slot)
                self.changed.notify_all()
        if self._closed:
            raise Closed("server")

    def _take_room(self, slot: ModelSlot) -> bool:
        """Take the room of a model if it is free; otherwise start the unloads that make it."""
        if slot.is_leaving:
            return False
        if slot.has_room:
            return True
        residents = [_describe(other) for other in self.slots.values() if other.has_room]
        plan = plan_room(slot.name, slot.nbytes, residents, self.limits)
        for name in (*plan.unload, *plan.drain):
            if not self.slots[name].is_loading:  # otherwise its first requests are served before
                logger.info("unloading %s to make room for %s", name, slot.name)
                self.slots[name].start_unload()
        slot.has_room = plan.can_load
        return plan.can_load

    def free_memory(self, slot: ModelSlot) -> bool:
        """Unload all idle models that are not pinned, after a load that failed for lack of memory; return if any."""
        with self.changed:
            others = [other for other in self.slots.values() if other is not slot and other.is_usable]
            idle = [other for other in others if not (other.served.pinned or other.active_requests)]
            unloads = [other.start_unload() for other in idle]
        for unload in unloads:
            unload.result()
        return bool(unloads)

    # --- time to live

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Thread(target=self._run_timer, name="afterglow-model-timer", daemon=True)
            self._timer.start()

    def _run_timer(self) -> None:
        """Unload models that have expired, until the registry is closed."""
        with self.changed:
            while not self._closed:
                now = time.monotonic()
                expiries = {name: slot.expires_at for name, slot in self.slots.items()}
                times = {name: moment for name, moment in expiries.items() if moment is not None}
                for name in [name for name, moment in times.items() if moment <= now]:
                    self.slots[name].start_unload()
                later = [moment - now for moment in times.values() if moment > now]
                self.changed.wait(min([*later, threading.TIMEOUT_MAX]))  # it does not accept a longer one

    def close(self) -> None:
        """Close all models concurrently. Running requests end with an error."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.close, self.slots.values()))


def _describe(slot: ModelSlot) -> ResidentModel:
    return ResidentModel(
        name=slot.name,
        nbytes=slot.nbytes,
        last_used=slot.last_used,
        restore_seconds=slot.restore_seconds,
        pinned=slot.served.pinned,
        is_busy=slot.active_requests > 0 or slot.is_loading,
        is_leaving=slot.is_leaving,
    )
