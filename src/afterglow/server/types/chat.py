"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.types.sampling import SamplingFields
from afterglow.server.wire import JsonObject, Label, Metadata, Name, Wire, only, refused

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ImageAddress(Wire):
    url: str = pydantic.Field(description="A data: URI; an address or a file where the server allows it.")
    detail: Literal["auto", "low", "high"] | None = pydantic.Field(
        None, description="low: no larger than 512 by 512 pixels."
    )


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: ImageAddress
    id: str | None = pydantic.Field(None, description="FNV-1a with 64 bits over the raw bytes, in hexadecimal.")


class SoundData(Wire):
    data: str = pydantic.Field(description="base64.")
    format: Literal["wav", "mp3"]


class SoundPart(Wire):
    type: Literal["input_audio"]
    input_audio: SoundData
    id: str | None = pydantic.Field(None, description="FNV-1a with 64 bits over the raw bytes, in hexadecimal.")


Content: TypeAlias = str | list[TextPart]
UserPart: TypeAlias = Annotated[TextPart | ImagePart | SoundPart, pydantic.Field(discriminator="type")]


class CalledFunction(Wire):
    name: Name
    arguments: str = pydantic.Field(description="JSON, as the model wrote it.")


class Called(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Wire):
    role: Literal["user"]
    content: str | list[UserPart]
    name: Name | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: Name | None = None
    tool_calls: list[Called] | None = None
    audio: Any = refused("the models here write text")
    function_call: Any = refused("use `tool_calls`")


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: Name | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, pydantic.Field(discriminator="role")
]


class FunctionDefinition(Wire):
    name: Name
    description: str | None = None
    parameters: JsonObject | None = pydantic.Field(None, description="A JSON schema of an object.")
    strict: bool | None = pydantic.Field(None, description="Arguments always fit their schema here.")


class Tool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Wire):
    name: Name


class NamedTool(Wire):
    type: Literal["function"]
    function: FunctionName


class Allowed(Wire):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Wire):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, pydantic.Field(discriminator="type")]
)


class TextFormat(Wire):
    type: Literal["text"]


class JsonFormat(Wire):
    type: Literal["json_object"]


class NamedSchema(Wire):
    name: Name
    description: str | None = None
    schema_: JsonObject = pydantic.Field(alias="schema")
    strict: bool | None = pydantic.Field(None, description="A schema is always enforced here.")


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Wire):
    type: Literal["regex"]
    pattern: str


class ChoiceFormat(Wire):
    type: Literal["choice"]
    choices: list[str]


class GrammarFormat(Wire):
    type: Literal["grammar"]
    grammar: str
    syntax: Literal["lark", "gbnf"] = "lark"


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonFormat | SchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat,
    pydantic.Field(discriminator="type"),
]


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = only(False, reason="nothing is hidden on the way here")


class CacheOptions(Wire):
    mode: str | None = only("implicit", reason="every prompt begins from what is in memory")
    ttl: Any = refused("what is computed is kept while there is room for it")


class ChatFields(SamplingFields):
    """What a conversation is: the part of the body that makes the prompt."""

    model: Name
    messages: list[Message] = pydantic.Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
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
    service_tier: str | None = only("auto", "default", reason="there is one way to be served")
    store: bool | None = only(False, reason="use /v1/responses")
    modalities: list[str] | None = only(["text"], reason="the models here write text")
    verbosity: str | None = only("medium", reason="say in a message how long the answer should be")
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = only("in_memory", reason="what is computed is kept while there is room for it")
    audio: Any = refused("the models here write text")
    function_call: Any = refused("use `tool_choice`")
    functions: Any = refused("use `tools`")
    moderation: Any = refused("no model judges what is said here")
    prediction: Any = refused("what the answer may be is guessed from the conversation")
    web_search_options: Any = refused("nothing here reaches the network")


def plain(value: Any) -> Any:
    """A part of a body as the dictionaries that the library reads."""
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, pydantic.BaseModel) else value


def message(value: Message) -> dict[str, Any]:
    """A message as the library reads it. Templates know `system`, which `developer` is the new name of."""
    written: dict[str, Any] = plain(value)
    if written["role"] == "developer":
        written["role"] = "system"
    if refusal := written.pop("refusal", None):
        written["content"] = written.get("content") or refusal
    return written
