"""The application: routes, errors and what stands before them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from afterglow.server import admin, errors
from afterglow.server.auth import APIKeys, AuthMiddleware
from afterglow.server.openai import chat, completions, embeddings, responses
from afterglow.server.state import ServerState
from afterglow.version import __version__

DESCRIPTION = (
    "Language models on this machine, as OpenAI's clients know them. Fields that are not honoured are refused."
)


def build_routed_app(state: ServerState) -> FastAPI:
    """The routes alone."""
    app = FastAPI(title="afterglow", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    errors.install_error_handlers(app)
    for part in (chat, completions, responses, embeddings, admin):
        app.include_router(part.build_router(state))
    return app


def build_application(state: ServerState) -> tuple[ASGIApp, AuthMiddleware]:
    """What a web server runs, and the guard that can close it."""
    settings = state.settings
    guard = AuthMiddleware(
        build_routed_app(state),
        keys=APIKeys(settings.api_keys),
        max_body_bytes=settings.max_body_bytes,
        metrics=state.metrics,
    )
    if not settings.allow_origins:
        return guard, guard
    cors = CORSMiddleware(guard, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"])
    return cors, guard
