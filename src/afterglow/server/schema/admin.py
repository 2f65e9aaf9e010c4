"""Bodies of the administration routes and their responses."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import pydantic

from afterglow.api.sampling_defaults import SamplingSource
from afterglow.server.models import UNLOAD_TIMEOUT_SECONDS, SlotState
from afterglow.server.openai.schema.chat import ChatFields, ChatMessage
from afterglow.server.schema.base import OptionalModel, StrictModel
from afterglow.server.settings import KeepAlive

LoadStatus: TypeAlias = Literal["loaded", "loading", "unloaded"]


class TokenizeRequest(StrictModel):
    model: OptionalModel = None
    content: str | list[int | str] = pydantic.Field("", description="A text, or a list of texts and tokens.")
    add_special: bool = pydantic.Field(False, description="Add the BOS and EOS tokens of the model.")
    parse_special: bool = pydantic.Field(True, description="Parse control tokens in the text.")
    with_pieces: bool = pydantic.Field(False, description="Also return the text of each token.")


class DetokenizeRequest(StrictModel):
    model: OptionalModel = None
    tokens: list[int] = pydantic.Field(default_factory=list)


class ApplyTemplateRequest(ChatFields):
    """A conversation to render with the chat template of the model."""

    add_generation_prompt: bool | None = pydantic.Field(
        None, description="False: the prompt ends with the last message, without the start of an answer."
    )


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
    source: SamplingSource | Literal["created model"]


class LoadModelRequest(StrictModel):
    model: OptionalModel = None
    keep_alive: KeepAlive | None = pydantic.Field(
        None,
        description="Seconds without a request after which the model is unloaded, or a duration such as `5m`; "
        "negative: never. Unset: as in the settings.",
    )


class UnloadModelRequest(StrictModel):
    model: OptionalModel = None
    timeout: float = pydantic.Field(
        UNLOAD_TIMEOUT_SECONDS, ge=0, le=3600, description="Seconds to wait for running requests; then status 409."
    )


class ModelStatus(StrictModel):
    value: LoadStatus


class ModelMeta(StrictModel):
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int = pydantic.Field(description="Bytes of the weights.")


class ModelCard(StrictModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    parent: str | None = pydantic.Field(None, description="Of a LoRA adapter: the model that it belongs to.")
    owned_by: str = "afterglow"
    context_length: int | None = None
    loaded: bool
    state: SlotState
    status: ModelStatus = pydantic.Field(description="The state in the words of llama-server.")
    meta: ModelMeta | None = pydantic.Field(None, description="Facts about the model file, once it was loaded.")
    bytes: dict[str, int] = pydantic.Field(description="Estimated memory of the loaded model, by device.")
    pinned: bool = pydantic.Field(description="Whether the model is never unloaded.")
    active_requests: int
    last_used: float | None = pydantic.Field(None, description="Unix time of the end of the last request, or the load.")
    expires_at: float | None = pydantic.Field(None, description="Unix time of the unload if there is no request.")
    capabilities: list[str]
    sampling: dict[str, SamplingDefault] | None = pydantic.Field(
        None, description="Sampling of requests that do not set it, and where each value comes from."
    )


class ChangedModelCard(ModelCard):
    """A model after it was loaded or unloaded."""

    success: Literal[True] = True


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
    models: dict[str, SlotState]
