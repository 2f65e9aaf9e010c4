"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.types.chat import CacheOptions, Effort
from afterglow.server.types.sampling import SamplingFields
from afterglow.server.wire import JsonObject, Label, Metadata, Name, Wire, only, refused

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(Wire):
    type: Literal["input_text"]
    text: str


class OutputText(Wire):
    type: Literal["output_text"]
    text: str
    annotations: list[JsonObject] = pydantic.Field(default_factory=list)
    logprobs: list[JsonObject] | None = None


class RefusalText(Wire):
    type: Literal["refusal"]
    refusal: str


class InputImage(Wire):
    type: Literal["input_image"]
    image_url: str | None = pydantic.Field(None, description="A data: URI; an address where the server allows it.")
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: Any = refused("no files are kept here: use `image_url`")
    id: str | None = pydantic.Field(None, description="FNV-1a with 64 bits over the raw bytes, in hexadecimal.")


MessagePart: TypeAlias = Annotated[
    InputText | OutputText | RefusalText | InputImage, pydantic.Field(discriminator="type")
]


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[MessagePart]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Wire):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Wire):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[JsonObject] = pydantic.Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: Any = refused("thoughts are given in `content`")
    status: Status | None = None


def _kind(value: Any) -> str:
    """A message needs no type."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return str(kind)


Item: TypeAlias = Annotated[
    Annotated[MessageItem, pydantic.Tag("message")]
    | Annotated[CallItem, pydantic.Tag("function_call")]
    | Annotated[CallOutputItem, pydantic.Tag("function_call_output")]
    | Annotated[ReasoningItem, pydantic.Tag("reasoning")],
    pydantic.Discriminator(_kind),
]


class FunctionTool(Wire):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(Wire):
    type: Literal["function"]
    name: Name


class AllowedFunctions(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


FunctionChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunction | AllowedFunctions, pydantic.Field(discriminator="type")]
)


class PlainFormat(Wire):
    type: Literal["text", "json_object"]


class FlatSchemaFormat(Wire):
    type: Literal["json_schema"]
    name: Name
    schema_: JsonObject = pydantic.Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(Wire):
    format: Annotated[PlainFormat | FlatSchemaFormat, pydantic.Field(discriminator="type")] | None = None
    verbosity: str | None = only("medium", reason="say in the input how long the answer should be")


class ReasoningSettings(Wire):
    effort: Effort | None = None
    summary: Any = refused("thoughts are given as they are, in `content`")
    generate_summary: Any = refused("thoughts are given as they are, in `content`")
    context: str | None = only("auto", reason="the model's template decides")
    mode: str | None = only("standard", reason="there is one way to think")


class StreamSettings(Wire):
    include_obfuscation: bool | None = only(False, reason="nothing is hidden on the way here")


class ResponseRequest(SamplingFields):
    """What is to be answered, after what was said before."""

    model: Name
    input: str | list[Item] = pydantic.Field(description="A text, or items of a conversation.")
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1, le=2**31 - 1)
    tools: list[FunctionTool] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = pydantic.Field(None, description="Absent: true.")
    stream: bool | None = None
    stream_options: StreamSettings | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    metadata: Metadata | None = None
    service_tier: str | None = only("auto", "default", reason="there is one way to be served")
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = only("in_memory", reason="what is computed is kept while there is room for it")
    background: bool | None = only(False, reason="answers are given to whoever waits for them")
    access_programs: Any = refused("there are none here")
    context_management: Any = refused("use `truncation`")
    conversation: Any = refused("use `previous_response_id`")
    image: Any = refused("the models here read text")
    max_tool_calls: Any = refused("no tools are called here; calls are given to you")
    moderation: Any = refused("no model judges what is said here")
    prompt: Any = refused("no prompts are kept here")
