"""Body of /v1/embeddings."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pydantic

from afterglow.server.schema.base import Label, OptionalModel, StrictModel

EmbeddingInput: TypeAlias = str | list[str] | list[int] | list[list[int]]


class EmbeddingRequest(StrictModel):
    """Inputs to embed."""

    model: OptionalModel = None
    input: EmbeddingInput = pydantic.Field(description="Text or tokens, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = pydantic.Field(None, ge=1, description="Only the embedding width of the model.")
    user: Label = None
