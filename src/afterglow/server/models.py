"""The models of a server by name: loaded at the start, or when somebody first asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.closeable import Closeable
from afterglow.errors import Closed, ModelNotFound


class ModelSlot:
    """One model of the roster, loaded or not."""

    def __init__(self, name: str, path: Path, settings: ServedSettings) -> None:
        self.name = name
        self.path = path
        self.settings = settings
        self.created = int(time.time())
        self.model: ServedModel | None = None
        self._closed = False
        self._lock = threading.Lock()  # loading takes long, and happens once

    def load(self) -> ServedModel:
        """The model; loads it first where it is not."""
        with self._lock:
            if self._closed:
                raise Closed("server")
            if self.model is None:
                self.model = ServedModel(self.name, self.path, self.settings)
            return self.model

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self.model is not None:
                self.model.close()

    @property
    def state(self) -> str:
        """`not loaded`, `loading`, `ready`, or `restarting` where its engine died."""
        if self.model is None:
            return "loading" if self._lock.locked() else "not loaded"
        return "ready" if self.model.is_alive else "restarting"


class ModelRegistry(Closeable):
    """Every model that is served.

    >>> roster = Roster({"small": path}, ServedSettings())
    >>> roster.place("small").load().context_length
    4096
    """

    def __init__(
        self, paths: Mapping[str, Path], settings: ServedSettings, overrides: Mapping[str, ServedSettings] | None = None
    ) -> None:
        """`own` are the settings of models that have others than the rest."""
        self.slots = {
            name: ModelSlot(name, path, (overrides or {}).get(name, settings)) for name, path in paths.items()
        }

    def get_slot(self, name: str | None) -> ModelSlot:
        """A model by name; without one, the only one there is."""
        if name is None and len(self.slots) == 1:
            return next(iter(self.slots.values()))
        if name is None or name not in self.slots:
            raise ModelNotFound("" if name is None else name[:200], f"there are {', '.join(self.slots)}")
        return self.slots[name]

    def load_all(self) -> None:
        """Load what is not loaded, several at once."""
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.load, self.slots.values()))

    def close(self) -> None:
        """Close all, several at once. Requests that run end with an error."""
        with ThreadPoolExecutor(max(1, len(self.slots))) as pool:
            list(pool.map(ModelSlot.close, self.slots.values()))
