"""Body of the rerank routes: the fields of Cohere (v1 and v2), of Jina, and of text-embeddings-inference (`texts`)."""

from __future__ import annotations

import pydantic

from afterglow.server.schema.base import OptionalModel, StrictModel, hint, same_as, supports_only, unsupported


class RerankDocument(StrictModel):
    """A document as an object."""

    text: str


class RerankRequest(StrictModel):
    """A query and the documents to rank for it."""

    model: OptionalModel = None
    query: str = pydantic.Field(min_length=1)
    documents: list[str | RerankDocument] | None = pydantic.Field(
        None, min_length=1, description="Texts, or objects with `text`. Required."
    )
    texts: list[str] | None = same_as("documents")
    top_n: int | None = pydantic.Field(None, ge=1, description="Number of results. Default: all documents.")
    return_documents: bool | None = pydantic.Field(
        None, description="Return the texts with the results. Default: false."
    )
    return_text: bool | None = same_as("return_documents")
    max_tokens_per_doc: int | None = pydantic.Field(
        None, ge=1, description="Longer documents are cut. Default: a document that is too long is refused."
    )
    instruction: str | None = pydantic.Field(
        None,
        min_length=1,
        description="What makes a document relevant, for generative rerankers without a template of their own.",
    )
    priority: int | None = hint("requests are served in the order in which they arrive")
    rank_fields: list[str] | None = unsupported("documents have one field, `text`")
    max_chunks_per_doc: int | None = unsupported("a document is scored as a whole; `max_tokens_per_doc` cuts it")
    truncation: bool | None = supports_only(False, reason="`max_tokens_per_doc` cuts documents")
    truncate: bool | None = supports_only(False, reason="`max_tokens_per_doc` cuts documents")
    raw_scores: bool | None = supports_only(False, reason="scores are from 0 to 1")
    return_embeddings: bool | None = supports_only(False, reason="rerankers have no embeddings")
