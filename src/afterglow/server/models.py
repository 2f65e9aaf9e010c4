"""Registry of the served models by name. A model is loaded at startup or by the first request for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.closeable import Closeable
from afterglow.errors import Closed, ModelNotFound
from afterglow.server.errors import invalid_request_error

Model: TypeAlias = ServedModel
RETRY_AFTER_SECONDS = 10.0  # until then, requests for a model that could not be loaded get the same error


class ModelSlot:
    """One served model, loaded or not."""

    def __init__(self, name: str, path: Path, settings: ServedSettings) -> None:
        self.name = name
        self.path = path
        self.settings = settings
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
            if self.model is not None and not self.model.has_failed:
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
            model = self._build_model()
        except BaseException as error:  # raised in the requests that wait for it
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
        if self.model is None:
            return Model(self.name, self.path, self.settings)
        self.model.restart()
        return self.model

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
        if model.is_alive:
            return "ready"
        return "failed" if model.has_failed and not is_loading else "restarting"


class ModelRegistry(Closeable):
    """All served models.

    >>> registry = ModelRegistry({"small": path}, ServedSettings())
    >>> registry.get_slot("small").name
    'small'
    """

    def __init__(
        self, paths: Mapping[str, Path], settings: ServedSettings, overrides: Mapping[str, ServedSettings] | None = None
    ) -> None:
        """`overrides` are the settings of models that differ from `settings`."""
        self.slots = {
            name: ModelSlot(name, path, (overrides or {}).get(name, settings)) for name, path in paths.items()
        }

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

    def load_all(self) -> None:
        """Load all models concurrently."""
        for future in [slot.start_load() for slot in self.slots.values()]:
            future.result()

    def close(self) -> None:
        """Close all models concurrently. Running requests end with an error."""
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.close, self.slots.values()))
