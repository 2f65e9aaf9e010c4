"""Routes /embedding and /embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from afterglow.server import limits
from afterglow.server.adapters import refuse_adapters
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.large_json import build_large_response
from afterglow.server.llamacpp.prompts import list_prompts, tokenize_prompt
from afterglow.server.llamacpp.schema import LlamaEmbeddingRequest
from afterglow.server.logs import get_record
from afterglow.server.openai.embeddings import encode_vector
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

MAX_NORM, EUCLIDEAN_NORM = 0, 2
MAX_NORM_SCALE = 32760  # llama.cpp scales the largest component to this


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    async def embed(body: LlamaEmbeddingRequest, request: Request) -> Response:
        work = create_embeddings(state, body, get_tenant_salt(request))
        return await state.run_while_connected(request, work, "content")

    for path in ("/embedding", "/embeddings"):
        router.post(path, summary="llama-server: embed texts")(embed)
    return router


async def create_embeddings(state: ServerState, body: LlamaEmbeddingRequest, salt: str) -> Response:
    """Embed the texts, many per decode. The engine serves other requests in between."""
    if body.content is None:
        raise invalid_request_error("content", "`content` is missing", "missing_required_parameter")
    prompts = list_prompts(body.content)
    limits.check_limit(state.settings, "max_inputs", "content", len(prompts))
    model = await state.get_model(body.model)
    refuse_adapters(state.models, body.model, "an embedding")
    token_lists = await state.run_text_work(lambda: [tokenize_prompt(model, prompt) for prompt in prompts])
    if not token_lists or not all(token_lists):
        raise invalid_request_error("content", "`content` must not be empty")
    ticket = state.get_admission_queue(model).admit(1)
    try:
        embeddings = await state.run_long_call(lambda cancel: model.embed_texts(token_lists, salt=salt, cancel=cancel))
    finally:
        ticket.release()
    record = get_record()
    record.model, record.prompt_tokens = model.name, sum(map(len, token_lists))
    norm = EUCLIDEAN_NORM if body.embd_normalize is None else body.embd_normalize

    def build() -> list[dict[str, Any]]:
        # One vector for each text: a list, because without pooling llama-server has one for each token.
        return [
            {"index": index, "embedding": [encode_vector(scale_vector(vector, norm), body.encoding_format)]}
            for index, vector in enumerate(embeddings.vectors)
        ]

    return await build_large_response(state, build)


def scale_vector(vector: NDArray[np.float32], norm: int) -> NDArray[np.float32]:
    """Scale a vector to a norm: the largest component (0), or the p-norm (p from 1 on).

    >>> scale_vector(np.array([3.0, -1.0], np.float32), 1).tolist()
    [0.75, -0.25]
    """
    magnitudes = np.abs(vector.astype(np.float64))
    largest = magnitudes.max()
    if largest == 0:
        return vector
    relative = magnitudes / largest  # a large power of a small number is 0
    length = 1 / MAX_NORM_SCALE if norm == MAX_NORM else (relative**norm).sum() ** (1 / norm)
    scaled: NDArray[np.float32] = (vector / (largest * length)).astype(np.float32)
    return scaled
