"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.server.schema.base import (
    JsonObject,
    NameField,
    OptionalModel,
    StrictModel,
    hint,
    supports_only,
    unsupported,
)
from afterglow.server.schema.sampling import SamplingFields

Effort: TypeAlias = Literal["low", "medium", "high", "xhigh", "max"]
NO_CITATIONS = "the model cites nothing; text is used as it is"


class CacheControl(StrictModel):
    """A breakpoint: the prompt up to here is likely to be sent again."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = pydantic.Field(
        "5m", description="Time for which the prefix is pinned, from its last use."
    )
    scope: Any = hint(
        "the prefix cache is always shared by all conversations of an API key", name="cache_control.scope"
    )


class CitationsConfig(StrictModel):
    enabled: bool | None = supports_only(False, reason=NO_CITATIONS)


# --- content blocks


class CacheableBlock(StrictModel):
    """Common fields of the blocks that can be a breakpoint."""

    cache_control: CacheControl | None = None


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: str
    citations: Any = hint(NO_CITATIONS, [], name="citations")


class Base64Image(StrictModel):
    type: Literal["base64"]
    media_type: str = pydantic.Field(pattern="^image/")
    data: str


class URLImage(StrictModel):
    type: Literal["url"]
    url: str = pydantic.Field(description="A data: URI, or an address or file that the server allows.")


class ImageBlock(CacheableBlock):
    type: Literal["image"]
    source: Annotated[Base64Image | URLImage, pydantic.Field(discriminator="type")]
    transformations: Any = hint("images are scaled as the model requires", name="transformations")


class PlainTextSource(StrictModel):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ContentSource(StrictModel):
    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, pydantic.Field(discriminator="type")]]


class DocumentBlock(CacheableBlock):
    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource, pydantic.Field(discriminator="type")] = pydantic.Field(
        description="Plain text or content blocks. PDF files are not read: send their text."
    )
    title: str | None = None
    context: str | None = None
    citations: CitationsConfig | None = None


class SearchResultBlock(CacheableBlock):
    type: Literal["search_result"]
    content: list[TextBlock]
    source: str
    title: str
    citations: CitationsConfig | None = None


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = pydantic.Field(description="As this server sent it.")


class RedactedThinkingBlock(StrictModel):
    type: Literal["redacted_thinking"]
    data: str = pydantic.Field(description="As this server sent it.")


class ToolUseBlock(CacheableBlock):
    type: Literal["tool_use"]
    id: str
    name: NameField
    input: JsonObject
    caller: Any = hint("every tool is called by the model itself", {"type": "direct"}, name="caller")
    toolset_name: Any = hint("there are no toolsets", name="toolset_name")


ResultBlock: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, pydantic.Field(discriminator="type")
]


class ToolResultBlock(CacheableBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    toolset_name: Any = hint("there are no toolsets", name="toolset_name")


InputBlock: TypeAlias = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    pydantic.Field(discriminator="type"),
]


class InputMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


# --- tools


class UserDefinedTool(CacheableBlock):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: NameField
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = pydantic.Field(None, description="The input always conforms to the schema.")
    eager_input_streaming: bool | None = pydantic.Field(None, description="Inputs are always streamed as generated.")
    input_examples: Any = hint("chat templates have no place for examples", [], name="tools.input_examples")
    defer_loading: bool | None = hint("every tool is part of the prompt", False, name="tools.defer_loading")
    allowed_callers: Any = hint("every tool is called by the model itself", ["direct"], name="tools.allowed_callers")


class AnthropicServerTool(StrictModel):
    """A tool that Anthropic defines or runs, such as `web_search_20250305`. It is dropped if other tools remain."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str
    name: NameField | None = None


def _get_tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind in (None, "custom") else "server"


AnthropicTool: TypeAlias = Annotated[
    Annotated[UserDefinedTool, pydantic.Tag("custom")] | Annotated[AnthropicServerTool, pydantic.Tag("server")],
    pydantic.Discriminator(_get_tool_kind),
]


class AutoChoice(StrictModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(StrictModel):
    type: Literal["tool"]
    name: NameField
    disable_parallel_tool_use: bool | None = None


class NoChoice(StrictModel):
    type: Literal["none"]


AnthropicToolChoice: TypeAlias = Annotated[AutoChoice | NamedChoice | NoChoice, pydantic.Field(discriminator="type")]


# --- requests


class ThinkingOptions(StrictModel):
    display: Literal["summarized", "omitted", "updates"] | None = pydantic.Field(
        None, description="omitted: the signature carries the thinking. Otherwise the whole thinking is returned."
    )
    block_binding: Any = hint("a signature is bound to the API key only", name="thinking.block_binding")


class ThinkingEnabled(ThinkingOptions):
    type: Literal["enabled"]
    budget_tokens: int = pydantic.Field(ge=1, le=2**31 - 1)


class ThinkingAdaptive(ThinkingOptions):
    type: Literal["adaptive"]


class ThinkingDisabled(StrictModel):
    type: Literal["disabled"]


ThinkingConfig: TypeAlias = Annotated[
    ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, pydantic.Field(discriminator="type")
]


class JsonOutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: JsonObject = pydantic.Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Effort | None = None
    format: JsonOutputFormat | None = None
    task_budget: Any = hint("the model does not see a budget", name="output_config.task_budget")


class MessagePromptFields(SamplingFields):
    """Fields that determine the prompt."""

    model: OptionalModel = None
    messages: list[InputMessage] = pydantic.Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = pydantic.Field(None, description="Default: as the chat template of the model.")
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = pydantic.Field(None, description="Old name of `output_config.format`.")
    cache_control: CacheControl | None = pydantic.Field(None, description="A breakpoint at the end of the messages.")

    context_management: Any = hint("the messages are used as they are sent", {"edits": []})
    mcp_servers: list[Any] | None = supports_only([], reason="the server connects to no other servers")
    speed: str | None = hint("there is a single speed", "standard")
    user_profile_id: Any = hint("there are no profiles")
    workspace_id: Any = hint("there are no workspaces")
    compaction: Any = unsupported('use `overflow: "compact"`')


class CountTokensRequest(MessagePromptFields):
    """A conversation whose prompt tokens are counted."""


class DiagnosticsOptions(StrictModel):
    """Asks why the prompt was not reused further."""

    previous_message_id: str | None = None


class MessageRequest(MessagePromptFields):
    """A conversation to continue."""

    max_tokens: int = pydantic.Field(
        ge=0, le=2**31 - 1, description="Maximum to generate, not a reservation; 0: only compute the prompt."
    )
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    diagnostics: DiagnosticsOptions | None = None

    metadata: Any = hint("there are no accounts to attribute requests to")
    service_tier: Literal["auto", "standard_only"] | None = pydantic.Field(
        None, description="Both values are the default: use `priority`."
    )
    inference_geo: Any = hint("the server runs where it runs")
    fallbacks: Any = hint("the requested model always responds", [])
    fallback_credit_token: Any = hint("nothing is billed")
    container: Any = unsupported("the server runs no code")
    thread: Any = unsupported("conversations are not stored: send all messages")
