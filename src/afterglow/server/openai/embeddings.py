"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from afterglow.api.served_model import ServedModel
from afterglow.server import limits
from afterglow.server.errors import invalid_request_error
from afterglow.server.schema.admin import EmbeddingRequest
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """The route, for an application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/embeddings", summary="Texts as vectors")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await state.run_while_connected(request, create_embeddings(state, body), "input")

    return router


async def create_embeddings(state: ServerState, body: EmbeddingRequest) -> Response:
    """One vector for each text; the engine serves others between two."""
    texts = list_inputs(body)
    if not texts or not all(texts):
        raise invalid_request_error("input", "`input` must not be empty")
    limits.check_limit(state.settings, "max_inputs", "input", len(texts))
    model = await state.get_model(body.model)
    if body.dimensions is not None and body.dimensions != model.engine_info.embedding_width:
        width = model.engine_info.embedding_width
        raise invalid_request_error(
            "dimensions", f"the vectors of {body.model!r} have {width} dimensions", "unsupported_value"
        )
    ticket = state.get_admission_queue(model).admit(1)
    try:
        tokens = await state.run_text_work(lambda: [tokenize_input(model, text) for text in texts])
        vectors = [await state.run_engine_call(lambda one=one: model.embed(one)) for one in tokens]  # type: ignore[misc]
    finally:
        ticket.release()
    count = sum(map(len, tokens))
    data = [
        {"object": "embedding", "index": index, "embedding": encode_vector(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "model": body.model, "data": data, "usage": usage})


def list_inputs(body: EmbeddingRequest) -> list[Any]:
    """The texts of a request, each text or tokens."""
    value = body.input
    return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else list(value)


def tokenize_input(model: ServedModel, text: str | list[int]) -> list[int]:
    """A text as the model reads it, with the tokens that it wants around it."""
    if isinstance(text, str):
        return model.tokenize(text, bos=True)
    return [int(token) for token in model.vocabulary.check_tokens(text)]


def encode_vector(vector: NDArray[np.float32], encoding: str | None) -> list[float] | str:
    """A vector as numbers, or as the base64 of little-endian floats."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
