"""Volatile spans of system prompts: known texts that a client changes on every request or every session.

A changed span makes everything behind it a prefix miss. Known spans are therefore moved to the end of the system
prompt, behind what stays, and those that are not for the model are dropped. Text of other messages is never changed.
The setting `volatile` turns this off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from afterglow.chat.messages import Message
from afterglow.chat.prompt import Breakpoint


@dataclass(frozen=True, slots=True)
class VolatileRule:
    """A span of a system prompt that is moved or dropped."""

    name: str  # label of the metric
    pattern: re.Pattern[str]
    action: Literal["move", "drop"]
    reason: str


RULES = (
    VolatileRule(
        "billing_header",
        re.compile(
            r"\A(?:x-anthropic-billing-header:|(?=[^\n]*\bcch=)(?:[\w-]+:)?)(?:[ \t]*[\w.-]+=[^;\s]*;?)+[ \t]*\n*"
        ),
        "drop",
        "Claude Code's billing line has another checksum in every request, and is not for the model",
    ),
    VolatileRule(
        "date",
        re.compile(
            r"^[ \t]*(?:[-*] )?(?:today's date|(?:the )?current (?:date|time|datetime|date and time|date/time))"
            r"(?: is|:)(?=[^\n]*\d)[^\n]*(?:\n|\Z)",
            re.MULTILINE | re.IGNORECASE,
        ),
        "move",
        "the date changes every day, a time in every request",
    ),
    VolatileRule(
        "git_status",
        re.compile(
            r"^gitStatus:(?:(?!^gitStatus:)[\s\S])*?^Recent commits:\n(?:[0-9a-f]{7,40} [^\n]*(?:\n|\Z))*"
            r"|^[ \t]*Git status:[^\n]*\n(?:[ MADRCTU?!]{2} [^\n]*(?:\n|\Z))+"
            r"|^<(git_?status)>(?:(?!^<git_?status>)[\s\S])*?</\1>(?:\n|\Z)",
            re.MULTILINE | re.IGNORECASE,
        ),
        "move",
        "the state of a working tree changes with every edit",
    ),
)


class StablePrompt(NamedTuple):
    """A conversation whose volatile spans are at the end of the system prompt."""

    messages: list[Message]
    breakpoints: list[Breakpoint]  # at the same texts as before
    hits: Counter[str]  # moved or dropped spans by the name of their rule


def move_volatile_spans(messages: Sequence[Message], breakpoints: Sequence[Breakpoint] = ()) -> StablePrompt:
    """Move the volatile spans of the system prompt to its end.

    >>> system = Message(role="system", content="Today's date: 2026-11-17\\nBe brief.")
    >>> moved = move_volatile_spans([system, Message(role="user", content="Hello")])
    >>> moved.messages[0].content
    "Be brief.\\n\\nToday's date: 2026-11-17"
    """
    hits: Counter[str] = Counter()
    moved: list[str] = []
    result, positions = list(messages), list(breakpoints)
    length = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    for index, message in enumerate(messages[:length]):
        content = message.content
        for rule in RULES:
            spans = list(rule.pattern.finditer(content))
            if spans:
                content = rule.pattern.sub("", content)
                hits[rule.name] += len(spans)
                moved += [span[0].strip("\n") for span in spans if rule.action == "move"]
                positions = [shift_breakpoint(position, index, spans) for position in positions]
        result[index] = replace(message, content=content) if content != message.content else message
    if moved:
        last = result[length - 1]
        stable = last.content.rstrip("\n")
        result[length - 1] = replace(last, content="\n\n".join([stable, "\n".join(moved)]))
        positions = [limit_breakpoint(position, length - 1, len(stable)) for position in positions]
    return StablePrompt(result, positions, hits)


def shift_breakpoint(position: Breakpoint, message: int, spans: Sequence[re.Match[str]]) -> Breakpoint:
    """Return a breakpoint after spans of a message were removed."""
    if position.tools is not None or position.message != message or position.offset is None:
        return position
    before = sum(max(0, min(span.end(), position.offset) - span.start()) for span in spans)
    return replace(position, offset=position.offset - before)


def limit_breakpoint(position: Breakpoint, message: int, stable: int) -> Breakpoint:
    """Return a breakpoint that is not behind the stable text of a message."""
    if position.tools is not None or position.message != message:
        return position
    return replace(position, offset=stable if position.offset is None else min(position.offset, stable))
