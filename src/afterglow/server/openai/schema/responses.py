"""Body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.openai.schema.chat import PromptCacheOptions, ReasoningEffort
from afterglow.server.priority import ServiceTier
from afterglow.server.schema.base import (
    JsonObject,
    Label,
    MediaID,
    Metadata,
    NameField,
    OptionalModel,
    StrictModel,
    hint,
    supports_only,
    unsupported,
)
from afterglow.server.schema.sampling import SamplingFields

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
IncludeValue: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


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


class DirectCaller(StrictModel):
    type: Literal["direct"]


class CallFields(StrictModel):
    """Fields of a call and of its output."""

    call_id: str
    namespace: NameField | None = None
    id: str | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None
    async_: bool | None = supports_only(False, reason="calls are returned with the response", alias="async")


class FunctionCallItem(CallFields):
    type: Literal["function_call"]
    name: NameField
    arguments: str


class FunctionCallOutputItem(CallFields):
    type: Literal["function_call_output"]
    output: str | list[InputText | InputImage]
    name: NameField | None = None


class CustomToolCallItem(CallFields):
    type: Literal["custom_tool_call"]
    name: NameField
    input: str


class CustomToolCallOutputItem(CallFields):
    type: Literal["custom_tool_call_output"]
    output: str | list[InputText | InputImage]
    name: NameField | None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(StrictModel):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] = pydantic.Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = pydantic.Field(
        None, description="The reasoning, encrypted by this server. It takes precedence over `content` and `summary`."
    )
    status: ItemStatus | None = None


class ItemReference(StrictModel):
    type: Literal["item_reference"]
    id: str = pydantic.Field(description="An output item of a stored response.")


def _get_item_type(value: Any) -> str:
    """Return the type of an item. The default is `message`."""
    return str(value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message"))


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, pydantic.Tag("message")]
    | Annotated[FunctionCallItem, pydantic.Tag("function_call")]
    | Annotated[FunctionCallOutputItem, pydantic.Tag("function_call_output")]
    | Annotated[CustomToolCallItem, pydantic.Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, pydantic.Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, pydantic.Tag("reasoning")]
    | Annotated[ItemReference, pydantic.Tag("item_reference")],
    pydantic.Discriminator(_get_item_type),
]


class ToolFields(StrictModel):
    """Fields of tools that the client runs."""

    name: NameField
    description: str | None = None
    defer_loading: bool | None = hint("all tools are in the prompt", False, name="tools.defer_loading")
    allowed_callers: list[str] | None = supports_only(["direct"], reason="the server runs no programs")
    async_: bool | None = supports_only(False, reason="outputs are sent with the next request", alias="async")


class FunctionTool(ToolFields):
    type: Literal["function"]
    parameters: JsonObject | None = None
    strict: bool | None = None
    output_schema: JsonObject | None = hint("outputs are not parsed", name="tools.output_schema")


class FreeText(StrictModel):
    type: Literal["text"]


class GrammarText(StrictModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = pydantic.Field(description="The input always matches it.")


class CustomTool(ToolFields):
    type: Literal["custom"]
    format: Annotated[FreeText | GrammarText, pydantic.Field(discriminator="type")] | None = pydantic.Field(
        None, description="Default: any text."
    )


ClientTool: TypeAlias = Annotated[FunctionTool | CustomTool, pydantic.Field(discriminator="type")]


class NamespaceTool(StrictModel):
    type: Literal["namespace"]
    name: NameField
    description: str | None = None
    tools: list[ClientTool] = pydantic.Field(min_length=1)


class ServerTool(StrictModel):
    """A tool that OpenAI's servers run. It is dropped if other tools remain."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


ResponseTool: TypeAlias = Annotated[
    FunctionTool | CustomTool | NamespaceTool | ServerTool, pydantic.Field(discriminator="type")
]


class NamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: NameField
    namespace: NameField | None = None


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedTool | ServerTool, pydantic.Field(discriminator="type")]]


ResponseToolChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedTools | ServerTool, pydantic.Field(discriminator="type")]
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
    verbosity: Literal["low", "medium", "high"] | None = pydantic.Field(
        None, description="Honoured if the chat template reads the variable `verbosity`; otherwise a hint."
    )


class ReasoningSettings(StrictModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = pydantic.Field(
        None, description="Any value returns the unabridged reasoning as the summary, too."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = pydantic.Field(
        None, description="Deprecated name of `summary`."
    )
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
    tools: list[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = pydantic.Field(None, description="Default: true.")
    stream: bool | None = None
    stream_options: StreamSettings | None = None
    return_progress: bool | None = pydantic.Field(
        None, description="Stream `response.in_progress` with `prompt_progress` during prefill (llama-server)."
    )
    timings_per_token: bool | None = pydantic.Field(
        None, description="Stream `timings` with the events of the output and the last one (llama-server)."
    )
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    include: list[IncludeValue] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    replay: bool | None = pydantic.Field(
        None, description="Use the sampled tokens of the model's earlier messages. Default: true."
    )

    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    metadata: Metadata | None = None
    client_metadata: JsonObject | None = hint("labels of the client")
    service_tier: ServiceTier = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = pydantic.Field(
        None, description="24h: the prompt is pinned in the prefix cache for 24 hours after its last use."
    )
    background: bool | None = supports_only(False, reason="responses are generated while the client waits")
    access_programs: Any = unsupported("there are no access programs")
    context_management: Any = unsupported('use `truncation`, or `overflow: "compact"`')
    conversation: Any = unsupported("use `previous_response_id`")
    image: Any = unsupported("send images as `input_image`")
    max_tool_calls: int | None = hint("the server runs no tools")
    moderation: Any = unsupported("there is no moderation model")
    prompt: Any = unsupported("prompts are not stored")
