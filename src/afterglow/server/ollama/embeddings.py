"""Routes /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from afterglow.api.embeddings import shorten_vectors
from afterglow.api.model import Model
from afterglow.errors import PromptTooLong
from afterglow.server import limits
from afterglow.server.adapters import refuse_adapters
from afterglow.server.auth import get_tenant_salt, join_salts
from afterglow.server.errors import invalid_request_error, report_hint
from afterglow.server.large_json import build_large_response
from afterglow.server.logs import get_record
from afterglow.server.ollama.formatting import to_nanoseconds
from afterglow.server.ollama.library import ModelLibrary
from afterglow.server.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaOptions
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

USED_OPTIONS = ("num_ctx", "cache_salt", "lora")  # by embeddings


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)
    library = ModelLibrary(state)

    @router.post("/api/embed", summary="Ollama: embed texts")
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_embeddings(state, library, body, get_tenant_salt(request)), "input"
        )

    @router.post("/api/embeddings", summary="Ollama: embed one text, in the old form")
    async def embeddings(body: OllamaEmbeddingsRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_embedding(state, library, body, get_tenant_salt(request)), "prompt"
        )

    return router


async def create_embeddings(state: ServerState, library: ModelLibrary, body: OllamaEmbedRequest, salt: str) -> Response:
    """Embed each text."""
    texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
    limits.check_limit(state.settings, "max_inputs", "input", len(texts))
    options = body.options or OllamaOptions.model_validate({})
    refuse_adapters(state.models, body.model, "an embedding")
    check_options(options)
    opened = await library.open(body.model, num_ctx=options.num_ctx, keep_alive=body.keep_alive)
    width = opened.model.engine_info.embedding_width
    if (body.dimensions or 0) > width:
        raise invalid_request_error("dimensions", f"`dimensions` is {body.dimensions:,}; the embeddings have {width:,}")
    tokens = await state.run_text_work(
        lambda: [tokenize_text(opened.model, text, truncate=bool(body.truncate)) for text in texts]
    )
    vectors = await embed_all(state, opened.model, tokens, join_salts(salt, options.cache_salt))

    def build() -> dict[str, Any]:
        return {
            "model": opened.requested_name,
            "embeddings": shorten_vectors(vectors, body.dimensions or width).tolist() if len(vectors) else [],
            "total_duration": to_nanoseconds(time.monotonic() - opened.started),
            "load_duration": to_nanoseconds(opened.load_seconds),
            "prompt_eval_count": sum(map(len, tokens)),
        }

    return await build_large_response(state, build)


async def create_embedding(
    state: ServerState, library: ModelLibrary, body: OllamaEmbeddingsRequest, salt: str
) -> Response:
    """Embed one text. Without a text, the model is loaded."""
    options = body.options or OllamaOptions.model_validate({})
    refuse_adapters(state.models, body.model, "an embedding")
    check_options(options)
    opened = await library.open(body.model, num_ctx=options.num_ctx, keep_alive=body.keep_alive)
    if not body.prompt:
        return JSONResponse({"embedding": []})
    text = body.prompt
    tokens = await state.run_text_work(lambda: tokenize_text(opened.model, text, truncate=False))
    (vector,) = await embed_all(state, opened.model, [tokens], join_salts(salt, options.cache_salt))
    return JSONResponse({"embedding": vector.tolist()})


def check_options(options: OllamaOptions) -> None:
    """Record options that have no effect on an embedding. Raises status 400 for adapters, and if the server is strict.

    Clients send the options of generations here, too.
    """
    if options.lora:
        raise invalid_request_error("options.lora", "`options.lora` must be empty: an embedding uses the base model")
    for name in options.model_dump(exclude=set(USED_OPTIONS), exclude_none=True):
        report_hint(f"options.{name}", "an embedding does not depend on it")


async def embed_all(state: ServerState, model: Model, texts: Sequence[list[int]], salt: str) -> NDArray[np.float32]:
    """Embed tokenized texts, many per decode. The engine serves other requests between two decodes."""
    if not texts:
        return np.zeros((0, 0), np.float32)
    ticket = state.get_admission_queue(model).admit(1)
    try:
        result = await state.run_long_call(lambda cancel: model.embed_texts(texts, salt=salt, cancel=cancel))
    finally:
        ticket.release()
    record = get_record()
    record.model, record.prompt_tokens = model.name, sum(map(len, texts))
    return result.vectors


def tokenize_text(model: Model, text: str, *, truncate: bool) -> list[int]:
    """Tokenize a text with the special tokens of the model. With `truncate`, one that is too long loses its end."""
    tokens, limit = model.tokenize(text, bos=True), model.max_embedding_tokens
    if not tokens:
        raise invalid_request_error("input", "`input` must not contain empty texts")
    if len(tokens) <= limit:
        return tokens
    if not truncate:
        raise PromptTooLong(len(tokens), limit)
    end = tokens[-1:] if tokens[-1] in model.vocabulary.control_tokens else []
    return tokens[: limit - len(end)] + end
