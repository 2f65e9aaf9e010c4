"""Conversion of Anthropic bodies to messages, breakpoints, tools and prompt options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from afterglow.api.options import PromptOptions
from afterglow.chat.content import Attachment, join_content
from afterglow.chat.messages import Message, ToolCall, locate_attachments
from afterglow.chat.prompt import Breakpoint
from afterglow.chat.tools.tool import Tool, build_tool
from afterglow.server.anthropic.schema import (
    AutoChoice,
    Base64Image,
    CacheControl,
    DocumentBlock,
    ImageBlock,
    InputBlock,
    InputMessage,
    MessagePromptFields,
    NamedChoice,
    PlainTextSource,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
    URLImage,
    UserDefinedTool,
)
from afterglow.server.errors import APIError, invalid_request_error, report_hint
from afterglow.server.logs import get_record
from afterglow.server.sealing import get_sealer

Content: TypeAlias = str | Attachment
ContentBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
MAX_BREAKPOINTS = 4  # of a request, as in Anthropic's API
NO_REASONING = "the model does not reason"
TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class ConvertedBlock:
    """A content block as one piece of a message."""

    content: Content
    cache_control: CacheControl | None = None


@dataclass(slots=True)
class ConversationBuilder:
    """Messages and breakpoints of a body."""

    messages: list[Message] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)

    def add_message(self, message: Message, cache_control: CacheControl | None = None) -> None:
        """Add a message, and a breakpoint at its end if it has `cache_control`."""
        self.messages.append(message)
        self.add_breakpoint(cache_control)

    def add_parts(self, role: str, parts: Sequence[ConvertedBlock], tool_call_id: str | None = None) -> None:
        """Add a message of several parts, with a breakpoint after each part that has `cache_control`."""
        text, attachments = "", list[Attachment]()
        index = len(self.messages)
        for number, part in enumerate(parts):
            if isinstance(part.content, str):
                follows_text = number > 0 and isinstance(parts[number - 1].content, str)
                text += "\n" if follows_text and needs_newline(text, part.content) else ""
                text += part.content
            else:
                attachments += join_content([text, part.content])[1]
            if number < len(parts) - 1:
                self.add_breakpoint(part.cache_control, message=index, offset=len(text), attachments=len(attachments))
        message = Message(role=role, content=text, attachments=tuple(attachments), tool_call_id=tool_call_id)
        self.add_message(message, parts[-1].cache_control if parts else None)

    def add_breakpoint(self, cache_control: CacheControl | None, **position: int | None) -> None:
        """Add a breakpoint, by default at the end of the last message."""
        if cache_control is not None:
            position = position or {"message": len(self.messages) - 1}
            retention_seconds = TTL_SECONDS[cache_control.ttl]
            self.breakpoints.append(Breakpoint(retention_seconds=retention_seconds, **position))  # type: ignore[arg-type]


def needs_newline(left: str, right: str) -> bool:
    """Return whether two text blocks need a newline between them: they are paragraphs, not pieces of one text."""
    return bool(left) and bool(right) and not left.endswith("\n") and not right.startswith("\n")


def convert_conversation(body: MessagePromptFields, salt: str) -> ConversationBuilder:
    """Convert the system prompt and the messages."""
    conversation = ConversationBuilder()
    own_tools = (tool for tool in body.tools or () if isinstance(tool, UserDefinedTool))
    for count, tool in enumerate(own_tools, 1):
        conversation.add_breakpoint(tool.cache_control, tools=count)
    if body.system:
        blocks = [ConvertedBlock(body.system)] if isinstance(body.system, str) else list(convert_blocks(body.system))
        conversation.add_parts("system", blocks)
    for index, message in enumerate(body.messages):
        start = len(conversation.messages)
        add_message(conversation, message, f"messages[{index}]", salt)
        conversation.messages[start:] = [
            locate_attachments(converted, f"messages[{index}].content") for converted in conversation.messages[start:]
        ]
    conversation.add_breakpoint(body.cache_control)
    if len(conversation.breakpoints) > MAX_BREAKPOINTS:
        message_text = f"a request has at most {MAX_BREAKPOINTS} blocks with `cache_control`"
        raise invalid_request_error("cache_control", f"{message_text}, not {len(conversation.breakpoints)}")
    return conversation


def add_message(conversation: ConversationBuilder, message: InputMessage, where: str, salt: str) -> None:
    """Convert one message. Tool results become messages of their own, in order, with other blocks between them."""
    if isinstance(message.content, str):
        conversation.add_message(Message(role=message.role, content=message.content))
        return
    if message.role == "assistant":
        converted = convert_assistant_blocks(message.content, where, salt)
        controls = [getattr(block, "cache_control", None) for block in message.content]
        conversation.add_message(converted, next(filter(None, reversed(controls)), None))
        return
    parts: list[ConvertedBlock] = []
    for index, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            if parts:
                conversation.add_parts(message.role, parts)
                parts = []
            add_tool_result(conversation, block)
        elif isinstance(block, ThinkingBlock | RedactedThinkingBlock | ToolUseBlock):
            raise build_role_error(f"{where}.content[{index}]", block.type, message.role)
        else:
            parts += convert_blocks([block])
    if parts or not message.content:
        conversation.add_parts(message.role, parts)


def convert_assistant_blocks(blocks: Sequence[InputBlock], where: str, salt: str) -> Message:
    """Convert the blocks of an assistant message. Texts are joined as they were generated."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock() | RedactedThinkingBlock():
                reasoning.append(unseal_thinking(block, f"{where}.content[{index}]", salt))
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            case _:
                raise build_role_error(f"{where}.content[{index}]", block.type, "assistant")
    return Message(
        role="assistant", content="".join(texts), reasoning="".join(reasoning) or None, tool_calls=tuple(calls)
    )


