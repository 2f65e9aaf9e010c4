"""Conversations rewritten for templates that do not take them as they are. Nothing that was said is lost.

What a template is known to do (`chat.habits`) is heeded before it is asked; what it refuses because of where a message
stands is rewritten afterwards, one way after the other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from afterglow.chat.messages import Message, ToolCall, to_template_message
from afterglow.chat.template.capabilities import TemplateCapabilities

MESSAGE_SEPARATOR = "\n\n"  # two texts that become one
SHORT_CALL_ID_CHARACTERS = 9  # characters of a call's identifier, where a template takes no other length


def adapt_messages(messages: Sequence[Message], capabilities: TemplateCapabilities) -> list[Message]:
    """The conversation in the roles that the template shows.

    - `developer` becomes `system` where the template does not know it.
    - System messages that it would not show go in front of the first question.
    - Calls that it would not show are written as JSON into what the assistant said.
    - Results that it would not show are written as what the user says.
    - Where it takes calls only without content, what was said comes in a message before them.

    >>> adapted([Message(role="developer", content="Be brief.")], Habits())[0].role
    'system'
    """
    told = [
        replace(message, role="system")
        if message.role == "developer" and not capabilities.supports_developer_role
        else message
        for message in messages
    ]
    told = list(itertools.chain.from_iterable(_adapt_tool_calls(message, capabilities) for message in told))
    if not capabilities.supports_tool_responses:
        told = [
            Message(role="user", content=message.content) if message.role == "tool" else message for message in told
        ]
    return told if capabilities.supports_system_role else merge_system_into_user(told)


def _adapt_tool_calls(message: Message, capabilities: TemplateCapabilities) -> list[Message]:
    if not message.tool_calls:
        return [message]
    if capabilities.tool_call_format is None:
        written = [json.dumps(_to_function_dict(call), ensure_ascii=False) for call in message.tool_calls]
        return [replace(message, content="\n".join(filter(None, [message.content, *written])), tool_calls=())]
    if capabilities.tool_call_format.empty_content is None and message.content:
        return [replace(message, tool_calls=()), replace(message, content="", reasoning=None)]
    return [message]


def _to_function_dict(call: ToolCall) -> object:
    return to_template_message(Message(role="assistant", tool_calls=(call,)))["tool_calls"][0]["function"]


def iter_fallbacks(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other ways to write a conversation that a template refused, the smallest changes first.

    One system message at the beginning; neighbours of one role as one message; both; system messages in front of the
    first question; identifiers of calls as short as the pickiest template wants them.

    >>> [[m.content for m in way] for way in second_tries([Message(role="user", content=c) for c in "ab"])]
    [['a\\n\\nb']]
    """
    tried = [list(messages)]
    for named in (list(messages), shorten_call_ids(messages)):
        gathered, merged = move_system_first(named), merge_system_into_user(named)
        for way in (
            named,
            gathered,
            merge_consecutive_roles(named),
            merge_consecutive_roles(gathered),
            merged,
            merge_consecutive_roles(merged),
        ):
            if way not in tried:
                tried.append(way)
                yield way


def merge_system_into_user(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the text of its system messages in front of the first user message."""
    system = [message.content for message in messages if message.role == "system" and message.content]
    rest = [message for message in messages if message.role != "system"]
    for index, message in enumerate(rest):
        if system and message.role == "user":
            rest[index] = replace(message, content=MESSAGE_SEPARATOR.join([*system, message.content]))
            return rest
    return list(messages)


def move_system_first(messages: Sequence[Message]) -> list[Message]:
    """The conversation with all its system messages as one at the beginning."""
    system = [message for message in messages if message.role == "system"]
    if not system:
        return list(messages)
    one = replace(system[0], content=MESSAGE_SEPARATOR.join(message.content for message in system))
    return [one, *(message for message in messages if message.role != "system")]


def merge_consecutive_roles(messages: Sequence[Message]) -> list[Message]:
    """The conversation with neighbours of one role as one message. Calls and results stay apart."""
    told: list[Message] = []
    for message in messages:
        last = told[-1] if told else None
        if last is not None and message.role == last.role and message.role != "tool" and not last.tool_calls:
            thoughts = [thought for thought in (last.reasoning, message.reasoning) if thought is not None]
            told[-1] = replace(
                message,
                content=MESSAGE_SEPARATOR.join(filter(None, (last.content, message.content))),
                reasoning=MESSAGE_SEPARATOR.join(thoughts) if thoughts else None,
            )
        else:
            told.append(message)
    return told


def shorten_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The conversation with identifiers of calls that have nine letters and digits; the same for the same."""
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
