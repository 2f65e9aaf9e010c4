"""Messages of a conversation: what callers write, checked, and what templates read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from afterglow.chat.content import Attachment as Attachment
from afterglow.chat.content import read_content, text_at, written_content
from afterglow.chat.habits import Habits, with_reasoning
from afterglow.errors import InvalidArgument

USUAL = Habits()
KNOWN = frozenset(
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


Writable: TypeAlias = Message | Mapping[str, Any] | tuple[str, str]


def messages(values: Sequence[Writable]) -> list[Message]:
    """What callers write (messages, OpenAI's dictionaries, or (role, text) pairs) as messages."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidArgument("messages", "must be a list of messages")
    if not values:
        raise InvalidArgument("messages", "must be at least one")
    return [_message(value, f"messages[{index}]") for index, value in enumerate(values)]


def _message(value: Writable, where: str) -> Message:
    if isinstance(value, Message):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        role, content = value
        return Message(role=text_at(role, f"{where}.role"), content=text_at(content, f"{where}.content"))
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, f"must be a message, not {type(value).__name__}")
    if unknown := sorted(set(value) - KNOWN):
        raise InvalidArgument(f"{where}.{unknown[0]}", "is not a field of a message")
    calls = value.get("tool_calls") or ()
    content, attachments = read_content(value.get("content"), f"{where}.content")
    return Message(
        role=text_at(value.get("role"), f"{where}.role"),
        content=content,
        attachments=attachments,
        reasoning=_optional(value.get("reasoning_content", value.get("reasoning")), f"{where}.reasoning_content"),
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_optional(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_optional(value.get("name"), f"{where}.name"),
    )


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidArgument(where, "must have a `function` with `name` and `arguments`")
    arguments = function.get("arguments", "{}")
    return ToolCall(
        id=_optional(value.get("id"), f"{where}.id") or "",
        name=text_at(function.get("name"), f"{where}.function.name"),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    )


def _optional(value: Any, where: str) -> str | None:
    return None if value is None else text_at(value, where)


def readable(message: Message, habits: Habits = USUAL) -> dict[str, Any]:
    """A message as a chat template expects it: transformers' dictionaries, written after the template's habits.

    >>> readable(Message(role="user", content="Hello"))
    {'role': 'user', 'content': 'Hello'}
    """
    content: Any = message.content
    if message.tool_calls and not content and habits.calls is not None:
        content = habits.calls.content
    if habits.parts and content is not None:
        content = [{"type": "text", "text": content}]
    written: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        text = habits.calls is not None and habits.calls.text
        written["tool_calls"] = [_readable_call(call, text) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    if message.reasoning is not None:
        return with_reasoning(written, habits.reasoning, message.reasoning)
    if habits.thoughtful and message.role == "assistant":
        return with_reasoning(written, habits.reasoning, "")
    return written


def plain(message: Message) -> dict[str, Any]:
    """A message as OpenAI's dictionary: what `messages` reads.

    >>> plain(Message(role="user", content="Hello"))
    {'role': 'user', 'content': 'Hello'}
    """
    written = readable(message)
    if message.attachments:
        written["content"] = written_content(message.content, message.attachments)
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return written


def _readable_call(call: ToolCall, text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not text:
        # Where what the model wrote is not JSON, the template gets it as it is.
        with contextlib.suppress(ValueError):
            arguments = json.loads(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
