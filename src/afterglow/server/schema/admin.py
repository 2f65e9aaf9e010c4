"""Bodies of the administration routes and their responses."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from afterglow.api.sampling_defaults import SamplingSource
from afterglow.server.openai.schema.chat import ChatFields, ChatMessage
from afterglow.server.schema.base import OptionalModel, StrictModel


class TokenizeRequest(StrictModel):
    model: OptionalModel = None
    content: str
    add_special: bool = pydantic.Field(False, description="Add the BOS and EOS tokens of the model.")
    parse_special: bool = pydantic.Field(False, description="Parse control tokens in the text.")
    with_pieces: bool = pydantic.Field(False, description="Also return the text of each token.")


class DetokenizeRequest(StrictModel):
    model: OptionalModel = None
    tokens: list[int]


class ApplyTemplateRequest(ChatFields):
    """A conversation to render with the chat template of the model."""


class ExplainRequest(ChatFields):
    """A conversation or a prompt to look up in the prefix cache."""

    messages: list[ChatMessage] | None = None  # type: ignore[assignment]
    prompt: str | list[int] | None = None


class PinRequest(ExplainRequest):
    """A conversation or a prompt to pin in the prefix cache, or to unpin."""


class ClearRequest(StrictModel):
    model: OptionalModel = None


class SamplingDefault(StrictModel):
    value: float
    source: SamplingSource


class ModelCard(StrictModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "afterglow"
    context_length: int | None = None
    loaded: bool
    capabilities: list[str]
    sampling: dict[str, SamplingDefault] | None = pydantic.Field(
        None, description="Sampling of requests that do not set it, and where each value comes from."
    )


class ModelList(StrictModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(StrictModel):
    tokens: list[Any] = pydantic.Field(
        description="Token numbers, or with `with_pieces` objects with `id` and `piece`."
    )


class DetokenizeResponse(StrictModel):
    content: str


class ApplyTemplateResponse(StrictModel):
    prompt: str
    tokens: int


class PinResponse(StrictModel):
    model: str
    tokens: int = pydantic.Field(description="Length of the prefix.")
    pinned: bool


class ClearResponse(StrictModel):
    model: str
    cleared: Literal[True] = True


class HealthResponse(StrictModel):
    status: Literal["ok", "starting", "shutting down"]
    models: dict[str, str]
