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
    dimensions: int | None = pydantic.Field(
        None,
        ge=1,
        description="Length of the vectors: that of the model, or less if it was trained for it (Matryoshka), as its "
        "name or the option `shorten_embeddings` says.",
    )
    long_text: Literal["refuse", "window"] | None = pydantic.Field(
        None,
        description="An input that is too long: refused (default), or the mean of windows, weighted by their tokens. "
        "`windows` of the response has their number.",
    )
    user: Label = None
