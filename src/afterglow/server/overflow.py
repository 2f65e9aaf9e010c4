"""Prompts that are too long: refused, unless the request says what may be left out; and then that is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from afterglow.chat.chat import ChatPlan
from afterglow.errors import PromptTooLong

Policy: TypeAlias = Literal["refuse", "shift", "truncate_middle"]
Messages: TypeAlias = list[dict[str, Any]]
LEAST_ROOM = 16  # tokens that are left for an answer where the request does not say how long it may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was left out of a prompt."""

    policy: Policy
    messages: int = 0
    tokens: int = 0

    @property
    def report(self) -> dict[str, Any]:
        """For the answer's field `overflow`."""
        return {"policy": self.policy, "dropped_messages": self.messages, "dropped_tokens": self.tokens}


def room_for_prompt(context: int, max_tokens: int | None) -> int:
    """How long a cut prompt may be: the answer has to fit behind it."""
    return max(1, context - max(min(max_tokens or LEAST_ROOM, context // 2), 1))


def fitting_plan(
    messages: Messages, make: Callable[[Messages], ChatPlan], policy: Policy, *, context: int, max_tokens: int | None
) -> tuple[ChatPlan, Cut | None]:
    """A plan that fits, and what had to be left out for it. `PromptTooLong` where nothing may be, or not enough."""
    plan = make(messages)
    length = plan.prompt.cells
    if length <= context:
        return plan, None
    if policy == "refuse":
        raise PromptTooLong(length, context)
    room = room_for_prompt(context, max_tokens)
    head, groups = grouped(messages)
    low, high = 1, len(groups) - 1  # the newest group always stays
    best: tuple[ChatPlan, int] | None = None
    while low <= high:  # the fewest groups that have to go
        dropped = (low + high) // 2
        kept = without(groups, dropped, policy)
        plan = make([*head, *(message for group in kept for message in group)])
        if plan.prompt.cells <= room:
            best, high = (plan, len(messages) - len(head) - sum(map(len, kept))), dropped - 1
        else:
            low = dropped + 1
    if best is None:
        raise PromptTooLong(length, context)
    plan, gone = best
    return plan, Cut(policy=policy, messages=gone, tokens=length - plan.prompt.cells)


def grouped(messages: Messages) -> tuple[Messages, list[Messages]]:
    """System messages at the start, which stay; and what may go only together: a question and all that follows it."""
    start = next((index for index, one in enumerate(messages) if one["role"] != "system"), len(messages))
    groups: list[Messages] = []
    for message in messages[start:]:
        if message["role"] == "user" or not groups:
            groups.append([])
        groups[-1].append(message)
    return messages[:start], groups


def without(groups: Sequence[Messages], count: int, policy: Policy) -> list[Messages]:
    """The groups without `count` of them: the oldest, or those in the middle.

    >>> without([[1], [2], [3], [4]], 2, "truncate_middle")
    [[1], [4]]
    """
    first = 0 if policy == "shift" else min(len(groups) - 1 - count, (len(groups) - count) // 2)
    return [*groups[:first], *groups[first + count :]]


def fitting_tokens(
    tokens: Sequence[int], policy: Policy, *, context: int, max_tokens: int | None
) -> tuple[Sequence[int], Cut | None]:
    """The same for a prompt of tokens: their beginning goes, or their middle."""
    if len(tokens) <= context:
        return tokens, None
    if policy == "refuse":
        raise PromptTooLong(len(tokens), context)
    room = room_for_prompt(context, max_tokens)
    cut = Cut(policy=policy, tokens=len(tokens) - room)
    if policy == "shift":
        return tokens[len(tokens) - room :], cut
    front = room // 2
    return [*tokens[:front], *tokens[len(tokens) - (room - front) :]], cut
