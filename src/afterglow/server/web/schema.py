"""Bodies of the conversation routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.openai.schema.chat import AnyTool, ChatMessage, dump_fields
from afterglow.server.schema.base import NameField, StrictModel
from afterglow.server.schema.sampling import SamplingFields

EXPORT_FORMAT: Literal["afterglow-conversations"] = "afterglow-conversations"
EXPORT_VERSION: Literal[1] = 1
Title: TypeAlias = Annotated[str, pydantic.Field(max_length=200)]
MessageID: TypeAlias = Annotated[str, pydantic.Field(pattern="^[0-9A-Za-z_-]{1,64}$")]


class ConversationSampling(SamplingFields):
    """Sampling of the responses of a conversation. Absent fields have the defaults of the model."""

    max_tokens: int | None = pydantic.Field(None, ge=-1, le=2**31 - 1)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ConversationSettings(StrictModel):
    """What the page sends with every request of a conversation."""

    model: NameField | None = None
    system: str | None = pydantic.Field(None, description="System prompt.")
    sampling: ConversationSampling | None = None
    tools: list[AnyTool] | None = pydantic.Field(None, description="Functions that the model may call.")


class AttachedFile(StrictModel):
    """Name of a file that became a content part of the message."""

    name: str = pydantic.Field(max_length=512)
    part: int = pydantic.Field(ge=0, le=4096, description="Index of the content part.")


class MessageInfo(StrictModel):
    """What the page shows about a message."""

    model: NameField | None = None
    state: Literal["partial", "complete", "stopped", "failed"] | None = None
    request: str | None = pydantic.Field(None, max_length=128, description="Id of the request, of `GET /requests`.")
    finish_reason: str | None = pydantic.Field(None, max_length=64)
    error: str | None = pydantic.Field(None, max_length=4096)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    files: list[AttachedFile] | None = None


class CreateConversation(StrictModel):
    title: Title = ""
    settings: ConversationSettings = ConversationSettings.model_validate({})


class ChangeConversation(StrictModel):
    """Values to change; absent ones stay."""

    title: Title | None = None
    leaf: MessageID | None = pydantic.Field(None, description="Message at the end of the path that is shown.")
    settings: ConversationSettings | None = None


class PutMessage(StrictModel):
    parent: MessageID | None = None
    message: ChatMessage
    info: MessageInfo = MessageInfo.model_validate({})


class ImportedMessage(PutMessage):
    id: MessageID
    created: float | None = None


class ImportedConversation(StrictModel):
    """A conversation as `GET /conversations/{id}` returns it."""

    id: str | None = pydantic.Field(None, description="An imported conversation gets a new id.")
    title: Title = ""
    leaf: MessageID | None = None
    settings: ConversationSettings = ConversationSettings.model_validate({})
    created: float | None = pydantic.Field(None, description="Unix time; default: now.")
    updated: float | None = None
    messages: list[ImportedMessage]


class ImportConversations(StrictModel):
    """An export. Either all conversations are imported or none."""

    format: Literal["afterglow-conversations"] = EXPORT_FORMAT
    version: Literal[1] = EXPORT_VERSION
    conversations: list[ImportedConversation] = pydantic.Field(min_length=1)


def dump_body(body: StrictModel) -> dict[str, Any]:
    """Convert a part of a body to a dictionary without absent fields."""
    fields: dict[str, Any] = dump_fields(body)
    return fields
