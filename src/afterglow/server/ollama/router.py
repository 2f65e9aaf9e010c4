"""Router of all routes of the Ollama API."""

from __future__ import annotations

from fastapi import APIRouter

from afterglow.server.installed import ModelVariant
from afterglow.server.ollama import chat, embeddings, generate, management
from afterglow.server.ollama.conversion import build_variant
from afterglow.server.ollama.created_models import CreatedModelStore
from afterglow.server.state import ServerState

ROUTE_MODULES = (chat, generate, embeddings, management)


class CreatedVariants:
    """The created models, for the other APIs of the server."""

    def __init__(self) -> None:
        self._store = CreatedModelStore()

    def find(self, name: str) -> ModelVariant | None:
        """Return a created model by its name, with or without the default tag."""
        created = self._store.find(name)
        return None if created is None else build_variant(created)

    def list_all(self) -> list[ModelVariant]:
        """List the created models. Blocking."""
        return [build_variant(created) for created in self._store.list_all()]


def build_router(state: ServerState) -> APIRouter:
    """Return the router of the API."""
    state.models.variants = CreatedVariants()
    router = APIRouter()
    for module in ROUTE_MODULES:
        router.include_router(module.build_router(state))
    return router
