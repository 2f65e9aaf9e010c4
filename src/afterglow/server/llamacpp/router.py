"""All routes of the llama-server API."""

from __future__ import annotations

from fastapi import APIRouter

from afterglow.server.llamacpp import chat, completion, embedding, properties, slots
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter()
    for module in (completion, chat, embedding, slots, properties):
        router.include_router(module.build_router(state))
    return router
