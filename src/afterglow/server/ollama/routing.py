"""Routes that exist only on Ollama's own port."""

from __future__ import annotations

from starlette.routing import Match
from starlette.types import Scope

from afterglow.server.schema.base import StrictRoute


class OllamaPortRoute(StrictRoute):
    """Route that exists only on Ollama's port, if the server listens on it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request if it was sent to Ollama's port."""
        return super().matches(scope) if scope["app"].state.server.is_for_ollama_port(scope) else (Match.NONE, {})
