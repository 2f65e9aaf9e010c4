"""The application: routes, errors and what stands before them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from afterglow.server import chat, completions, embeddings, errors, inspection, responses
from afterglow.server.security import Guard, Keys
from afterglow.server.service import Service
from afterglow.version import __version__

DESCRIPTION = (
    "Language models on this machine, as OpenAI's clients know them. Fields that are not honoured are refused."
)


def routed(service: Service) -> FastAPI:
    """The routes alone."""
    app = FastAPI(title="afterglow", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    errors.install(app)
    for part in (chat, completions, responses, embeddings, inspection):
        app.include_router(part.routes(service))
    return app


def application(service: Service) -> tuple[ASGIApp, Guard]:
    """What a web server runs, and the guard that can close it."""
    settings = service.settings
    guard = Guard(
        routed(service),
        keys=Keys(settings.api_keys),
        max_body_bytes=settings.max_body_bytes,
        metrics=service.metrics,
    )
    if not settings.allow_origins:
        return guard, guard
    cors = CORSMiddleware(guard, allow_origins=list(settings.allow_origins), allow_methods=["*"], allow_headers=["*"])
    return cors, guard
