"""Messages of a conversation: what callers write, checked, and what templates read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from afterglow.chat.content import Attachment as Attachment
from afterglow.chat.content import check_text, parse_content, to_openai_content
from afterglow.chat.template.capabilities import TemplateCapabilities, add_reasoning
from afterglow.errors import InvalidArgument

DEFAULT_CAPABILITIES = TemplateCapabilities()
MESSAGE_FIELDS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name", "refusal"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the model made. `arguments` is the JSON text as the model wrote it.

    >>> ToolCall(id="call_1", name="add", arguments='{"a": 1}').name
    'add'
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation.

    >>> Message(role="user", content="Hello").role
    'user'
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    attachments: tuple[Attachment, ...] = ()


MessageLike: TypeAlias = Message | Mapping[str, Any] | tuple[str, str]


def parse_messages(values: Sequence[MessageLike]) -> list[Message]:
    """What callers write (messages, OpenAI's dictionaries, or (role, text) pairs) as messages."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidArgument("messages", "must be a list of messages")
    if not values:
        raise InvalidArgument("messages", "must be at least one")
    return [_parse_message(value, f"messages[{index}]") for index, value in enumerate(values)]


def _parse_message(value: MessageLike, where: str) -> Message:
    if isinstance(value, Message):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        role, content = value
        return Message(role=check_text(role, f"{where}.role"), content=check_text(content, f"{where}.content"))
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, f"must be a message, not {type(value).__name__}")
    if unknown := sorted(set(value) - MESSAGE_FIELDS):
        raise InvalidArgument(f"{where}.{unknown[0]}", "is not a field of a message")
    calls = value.get("tool_calls") or ()
    content, attachments = parse_content(value.get("content"), f"{where}.content")
    return Message(
        role=check_text(value.get("role"), f"{where}.role"),
        content=content,
        attachments=attachments,
        reasoning=_check_optional_text(
            value.get("reasoning_content", value.get("reasoning")), f"{where}.reasoning_content"
        ),
        tool_calls=tuple(_parse_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_check_optional_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_check_optional_text(value.get("name"), f"{where}.name"),
    )


def _parse_tool_call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidArgument(where, "must have a `function` with `name` and `arguments`")
    arguments = function.get("arguments", "{}")
    return ToolCall(
        id=_check_optional_text(value.get("id"), f"{where}.id") or "",
        name=check_text(function.get("name"), f"{where}.function.name"),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    )


def _check_optional_text(value: Any, where: str) -> str | None:
    return None if value is None else check_text(value, where)


def to_template_message(message: Message, capabilities: TemplateCapabilities = DEFAULT_CAPABILITIES) -> dict[str, Any]:
    """A message as a chat template expects it: transformers' dictionaries, written after the template's habits.

    >>> readable(Message(role="user", content="Hello"))
    {'role': 'user', 'content': 'Hello'}
    """
    content: Any = message.content
    if message.tool_calls and not content and capabilities.tool_call_format is not None:
        content = capabilities.tool_call_format.empty_content
    if capabilities.requires_typed_content and content is not None:
        content = [{"type": "text", "text": content}]
    written: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        text = capabilities.tool_call_format is not None and capabilities.tool_call_format.arguments_as_text
        written["tool_calls"] = [_to_template_tool_call(call, text) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    if message.reasoning is not None:
        return add_reasoning(written, capabilities.reasoning_field, message.reasoning)
    if capabilities.requires_reasoning and message.role == "assistant":
        return add_reasoning(written, capabilities.reasoning_field, "")
    return written


def to_openai_message(message: Message) -> dict[str, Any]:
    """A message as OpenAI's dictionary: what `messages` reads.

    >>> plain(Message(role="user", content="Hello"))
    {'role': 'user', 'content': 'Hello'}
    """
    written = to_template_message(message)
    if message.attachments:
        written["content"] = to_openai_content(message.content, message.attachments)
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return written


def _to_template_tool_call(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not arguments_as_text:
        # Where what the model wrote is not JSON, the template gets it as it is.
        with contextlib.suppress(ValueError):
            arguments = json.loads(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
