"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from afterglow.server import admin, errors, observe
from afterglow.server.anthropic import errors as anthropic_errors
from afterglow.server.anthropic import messages as anthropic_messages
from afterglow.server.anthropic import models as anthropic_models
from afterglow.server.auth import AuthMiddleware, BrowserPolicy
from afterglow.server.batches import routes as batches
from afterglow.server.errors import ErrorFormats
from afterglow.server.llamacpp import router as llamacpp
from afterglow.server.llamacpp.errors import build_error_body as build_llama_error_body
from afterglow.server.ollama import router as ollama
from afterglow.server.ollama.errors import build_error_body as build_ollama_error_body
from afterglow.server.openai import chat, completions, embeddings, responses, transcriptions
from afterglow.server.openai.errors import build_error_body
from afterglow.server.retrieval import rerank
from afterglow.server.retrieval.errors import build_error_body as build_rerank_error_body
from afterglow.server.state import ServerState
from afterglow.server.web import router as web
from afterglow.version import __version__

DESCRIPTION = (
    "API of OpenAI, Anthropic, Ollama and llama-server for local language models. No field is ignored silently."
)
EXPOSED_HEADERS = ("x-afterglow-ignored", "x-afterglow-unenforced", "retry-after")  # to web pages of other origins
# The first matching route responds: those of `anthropic_models` match only Anthropic's clients.
API_MODULES = (
    *(chat, completions, responses, embeddings, transcriptions, rerank, batches),
    *(anthropic_messages, anthropic_models, ollama, llamacpp),
)
ROUTE_MODULES = (*API_MODULES, admin, observe, web)
LLAMA_SERVER_PATHS = (
    "/completion",
    "/chat/",
    "/infill",
    "/embedding",
    "/slots",
    "/props",
    "/lora-adapters",
    "/responses",
)
# As in llama-server. Not every path: HEAD of an event stream would run until the client disconnects.
HEAD_PATHS = frozenset(
    {"/health", "/v1/health", "/metrics", "/models", "/v1/models", "/props", "/slots", "/lora-adapters"}
)
ERROR_FORMATS = ErrorFormats(  # another API adds its path prefix
    default=build_error_body,
    by_prefix={
        "/v1/messages": anthropic_errors.build_error_body,
        "/api/": build_ollama_error_body,
        **dict.fromkeys(rerank.PATHS, build_rerank_error_body),
        **dict.fromkeys(LLAMA_SERVER_PATHS, build_llama_error_body),
    },
    status_by_prefix={"/v1/messages": anthropic_errors.get_status},
)


def build_routed_app(state: ServerState) -> FastAPI:
    """Return the application without middleware."""
    app = FastAPI(title="afterglow", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    app.state.server = state
    errors.install_error_handlers(app, ERROR_FORMATS)
    for module in ROUTE_MODULES:
        app.include_router(module.build_router(state))
    return app


def answer_head(app: ASGIApp) -> ASGIApp:
    """Return the application with HEAD on `HEAD_PATHS` answered as GET. The HTTP server leaves the body out."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] in HEAD_PATHS:
            scope = {**scope, "method": "GET"}
        await app(scope, receive, send)

    return call


def build_application(state: ServerState) -> tuple[ASGIApp, AuthMiddleware]:
    """Return the complete application, and its authentication middleware, which controls shutdown."""
    middleware = AuthMiddleware(build_routed_app(state), state, ERROR_FORMATS)
    served = answer_head(middleware)
    app = add_cors(served, middleware.browser_policy) if state.settings.allow_origins else served
    if state.ollama_port is None:
        return app, middleware
    ollama_app = add_cors(served, middleware.ollama_policy)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        await (ollama_app if state.is_for_ollama_port(scope) else app)(scope, receive, send)

    return dispatch, middleware


def add_cors(app: ASGIApp, policy: BrowserPolicy) -> ASGIApp:
    """Return an application that tells browsers which origins may read its responses."""
    return CORSMiddleware(
        app,
        allow_origin_regex=policy.origin_pattern.pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
