"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from afterglow.server import limits
from afterglow.server.errors import invalid
from afterglow.server.service import Service
from afterglow.server.types.other import EmbeddingRequest
from afterglow.server.wire import StrictRoute
from afterglow.serving import ServedModel


def routes(service: Service) -> APIRouter:
    """The route, for an application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/embeddings", summary="Texts as vectors")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await service.while_there(request, answer(service, body), "input")

    return router


async def answer(service: Service, body: EmbeddingRequest) -> Response:
    """One vector for each text; the engine serves others between two."""
    texts = inputs(body)
    if not texts or not all(texts):
        raise invalid("input", "`input` must not be empty")
    limits.at_most(service.settings, "max_inputs", "input", len(texts))
    model = await service.model(body.model)
    if body.dimensions is not None and body.dimensions != model.facts.embedding_width:
        width = model.facts.embedding_width
        raise invalid("dimensions", f"the vectors of {body.model!r} have {width} dimensions", "unsupported_value")
    ticket = service.gate(model).enter(1)
    try:
        tokens = await service.text(lambda: [tokens_of(model, text) for text in texts])
        vectors = [await service.waiting(lambda one=one: model.embed(one)) for one in tokens]  # type: ignore[misc]
    finally:
        ticket.release()
    count = sum(map(len, tokens))
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "model": body.model, "data": data, "usage": usage})


def inputs(body: EmbeddingRequest) -> list[Any]:
    """The texts of a request, each text or tokens."""
    value = body.input
    return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else list(value)


def tokens_of(model: ServedModel, text: str | list[int]) -> list[int]:
    """A text as the model reads it, with the tokens that it wants around it."""
    if isinstance(text, str):
        return model.tokenize(text, bos=True)
    return [int(token) for token in model.vocabulary.check_all(text)]


def encoded(vector: NDArray[np.float32], encoding: str | None) -> list[float] | str:
    """A vector as numbers, or as the base64 of little-endian floats."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