def build_role_error(where: str, block_type: str, role: str) -> APIError:
    """Return the error for a block in a message of the wrong role."""
    return invalid_request_error(where, f"`{where}`: a {block_type} block cannot be in a message of the {role}")


def unseal_thinking(block: ThinkingBlock | RedactedThinkingBlock, where: str, salt: str) -> str:
    """Return the reasoning of a block that this server sent; raise status 400 for any other."""
    sealer = get_sealer()
    if isinstance(block, RedactedThinkingBlock):
        text, name = sealer.decrypt(block.data, salt), "data"
    elif block.thinking:
        text, name = (block.thinking if sealer.verify(block.signature, block.thinking, salt) else None), "signature"
    else:  # with `display: omitted`, the signature carries the text
        text, name = sealer.decrypt(block.signature, salt), "signature"
    if text is None:
        raise invalid_request_error(
            f"{where}.{name}",
            f"`{where}`: Invalid `{name}` in `{block.type}` block: this server did not generate it for this API key. "
            "Send the block as it was received, or leave it out",
        )
    return text


def add_tool_result(conversation: ConversationBuilder, block: ToolResultBlock) -> None:
    """Convert a tool result. Templates have no field for errors, so that the text says it."""
    if isinstance(block.content, list):
        parts = [ConvertedBlock(part.content) for part in convert_blocks(block.content)]
        nested = [part.cache_control for part in block.content if part.cache_control is not None]
    else:
        parts, nested = [ConvertedBlock(block.content or "")], []
    first = parts[0].content if parts else ""
    if block.is_error and not (isinstance(first, str) and "error" in first[:40].lower()):
        parts.insert(0, ConvertedBlock("Error:"))
    control = block.cache_control or (nested[-1] if nested else None)
    if parts:
        parts[-1] = ConvertedBlock(parts[-1].content, control)
    conversation.add_parts("tool", parts, block.tool_use_id)


def convert_blocks(blocks: Sequence[ContentBlock]) -> Iterator[ConvertedBlock]:
    """Convert blocks to parts. A breakpoint is after the last part of its block."""
    for block in blocks:
        *first, last = list(convert_block(block)) or [""]
        yield from map(ConvertedBlock, first)
        yield ConvertedBlock(last, block.cache_control)


