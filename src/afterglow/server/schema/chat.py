"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.schema.base import JsonObject, Label, Metadata, NameField, StrictModel, supports_only, unsupported
from afterglow.server.schema.sampling import SamplingFields

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ImageURL(StrictModel):
    url: str = pydantic.Field(description="A data: URI; an address or a file where the server allows it.")
    detail: Literal["auto", "low", "high"] | None = pydantic.Field(
        None, description="low: no larger than 512 by 512 pixels."
    )


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageURL
    id: str | None = pydantic.Field(None, description="FNV-1a with 64 bits over the raw bytes, in hexadecimal.")


class InputAudio(StrictModel):
    data: str = pydantic.Field(description="base64.")
    format: Literal["wav", "mp3"]


class AudioPart(StrictModel):
    type: Literal["input_audio"]
    input_audio: InputAudio
    id: str | None = pydantic.Field(None, description="FNV-1a with 64 bits over the raw bytes, in hexadecimal.")


TextContent: TypeAlias = str | list[TextPart]
UserPart: TypeAlias = Annotated[TextPart | ImagePart | AudioPart, pydantic.Field(discriminator="type")]


class ToolCallFunction(StrictModel):
    name: NameField
    arguments: str = pydantic.Field(description="JSON, as the model wrote it.")


class MessageToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class SystemMessage(StrictModel):
    role: Literal["system", "developer"]
    content: TextContent
    name: NameField | None = None


class UserMessage(StrictModel):
    role: Literal["user"]
    content: str | list[UserPart]
    name: NameField | None = None


class AssistantMessage(StrictModel):
    role: Literal["assistant"]
    content: TextContent | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: NameField | None = None
    tool_calls: list[MessageToolCall] | None = None
    audio: Any = unsupported("the models here write text")
    function_call: Any = unsupported("use `tool_calls`")


class ToolMessage(StrictModel):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: str
    name: NameField | None = None


ChatMessage: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, pydantic.Field(discriminator="role")
]


class FunctionDefinition(StrictModel):
    name: NameField
    description: str | None = None
    parameters: JsonObject | None = pydantic.Field(None, description="A JSON schema of an object.")
    strict: bool | None = pydantic.Field(None, description="Arguments always fit their schema here.")


class ChatTool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    name: NameField


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class AllowedToolList(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, pydantic.Field(discriminator="type")]
)


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class NamedSchema(StrictModel):
    name: NameField
    description: str | None = None
    schema_: JsonObject = pydantic.Field(alias="schema")
    strict: bool | None = pydantic.Field(None, description="A schema is always enforced here.")


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(StrictModel):
    type: Literal["regex"]
    pattern: str


class ChoiceFormat(StrictModel):
    type: Literal["choice"]
    choices: list[str]


class GrammarFormat(StrictModel):
    type: Literal["grammar"]
    grammar: str
    syntax: Literal["lark", "gbnf"] = "lark"


ResponseFormatField: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat,
    pydantic.Field(discriminator="type"),
]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = supports_only(False, reason="nothing is hidden on the way here")


class PromptCacheOptions(StrictModel):
    mode: str | None = supports_only("implicit", reason="every prompt begins from what is in memory")
    ttl: Any = unsupported("what is computed is kept while there is room for it")


class ChatFields(SamplingFields):
    """What a conversation is: the part of the body that makes the prompt."""

    model: NameField
    messages: list[ChatMessage] = pydantic.Field(min_length=1)
    tools: list[ChatTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatField | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning_budget: int | None = pydantic.Field(None, ge=0, le=2**31 - 1, description="Tokens to think in.")
    chat_template_kwargs: JsonObject | None = pydantic.Field(None, description="For the model's chat template.")


class ChatRequest(ChatFields):
    """A conversation to be answered."""

    max_tokens: int | None = pydantic.Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1, le=2**31 - 1)
    n: int | None = pydantic.Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    metadata: Metadata | None = None
    service_tier: str | None = supports_only("auto", "default", reason="there is one way to be served")
    store: bool | None = supports_only(False, reason="use /v1/responses")
    modalities: list[str] | None = supports_only(["text"], reason="the models here write text")
    verbosity: str | None = supports_only("medium", reason="say in a message how long the answer should be")
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = supports_only(
        "in_memory", reason="what is computed is kept while there is room for it"
    )
    audio: Any = unsupported("the models here write text")
    function_call: Any = unsupported("use `tool_choice`")
    functions: Any = unsupported("use `tools`")
    moderation: Any = unsupported("no model judges what is said here")
    prediction: Any = unsupported("what the answer may be is guessed from the conversation")
    web_search_options: Any = unsupported("nothing here reaches the network")


def dump_fields(value: Any) -> Any:
    """A part of a body as the dictionaries that the library reads."""
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, pydantic.BaseModel) else value


def dump_message(value: ChatMessage) -> dict[str, Any]:
    """A message as the library reads it. Templates know `system`, which `developer` is the new name of."""
    written: dict[str, Any] = dump_fields(value)
    if written["role"] == "developer":
        written["role"] = "system"
    if refusal := written.pop("refusal", None):
        written["content"] = written.get("content") or refusal
    return written
