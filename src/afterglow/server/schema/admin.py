"""The bodies of the smaller routes, and what they answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.schema.base import Label, NameField, StrictModel
from afterglow.server.schema.chat import ChatFields, ChatMessage

EmbeddingInput: TypeAlias = str | list[str] | list[int] | list[list[int]]
OptionalModel: TypeAlias = Annotated[
    NameField | None, pydantic.Field(description="Absent: the only one that is served.")
]


class EmbeddingRequest(StrictModel):
    """Texts to be turned into vectors."""

    model: NameField
    input: EmbeddingInput = pydantic.Field(description="Text or tokens, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = pydantic.Field(None, ge=1, description="Only what the model has.")
    user: Label = None


class TokenizeRequest(StrictModel):
    model: OptionalModel = None
    content: str
    add_special: bool = pydantic.Field(False, description="Begin (and end) as the model's prompts do.")
    parse_special: bool = pydantic.Field(False, description="Control tokens written in the text are control tokens.")
    with_pieces: bool = pydantic.Field(False, description="Give the text of each token, too.")


class DetokenizeRequest(StrictModel):
    model: OptionalModel = None
    tokens: list[int]


class ApplyTemplateRequest(ChatFields):
    """A conversation to be shown as the model's own template writes it."""


class ExplainRequest(ChatFields):
    """A conversation or a prompt, about which the memory is asked."""

    messages: list[ChatMessage] | None = None  # type: ignore[assignment]
    prompt: str | list[int] | None = None


class ModelCard(StrictModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "afterglow"
    context_length: int | None = None
    loaded: bool
    capabilities: list[str]


class ModelList(StrictModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(StrictModel):
    tokens: list[Any] = pydantic.Field(description="Numbers; with pieces, objects with `id` and `piece`.")


class DetokenizeResponse(StrictModel):
    content: str


class ApplyTemplateResponse(StrictModel):
    prompt: str
    tokens: int


class HealthResponse(StrictModel):
    status: Literal["ok", "starting", "shutting down"]
    models: dict[str, str]
