"""Routes of the Ollama API: bodies are JSON whatever their content type; the root is only on Ollama's own port."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import MutableHeaders
from starlette.routing import Match
from starlette.types import Scope

from afterglow.server.schema.base import StrictRoute


class OllamaRoute(StrictRoute):
    """Route that reads every body as JSON, as Ollama does: its examples for curl set no content type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that receives a JSON request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            scope = dict(request.scope)
            MutableHeaders(scope=scope)["content-type"] = "application/json"
            return await handler(Request(scope, request.receive))

        return handle


class OllamaPortRoute(OllamaRoute):
    """Route that exists only on Ollama's port, if the server listens on it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request if it was sent to Ollama's port."""
        address, port = scope.get("server"), scope["app"].state.server.ollama_port
        return super().matches(scope) if port is not None and address and address[1] == port else (Match.NONE, {})
