"""Registry of the served models by name. A model is loaded at startup or by the first request for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from afterglow.api.model import Model
from afterglow.closeable import Closeable
from afterglow.errors import AfterglowError, Closed, ModelNotFound
from afterglow.server.errors import invalid_request_error
from afterglow.server.logs import get_record, logger

OpenModel: TypeAlias = Callable[[], Model]
RETRY_AFTER_SECONDS = 10.0  # until then, requests for a model that could not be loaded get the same error


class ModelSlot:
    """One served model, loaded or not."""

    def __init__(self, name: str, open_model: OpenModel) -> None:
        self.name = name
        self._open_model = open_model
        self.created = int(time.time())
        self.model: Model | None = None
        self._lock = threading.Lock()  # held briefly, never during a load
        self._loading: Future[Model] | None = None  # the load that runs, or the last one that failed
        self._retry_time = 0.0  # when a failed load may be repeated
        self._closed = False

    def start_load(self) -> Future[Model]:
        """Return the future model: on first use, and after its engine could not be restarted, a new load is started.

        All callers share one load. The error of a failed load is returned for `RETRY_AFTER_SECONDS`.
        """
        with self._lock:
            if self._closed:
                raise Closed("server")
            if self._loading is not None and (not self._loading.done() or time.monotonic() < self._retry_time):
                return self._loading
            future: Future[Model] = Future()
            future.set_running_or_notify_cancel()  # a request that is cancelled must not cancel the load
            if self.model is not None and not self.model.needs_restart:
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
        started = time.monotonic()
        try:
            model = self._build_model()
            logger.info("loaded %s in %.1f s", self.name, time.monotonic() - started)
        except BaseException as error:  # raised in the requests that wait for it
            logger.error("%s could not be loaded: %s", self.name, error)
            with self._lock:
                self._retry_time = time.monotonic() + RETRY_AFTER_SECONDS
                if not future.done():
                    future.set_exception(error)
            return
        with self._lock:
            if not self._closed:
                self.model, self._loading = model, None
                future.set_result(model)
                return
        model.close()

    def _build_model(self) -> Model:
        if self.model is not None:
            self.model.activate()  # the vocabulary stays open: other threads may be using it
            return self.model
        model = self._open_model()
        try:
            if model.can_generate:
                prepare(model)
        except BaseException:
            model.close()
            raise
        return model

    def retry_failed(self) -> None:
        """Load a model whose engine could not be restarted again, in the background."""
        if self.state == "failed" and not self._closed:
            self.start_load()

    def close(self) -> None:
        """Close the model without waiting for a load. Waiting requests and later loads get `Closed`."""
        with self._lock:
            self._closed = True
            if self._loading is not None and not self._loading.done():
                self._loading.set_exception(Closed("server"))
        if self.model is not None:
            self.model.close()

    @property
    def state(self) -> str:
        """`not loaded`, `loading`, `ready`, `restarting` if the engine died, `failed` if restarts failed too."""
        is_loading = self._loading is not None and not self._loading.done()
        if (model := self.model) is None:
            return "loading" if is_loading else "not loaded"
        if model.is_active:
            return "ready"
        return "failed" if model.needs_restart and not is_loading else "restarting"


def prepare(model: Model) -> None:
    """Do slow one-time work now, so that the first request does not wait for it."""
    _ = model.fingerprint, model.vocabulary.eog_tokens
    with contextlib.suppress(AfterglowError):  # requests report template errors
        model.plan_chat("Hello")


class ModelRegistry(Closeable):
    """All served models.

    >>> registry = ModelRegistry({"small": lambda: afterglow.load(path, host="process", name="small")})
    >>> registry.get_slot("small").state
    'not loaded'
    """

    def __init__(self, models: Mapping[str, OpenModel]) -> None:
        """`models` are functions that load a model, by the name under which it is served."""
        self.slots = {name: ModelSlot(name, open_model) for name, open_model in models.items()}

    def get_slot(self, name: str | None) -> ModelSlot:
        """Return the slot of a model. `None` selects the only served model."""
        served = ", ".join(self.slots)
        if name is None:
            if len(self.slots) > 1:
                message = f"`model` is missing, and several models are served: {served}"
                raise invalid_request_error("model", message, "missing_required_parameter")
            return next(iter(self.slots.values()))
        if name not in self.slots:
            raise ModelNotFound(name[:200], f"served models: {served}")
        return self.slots[name]

    def get_requested_slot(self, name: str | None) -> ModelSlot:
        """Return the slot for a request. If only one model is served, every name selects it, as a hint."""
        if name not in self.slots and len(self.slots) == 1 and name is not None and get_record().accept_hint("model"):
            return next(iter(self.slots.values()))
        return self.get_slot(name)

    def load_all(self) -> None:
        """Load all models concurrently."""
        for future in [slot.start_load() for slot in self.slots.values()]:
            future.result()

    def close(self) -> None:
        """Close all models concurrently. Running requests end with an error."""
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.close, self.slots.values()))
