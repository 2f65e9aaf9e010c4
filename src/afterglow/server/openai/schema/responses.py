"""Body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.openai.schema.chat import PromptCacheOptions, ReasoningEffort
from afterglow.server.schema.base import (
    JsonObject,
    Label,
    MediaID,
    Metadata,
    NameField,
    OptionalModel,
    StrictModel,
    supports_only,
    unsupported,
)
from afterglow.server.schema.sampling import SamplingFields

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictModel):
    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    type: Literal["output_text"]
    text: str
    annotations: list[JsonObject] = pydantic.Field(default_factory=list)
    logprobs: list[JsonObject] | None = None


class RefusalText(StrictModel):
    type: Literal["refusal"]
    refusal: str


class InputImage(StrictModel):
    type: Literal["input_image"]
    image_url: str | None = pydantic.Field(None, description="A data: URI, or an address that the server allows.")
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: Any = unsupported("files are not stored; use `image_url`")
    id: MediaID = None


MessagePart: TypeAlias = Annotated[
    InputText | OutputText | RefusalText | InputImage, pydantic.Field(discriminator="type")
]


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[MessagePart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    type: Literal["function_call"]
    call_id: str
    name: NameField
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: ItemStatus | None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[JsonObject] = pydantic.Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: Any = unsupported("reasoning is returned in `content`")
    status: ItemStatus | None = None


def _get_item_type(value: Any) -> str:
    """Return the type of an item. The default is `message`."""
    return str(value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message"))


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, pydantic.Tag("message")]
    | Annotated[FunctionCallItem, pydantic.Tag("function_call")]
    | Annotated[FunctionCallOutputItem, pydantic.Tag("function_call_output")]
    | Annotated[ReasoningItem, pydantic.Tag("reasoning")],
    pydantic.Discriminator(_get_item_type),
]


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: NameField
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: NameField


class AllowedFunctions(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


FunctionChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunction | AllowedFunctions, pydantic.Field(discriminator="type")]
)


class PlainFormat(StrictModel):
    type: Literal["text", "json_object"]


class FlatSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    name: NameField
    schema_: JsonObject = pydantic.Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(StrictModel):
    format: Annotated[PlainFormat | FlatSchemaFormat, pydantic.Field(discriminator="type")] | None = None
    verbosity: str | None = supports_only("medium", reason="request the length in the input")


class ReasoningSettings(StrictModel):
    effort: ReasoningEffort | None = None
    summary: Any = unsupported("reasoning is returned unabridged in `content`")
    generate_summary: Any = unsupported("reasoning is returned unabridged in `content`")
    context: str | None = supports_only("auto", reason="the chat template decides")
    mode: str | None = supports_only("standard", reason="there is a single reasoning mode")


class StreamSettings(StrictModel):
    include_obfuscation: bool | None = supports_only(False, reason="streams are not obfuscated")


class ResponseRequest(SamplingFields):
    """Input to respond to, optionally after a previous response."""

    model: OptionalModel = None
    input: str | list[InputItem] = pydantic.Field(description="Text, or items of a conversation.")
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1, le=2**31 - 1)
    tools: list[FunctionTool] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = pydantic.Field(None, description="Default: true.")
    stream: bool | None = None
    stream_options: StreamSettings | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    replay: bool | None = pydantic.Field(
        None, description="Use the sampled tokens of the model's earlier messages. Default: true."
    )

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    metadata: Metadata | None = None
    service_tier: str | None = supports_only("auto", "default", reason="there is a single service tier")
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = supports_only(
        "in_memory", reason="entries are evicted only when space is needed"
    )
    background: bool | None = supports_only(False, reason="responses are generated while the client waits")
    access_programs: Any = unsupported("there are no access programs")
    context_management: Any = unsupported("use `truncation`")
    conversation: Any = unsupported("use `previous_response_id`")
    image: Any = unsupported("send images as `input_image`")
    max_tool_calls: Any = unsupported("the server does not call tools; calls are returned to the client")
    moderation: Any = unsupported("there is no moderation model")
    prompt: Any = unsupported("prompts are not stored")
