"""Route /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from afterglow.api.model import Model
from afterglow.server import limits
from afterglow.server.adapters import refuse_adapters
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.large_json import build_large_response
from afterglow.server.logs import get_record
from afterglow.server.openai.schema.embeddings import EmbeddingRequest
from afterglow.server.priority import is_batch_line
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/embeddings", summary="Create embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        work = create_embeddings(state, body, get_tenant_salt(request))
        return await state.run_while_connected(request, work, "input")

    return router


async def create_embeddings(state: ServerState, body: EmbeddingRequest, salt: str) -> Response:
    """Embed the inputs, many per decode. The engine serves other requests between two decodes."""
    inputs = list_inputs(body)
    if not inputs or not all(inputs):
        raise invalid_request_error("input", "`input` must not be empty")
    limits.check_limit(state.settings, "max_inputs", "input", len(inputs))
    model = await state.get_model(body.model)
    name = state.models.get_requested_model(body.model).name
    refuse_adapters(state.models, body.model, "an embedding")
    ticket = state.get_admission_queue(model).admit(1, is_background=is_batch_line())
    try:
        token_lists = await state.run_text_work(lambda: [tokenize_input(model, value) for value in inputs])
        result = await state.run_long_call(
            lambda cancel: model.embed_texts(
                token_lists,
                dimensions=body.dimensions,
                long_text=body.long_text or "refuse",
                salt=salt,
                cancel=cancel,
            )
        )
    finally:
        ticket.release()
    count = sum(result.token_counts)
    record = get_record()
    record.model, record.prompt_tokens = model.name, count
    usage = {"prompt_tokens": count, "total_tokens": count, "computed_tokens": result.computed_tokens}

    def build() -> dict[str, Any]:
        data: list[dict[str, Any]] = [
            {"object": "embedding", "index": index, "embedding": encode_vector(vector, body.encoding_format)}
            for index, vector in enumerate(result.vectors)
        ]
        for item, windows in zip(data, result.windows, strict=True):
            item |= {"windows": windows} if body.long_text == "window" else {}
        return {"object": "list", "model": name, "data": data, "usage": usage}

    return await build_large_response(state, build)


def list_inputs(body: EmbeddingRequest) -> list[Any]:
    """Return the inputs of a request, each a text or a list of tokens."""
    value = body.input
    return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else list(value)


def tokenize_input(model: Model, value: str | list[int]) -> list[int]:
    """Tokenize a text with the special tokens that the model adds. Tokens are only validated."""
    if isinstance(value, str):
        return model.tokenize(value, bos=True)
    return [int(token) for token in model.vocabulary.check_tokens(value)]


def encode_vector(vector: NDArray[np.float32], encoding: str | None) -> list[float] | str:
    """Encode a vector as numbers, or as base64 of little-endian floats."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()  # type: ignore[no-any-return]
