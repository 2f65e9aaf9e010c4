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

from afterglow.chat.habits import Habits
from afterglow.chat.messages import Message, ToolCall, readable

BETWEEN = "\n\n"  # two texts that become one
SHORT = 9  # characters of a call's identifier, where a template takes no other length


def adapted(messages: Sequence[Message], habits: Habits) -> list[Message]:
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
        replace(message, role="system") if message.role == "developer" and not habits.developer else message
        for message in messages
    ]
    told = list(itertools.chain.from_iterable(_called(message, habits) for message in told))
    if not habits.results:
        told = [
            Message(role="user", content=message.content) if message.role == "tool" else message for message in told
        ]
    return told if habits.system else without_system(told)


def _called(message: Message, habits: Habits) -> list[Message]:
    if not message.tool_calls:
        return [message]
    if habits.calls is None:
        written = [json.dumps(_function(call), ensure_ascii=False) for call in message.tool_calls]
        return [replace(message, content="\n".join(filter(None, [message.content, *written])), tool_calls=())]
    if habits.calls.content is None and message.content:
        return [replace(message, tool_calls=()), replace(message, content="", reasoning=None)]
    return [message]


def _function(call: ToolCall) -> object:
    return readable(Message(role="assistant", tool_calls=(call,)))["tool_calls"][0]["function"]


def second_tries(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Other ways to write a conversation that a template refused, the smallest changes first.

    One system message at the beginning; neighbours of one role as one message; both; system messages in front of the
    first question; identifiers of calls as short as the pickiest template wants them.

    >>> [[m.content for m in way] for way in second_tries([Message(role="user", content=c) for c in "ab"])]
    [['a\\n\\nb']]
    """
    tried = [list(messages)]
    for named in (list(messages), short_identifiers(messages)):
        gathered, merged = system_first(named), without_system(named)
        for way in (named, gathered, alternating(named), alternating(gathered), merged, alternating(merged)):
            if way not in tried:
                tried.append(way)
                yield way


def without_system(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the text of its system messages in front of the first user message."""
    system = [message.content for message in messages if message.role == "system" and message.content]
    rest = [message for message in messages if message.role != "system"]
    for index, message in enumerate(rest):
        if system and message.role == "user":
            rest[index] = replace(message, content=BETWEEN.join([*system, message.content]))
            return rest
    return list(messages)


def system_first(messages: Sequence[Message]) -> list[Message]:
    """The conversation with all its system messages as one at the beginning."""
    system = [message for message in messages if message.role == "system"]
    if not system:
        return list(messages)
    one = replace(system[0], content=BETWEEN.join(message.content for message in system))
    return [one, *(message for message in messages if message.role != "system")]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """The conversation with neighbours of one role as one message. Calls and results stay apart."""
    told: list[Message] = []
    for message in messages:
        last = told[-1] if told else None
        if last is not None and message.role == last.role and message.role != "tool" and not last.tool_calls:
            thoughts = [thought for thought in (last.reasoning, message.reasoning) if thought is not None]
            told[-1] = replace(
                message,
                content=BETWEEN.join(filter(None, (last.content, message.content))),
                reasoning=BETWEEN.join(thoughts) if thoughts else None,
            )
        else:
            told.append(message)
    return told


def short_identifiers(messages: Sequence[Message]) -> list[Message]:
    """The conversation with identifiers of calls that have nine letters and digits; the same for the same."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=_short(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else _short(message.tool_call_id),
        )
        for message in messages
    ]


def _short(identifier: str) -> str:
    if len(identifier) == SHORT and identifier.isascii() and identifier.isalnum():
        return identifier
    return hashlib.sha256(identifier.encode()).hexdigest()[:SHORT]
