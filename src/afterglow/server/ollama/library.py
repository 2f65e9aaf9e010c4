"""Models by the names of Ollama's API: served ones, created ones, and those that are installed on this machine.

A name without a tag has the tag `latest`. Ollama's own models have the names that they have in Ollama.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from afterglow import registry
from afterglow.api.model import Model
from afterglow.errors import LoadError, ModelNotFound
from afterglow.registry import LocalModel, OllamaDefinition
from afterglow.server.installed import (
    DEFAULT_TAG,
    RequestDefaults,
    add_tag,
    find_installed_model,
    get_client_name,
    list_installed_models,
)
from afterglow.server.logs import logger
from afterglow.server.models import ModelSlot
from afterglow.server.ollama.conversion import build_variant
from afterglow.server.ollama.created_models import CreatedModel, CreatedModelStore
from afterglow.server.ollama.details import FileDetails, describe_file
from afterglow.server.state import ServerState


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model that clients can name."""

    name: str  # with a tag
    path: Path | None = None
    slot: ModelSlot | None = None  # None: it is not served yet
    installed: LocalModel | None = None  # None: it is not in the models directories, or served from the command line
    created: CreatedModel | None = None

    def read_definition(self) -> OllamaDefinition | None:
        """Read what Ollama stores with a model of its own; None for other models. Blocking."""
        if self.slot is not None:
            return self.slot.served.definition
        return None if self.installed is None else registry.read_ollama_definition(self.installed.name)

    def describe(self) -> FileDetails | None:
        """Describe its file; None if the file is not known. Blocking.

        Raises `InvalidModel` if the file is damaged, and `ModelNotFound` if it cannot be read.
        """
        try:
            return None if self.path is None else describe_file(self.path)
        except OSError as error:
            logger.warning("the file %s of %s cannot be read: %s", self.path, self.name, error.strerror)
            raise ModelNotFound(self.name, f"its file cannot be read: {error.strerror}") from None

    def describe_for_list(self) -> FileDetails | None:
        """Describe its file; None, with a warning, also if the file is damaged or cannot be read. Blocking."""
        try:
            return self.describe()
        except LoadError as error:
            logger.warning("%s is not listed with its details: %s", self.name, error)
            return None


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A loaded model for one request."""

    requested_name: str
    slot_name: str  # with the adapters, if there are any
    model: Model
    created: CreatedModel | None
    defaults: RequestDefaults  # of the served model
    started: float  # by the monotonic clock
    loaded: float

    @property
    def load_seconds(self) -> float:
        """Seconds that the request waited for the model."""
        return self.loaded - self.started


class ModelLibrary:
    """Finds models by name and loads them."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.created_models = CreatedModelStore()

    def get_name(self, name: str | None) -> str:
        """Return the name of a request, or that of the only served model; raise status 400 if there are several."""
        return self._state.models.get_slot(None).name if name is None else name

    def find(self, name: str) -> LibraryModel:
        """Return a model by name or alias; raise `ModelNotFound` if there is none. Blocking."""
        created = None if self._find_slot(name) else self.created_models.find(name)
        source = created.source if created else name
        found = self._find_slot(source) or self._find_aliased_slot(source) or find_installed(source)
        if found is None:
            names = ", ".join(model.name for model in self.list_all())
            missing = f"{name} is made from {created.source}, which" if created else "it"
            raise ModelNotFound(name[:200], f"{missing} is not on this machine; models: {names or 'none'}")
        return found if created is None else replace(found, name=created.name, created=created)

    def names_file(self, name: str) -> bool:
        """Return whether a name is that of a served or an installed model. Blocking."""
        return self._find_slot(name) is not None or find_installed(name) is not None

    def split_adapters(self, name: str) -> tuple[str, str]:
        """Split the name of a served model and its adapters, e.g. `small+style@0.8`, into `small` and `+style@0.8`."""
        base, adapters = self._state.models.split_name(name)
        return base or name, adapters.removesuffix(DEFAULT_TAG)

    def list_all(self) -> list[LibraryModel]:
        """List all models by name: served ones first, then created and installed ones. Blocking."""
        models = {model.name: model for model in map(describe_slot, self._state.models.slots.values())}
        for created in self.created_models.list_all():
            source = self._find_slot(created.source) or find_installed(created.source)
            if source is not None:
                models.setdefault(created.name, replace(source, name=created.name, created=created))
        # A file in Ollama's store may have several names.
        paths = {slot.served.path for slot in self._state.models.list_own_slots()}
        for local in list_installed_models():
            if local.path not in paths:
                installed = describe_installed(local)
                models.setdefault(installed.name, installed)
        return list(models.values())

    def describe_use(self, model: LibraryModel, slot: ModelSlot) -> LibraryModel:
        """Return a loaded model as the created one by whose name a client used it last, if there is one. Blocking."""
        created = None if slot.requested_name is None else self.created_models.find(slot.requested_name)
        return model if created is None else replace(model, name=created.name, created=created)

    def _find_slot(self, name: str) -> LibraryModel | None:
        slot = self._state.models.find_slot(name)
        return None if slot is None else describe_slot(slot)

    def _find_aliased_slot(self, name: str) -> LibraryModel | None:
        slot = self._state.models.find_aliased_slot(name)
        return None if slot is None else describe_slot(slot)

    async def get_slot(self, name: str) -> tuple[LibraryModel, ModelSlot]:
        """Return a model and its slot. An installed model that is not served gets one if the server allows it."""
        found = await self._state.run_text_work(lambda: self.find(name))
        if found.slot is not None:
            return found, found.slot
        local = found.installed
        assert local is not None
        slot = await self._state.run_text_work(lambda: self._state.models.add_installed(local))
        if slot is None:
            reason = f"it is installed, but not served: start the server with `afterglow serve {local.name}`"
            raise ModelNotFound(name[:200], f"{reason}, or with `--ollama`, which serves every installed model")
        return replace(found, slot=slot), slot

    async def open(self, name: str | None, *, num_ctx: int | None, keep_alive: float | None = None) -> OpenedModel:
        """Load a model for a request, and set how long it stays loaded. It is not unloaded before the request ends.

        Generations set `keep_alive` when they are accepted.
        """
        started, name = time.monotonic(), self.get_name(name)
        base, adapters = self.split_adapters(name)
        found, slot = await self.get_slot(base)
        variant = build_variant(found.created) if found.created else None
        if num_ctx is not None:
            await self._state.ensure_context(slot, num_ctx, "options.num_ctx", "`options.num_ctx`")
        else:
            await self._state.ensure_variant_context(slot, variant)
        model = await self._state.get_model(slot.name)
        if keep_alive is not None:
            slot.set_keep_alive(keep_alive)
        slot.requested_name = found.name
        defaults = slot.request_defaults
        return OpenedModel(name, slot.name + adapters, model, found.created, defaults, started, time.monotonic())


def is_same_file(path: Path | None, other: Path | None) -> bool:
    """Return whether two paths lead to the same file. Blocking."""
    return path is not None and other is not None and path.resolve() == other.resolve()


def find_installed(name: str) -> LibraryModel | None:
    """Return an installed model by name. Blocking."""
    local = find_installed_model(name)
    return None if local is None else describe_installed(local)


def describe_slot(slot: ModelSlot) -> LibraryModel:
    """Describe a served model."""
    return LibraryModel(add_tag(get_client_name(slot.name)), slot.served.path, slot, slot.served.installed)


def describe_installed(local: LocalModel) -> LibraryModel:
    """Describe a model that is not served."""
    return LibraryModel(add_tag(get_client_name(local.name)), local.path, installed=local)
