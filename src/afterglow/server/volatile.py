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
from typing import Literal

from afterglow.chat.messages import Message


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
            r"|^<(git_?status)>[\s\S]*?</\1>(?:\n|\Z)",
            re.MULTILINE | re.IGNORECASE,
        ),
        "move",
        "the state of a working tree changes with every edit",
    ),
)


def move_volatile_spans(messages: Sequence[Message]) -> tuple[list[Message], Counter[str]]:
    """Return the messages with the volatile spans of the system prompt at its end, and the number of hits by rule.

    >>> system = Message(role="system", content="Today's date: 2026-11-17\\nBe brief.")
    >>> moved, hits = move_volatile_spans([system, Message(role="user", content="Hello")])
    >>> moved[0].content
    "Be brief.\\n\\nToday's date: 2026-11-17"
    """
    hits: Counter[str] = Counter()
    moved: list[str] = []
    result = list(messages)
    length = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    for index, message in enumerate(messages[:length]):
        content = message.content
        for rule in RULES:
            spans = [match[0] for match in rule.pattern.finditer(content)]
            if spans:
                content = rule.pattern.sub("", content)
                hits[rule.name] += len(spans)
                moved += [span.strip("\n") for span in spans if rule.action == "move"]
        result[index] = replace(message, content=content) if content != message.content else message
    if moved:
        last = result[length - 1]
        result[length - 1] = replace(last, content="\n\n".join([last.content.rstrip("\n"), "\n".join(moved)]))
    return result, hits
