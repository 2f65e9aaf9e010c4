"""Rewrites conversations that a chat template does not support as given. No content is dropped.

`adapt_messages` applies the detected capabilities before rendering. `iter_fallbacks` yields further rewrites for
templates that reject the order of messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from afterglow.chat.messages import Message, to_template_message
from afterglow.chat.template.capabilities import TemplateCapabilities

MESSAGE_SEPARATOR = "\n\n"  # between the texts of merged messages
SHORT_CALL_ID_CHARACTERS = 9  # the only length of tool call ids that some templates accept


def adapt_messages(messages: Sequence[Message], capabilities: TemplateCapabilities) -> list[Message]:
    """Rewrite a conversation to the roles and fields that the template supports.

    - `developer` becomes `system`.
    - System messages are merged into the first user message.
    - Tool calls become JSON text in the assistant message.
    - Tool results become user messages.
    - If tool calls must not have content, the content becomes a separate message before them.

    >>> adapt_messages([Message(role="developer", content="Be brief.")], TemplateCapabilities())[0].role
    'system'
    """
    adapted: list[Message] = []
    for message in messages:
        if message.role == "developer" and not capabilities.supports_developer_role:
            message = replace(message, role="system")
        elif message.role == "tool" and not capabilities.supports_tool_responses:
            message = Message(role="user", content=message.content)
        adapted += _adapt_tool_calls(message, capabilities)
    return adapted if capabilities.supports_system_role else merge_system_into_user(adapted)


def _adapt_tool_calls(message: Message, capabilities: TemplateCapabilities) -> list[Message]:
    if not message.tool_calls:
        return [message]
    if capabilities.tool_call_format is None:
        functions = [call["function"] for call in to_template_message(message)["tool_calls"]]
        calls = [json.dumps(function, ensure_ascii=False) for function in functions]
        return [replace(message, content="\n".join(filter(None, [message.content, *calls])), tool_calls=())]
    if capabilities.tool_call_format.empty_content is None and message.content:
        return [replace(message, tool_calls=()), replace(message, content="", reasoning=None)]
    return [message]


def iter_fallbacks(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield rewrites of a conversation that a template rejected, smallest change first.

    One system message at the start; consecutive messages of one role merged; both; system messages merged into the
    first user message; then the same with tool call ids of nine characters.

    >>> [[m.content for m in rewrite] for rewrite in iter_fallbacks([Message(role="user", content=c) for c in "ab"])]
    [['a\\n\\nb']]
    """
    tried = [list(messages)]
    for original in (list(messages), shorten_call_ids(messages)):
        system_first, system_in_user = move_system_first(original), merge_system_into_user(original)
        for rewrite in (
            original,
            system_first,
            merge_consecutive_roles(original),
            merge_consecutive_roles(system_first),
            system_in_user,
            merge_consecutive_roles(system_in_user),
        ):
            if rewrite not in tried:
                tried.append(rewrite)
                yield rewrite


def merge_system_into_user(messages: Sequence[Message]) -> list[Message]:
    """Move the text of all system messages to the start of the first user message."""
    system = [message.content for message in messages if message.role == "system" and message.content]
    rest = [message for message in messages if message.role != "system"]
    for index, message in enumerate(rest):
        if system and message.role == "user":
            rest[index] = replace(message, content=MESSAGE_SEPARATOR.join([*system, message.content]))
            return rest
    return list(messages)


def move_system_first(messages: Sequence[Message]) -> list[Message]:
    """Merge all system messages into one at the start."""
    system = [message for message in messages if message.role == "system"]
    if not system:
        return list(messages)
    merged = replace(system[0], content=MESSAGE_SEPARATOR.join(message.content for message in system))
    return [merged, *(message for message in messages if message.role != "system")]


def merge_consecutive_roles(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive messages of one role. Tool calls and tool results stay separate."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is not None and message.role == last.role and message.role != "tool" and not last.tool_calls:
            reasoning = [text for text in (last.reasoning, message.reasoning) if text is not None]
            merged[-1] = replace(
                message,
                content=MESSAGE_SEPARATOR.join(filter(None, (last.content, message.content))),
                reasoning=MESSAGE_SEPARATOR.join(reasoning) if reasoning else None,
            )
        else:
            merged.append(message)
    return merged


def shorten_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Map tool call ids to nine letters and digits. Equal ids stay equal."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=_shorten_call_id(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else _shorten_call_id(message.tool_call_id),
        )
        for message in messages
    ]


def _shorten_call_id(call_id: str) -> str:
    if len(call_id) == SHORT_CALL_ID_CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_CALL_ID_CHARACTERS]
