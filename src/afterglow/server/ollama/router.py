"""Router of all routes of the Ollama API."""

from __future__ import annotations

from fastapi import APIRouter

from afterglow.server.errors import APIError
from afterglow.server.installed import ModelVariant
from afterglow.server.logs import logger
from afterglow.server.ollama import chat, embeddings, generate, management
from afterglow.server.ollama.conversion import build_variant
from afterglow.server.ollama.created_models import CreatedModel, CreatedModelStore
from afterglow.server.state import ServerState

ROUTE_MODULES = (chat, generate, embeddings, management)


class CreatedVariants:
    """The created models, for the other APIs of the server."""

    def __init__(self) -> None:
        self._store = CreatedModelStore()
        self._unusable_names: set[str] = set()  # of which the log has a warning

    def find(self, name: str) -> ModelVariant | None:
        """Return a created model by its name, with or without the default tag.

        Raises status 400 if it cannot be used.
        """
        created = self._store.find(name)
        return None if created is None else build_variant(created)

    def list_all(self) -> list[ModelVariant]:
        """List the created models that can be used. Blocking."""
        return [variant for created in self._store.list_all() if (variant := self._build(created)) is not None]

    def _build(self, created: CreatedModel) -> ModelVariant | None:
        """Return a created model; None, with a warning the first time, if it cannot be used."""
        try:
            return build_variant(created)
        except APIError as error:
            if created.name not in self._unusable_names:
                logger.warning("%s", error)
            self._unusable_names.add(created.name)
            return None


def build_router(state: ServerState) -> APIRouter:
    """Return the router of the API."""
    state.models.variants = CreatedVariants()
    router = APIRouter()
    for module in ROUTE_MODULES:
        router.include_router(module.build_router(state))
    return router
