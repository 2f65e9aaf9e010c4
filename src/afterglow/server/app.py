"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from afterglow.server import admin, errors
from afterglow.server.auth import AuthMiddleware
from afterglow.server.errors import ErrorFormats
from afterglow.server.openai import chat, completions, embeddings, responses
from afterglow.server.openai.errors import build_error_body
from afterglow.server.state import ServerState
from afterglow.version import __version__

DESCRIPTION = "OpenAI-compatible API for local language models. No field is ignored silently."
EXPOSED_HEADERS = ("x-afterglow-ignored", "x-afterglow-unenforced", "retry-after")  # to web pages of other origins
ROUTE_MODULES = (chat, completions, responses, embeddings, admin)
ERROR_FORMATS = ErrorFormats(default=build_error_body)  # another API adds its path prefix


def build_routed_app(state: ServerState) -> FastAPI:
    """Return the application without middleware."""
    app = FastAPI(title="afterglow", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    errors.install_error_handlers(app, ERROR_FORMATS)
    for module in ROUTE_MODULES:
        app.include_router(module.build_router(state))
    return app


def build_application(state: ServerState) -> tuple[ASGIApp, AuthMiddleware]:
    """Return the complete application, and its authentication middleware, which controls shutdown."""
    settings = state.settings
    middleware = AuthMiddleware(build_routed_app(state), settings, state.metrics, ERROR_FORMATS)
    if not settings.allow_origins:
        return middleware, middleware
    origins = list(settings.allow_origins)
    cors = CORSMiddleware(
        middleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )
    return cors, middleware
