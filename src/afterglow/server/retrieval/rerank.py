"""Routes /v1/rerank, /v2/rerank, /rerank and llama-server's other names of them."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.api.rerank import Reranking
from afterglow.server import limits
from afterglow.server.adapters import refuse_adapters
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.logs import get_record
from afterglow.server.retrieval.schema import RerankRequest
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    async def rerank(body: RerankRequest, request: Request) -> Response:
        work = rank_documents(state, body, get_tenant_salt(request), request.url.path)
        return await state.run_while_connected(request, work, "documents")

    for path in PATHS:
        router.add_api_route(path, rerank, methods=["POST"], summary="Rank documents for a query")
    return router


async def rank_documents(state: ServerState, body: RerankRequest, salt: str, path: str) -> Response:
    """Score the documents. The engine serves other requests in between."""
    if not body.documents:
        raise invalid_request_error("documents", "`documents` must not be empty")
    limits.check_limit(state.settings, "max_documents", "documents", len(body.documents))
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    model = await state.get_model(body.model)
    name = state.models.get_requested_model(body.model).name
    refuse_adapters(state.models, body.model, "a ranking")
    ticket = state.get_admission_queue(model).admit(1)
    try:
        ranking = await state.run_long_call(
            lambda cancel: model.rerank(
                body.query,
                documents,
                top_n=body.top_n,
                instruction=body.instruction,
                max_document_tokens=body.max_tokens_per_doc,
                salt=salt,
                cancel=cancel,
            )
        )
    finally:
        ticket.release()
    record = get_record()
    record.model, record.prompt_tokens = model.name, ranking.prompt_tokens
    with_documents = bool(body.return_documents)
    if body.texts is not None:
        return JSONResponse(build_score_list(ranking, with_documents=with_documents))
    version = "2" if path.startswith("/v2") else "1"
    return JSONResponse(build_body(ranking, name, version, with_documents=with_documents))


def build_score_list(ranking: Reranking, *, with_documents: bool) -> list[dict[str, Any]]:
    """Build the response of text-embeddings-inference, for requests with `texts`."""
    return [
        {"index": document.index, "score": document.score} | ({"text": document.text} if with_documents else {})
        for document in ranking.results
    ]


def build_body(ranking: Reranking, model: str, version: str, *, with_documents: bool) -> dict[str, Any]:
    """Build the response that clients of both APIs read: `usage` is Jina's, `id` and `meta` are Cohere's."""
    return {
        "id": str(uuid.uuid4()),
        "object": "list",
        "model": model,
        "results": [
            {"index": document.index, "relevance_score": document.score}
            | ({"document": {"text": document.text}} if with_documents else {})
            for document in ranking.results
        ],
        "usage": {
            "prompt_tokens": ranking.prompt_tokens,
            "total_tokens": ranking.prompt_tokens,
            "computed_tokens": ranking.computed_tokens,
        },
        "meta": {
            "api_version": {"version": version},
            "tokens": {"input_tokens": ranking.prompt_tokens, "output_tokens": 0},
        },
    }
