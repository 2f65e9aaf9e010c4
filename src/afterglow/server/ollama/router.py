"""Router of all routes of the Ollama API."""

from __future__ import annotations

from fastapi import APIRouter

from afterglow.server.ollama import chat, embeddings, generate, management
from afterglow.server.state import ServerState

ROUTE_MODULES = (chat, generate, embeddings, management)


def build_router(state: ServerState) -> APIRouter:
    """Return the router of the API."""
    router = APIRouter()
    for module in ROUTE_MODULES:
        router.include_router(module.build_router(state))
    return router