def convert_block(block: ContentBlock) -> Iterator[Content]:
    """Convert a block of text, an image or a document to texts and attachments."""
    match block:
        case TextBlock():
            yield block.text
        case ImageBlock():
            yield Attachment(kind="image", source=get_image_url(block.source))
        case SearchResultBlock():
            yield "\n".join([block.title, block.source, *(text.text for text in block.content)])
        case DocumentBlock():
            yield from [line for line in (block.title, block.context) if line]
            if isinstance(block.source, PlainTextSource):
                yield block.source.data
            elif isinstance(block.source.content, str):
                yield block.source.content
            else:
                for part in block.source.content:
                    yield from convert_block(part)


def get_image_url(source: Base64Image | URLImage) -> str:
    """Return the address of an image, a data URI if it is inline."""
    return source.url if isinstance(source, URLImage) else f"data:{source.media_type};base64,{source.data}"


# --- tools and options


def convert_tools(body: MessagePromptFields) -> list[Tool]:
    """Convert the tools. Those that Anthropic defines are dropped and reported, unless there are no others."""
    tools, dropped = list[Tool](), list[str]()
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, UserDefinedTool):
            where = f"tools[{index}]"
            tools.append(build_tool(tool.name, tool.description, tool.input_schema, tool.strict, where=where))
        else:
            dropped.append(tool.type)
    record = get_record()
    if dropped and (not tools or record.refuses_hints):
        message = (
            f"the server has no tool of type {dropped[0]!r}, and models are not trained for it: define a tool with "
        )
        raise invalid_request_error("tools", message + "an `input_schema`", "unsupported_parameter")
    for tool_type in dropped:
        record.add_ignored(f"tools.{tool_type[:64]}")
    return tools


def build_prompt_options(body: MessagePromptFields, tools: Sequence[Tool], *, can_reason: bool) -> PromptOptions:
    """Build the keyword arguments of `Model.plan_chat`, except `tools`."""
    choice = body.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not tools:
        raise invalid_request_error("tool_choice", "the request has no `tools`")
    parallel = not (isinstance(choice, AutoChoice | NamedChoice) and choice.disable_parallel_tool_use)
    config_format = None if body.output_config is None else body.output_config.format
    output_format = config_format or body.output_format
    if body.output_format not in (None, output_format):
        message = "`output_format` is another name of `output_config.format`: set one of them"
        raise invalid_request_error("output_format", message)
    response_format = None
    if output_format is not None:
        response_format = {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.schema_}}
    return {
        "tool_choice": convert_tool_choice(body) if tools else None,
        "parallel_tool_calls": parallel,
        "response_format": response_format,
        "reasoning": choose_reasoning(body, can_reason=can_reason),
    }


def convert_tool_choice(body: MessagePromptFields) -> Any:
    """Convert the tool choice to that of chat completions."""
    match body.tool_choice:
        case None:
            return None
        case NamedChoice(name=name):
            return {"type": "function", "function": {"name": name}}
        case choice:
            return "required" if choice.type == "any" else choice.type


def choose_reasoning(body: MessagePromptFields, *, can_reason: bool) -> bool | int | str | None:
    """Return the option `reasoning`.

    An effort has no effect beside a budget or if thinking is disabled. On a model without reasoning, neither has one.
    """
    thinking = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and (not can_reason or isinstance(thinking, ThinkingEnabled | ThinkingDisabled)):
        reason = "thinking is disabled or has a budget" if can_reason else NO_REASONING
        report_hint("output_config.effort", reason)
    if not can_reason:
        if thinking is not None and not isinstance(thinking, ThinkingDisabled):
            report_hint("thinking", NO_REASONING)
        return None
    match thinking:
        case ThinkingDisabled():
            return False
        case ThinkingEnabled():
            return thinking.budget_tokens
        case ThinkingAdaptive():
            return effort or True
    return effort


def omits_thinking(body: MessagePromptFields) -> bool:
    """Return whether thinking is only returned encrypted. A summary is the whole thinking, which is reported."""
    thinking = body.thinking
    if not isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) or thinking.display is None:
        return False
    if thinking.display != "omitted":
        report_hint("thinking.display", "the whole thinking is returned")
    return thinking.display == "omitted"
