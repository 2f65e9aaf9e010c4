"""Registry of the served models by name. A model is loaded at startup or by the first request for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.closeable import Closeable
from afterglow.errors import Closed, ModelNotFound
from afterglow.server.errors import invalid_request_error


class ModelSlot:
    """One served model, loaded or not."""

    def __init__(self, name: str, path: Path, settings: ServedSettings) -> None:
        self.name = name
        self.path = path
        self.settings = settings
        self.created = int(time.time())
        self.model: ServedModel | None = None
        self._closed = False
        self._lock = threading.Lock()  # a model is loaded once

    def load(self) -> ServedModel:
        """Return the model and load it if necessary: on first use, and after its engine could not be restarted."""
        with self._lock:
            if self._closed:
                raise Closed("server")
            if self.model is not None and self.model.has_failed:
                self.model.restart()
            if self.model is None:
                self.model = ServedModel(self.name, self.path, self.settings)
            return self.model

    def close(self) -> None:
        """Close the model. Later calls of `load` raise `Closed`."""
        with self._lock:
            self._closed = True
            if self.model is not None:
                self.model.close()

    @property
    def state(self) -> str:
        """`not loaded`, `loading`, `ready`, `restarting` if the engine died, `failed` if restarts failed too."""
        if (model := self.model) is None:
            return "loading" if self._lock.locked() else "not loaded"
        return "ready" if model.is_alive else "failed" if model.has_failed else "restarting"


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
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.load, self.slots.values()))

    def close(self) -> None:
        """Close all models concurrently. Running requests end with an error."""
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.close, self.slots.values()))
