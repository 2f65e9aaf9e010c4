"""Prompts that are too long: refused, unless the request says what may be left out; and then that is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from afterglow.chat.chat import ChatPlan
from afterglow.errors import PromptTooLong

TruncationPolicy: TypeAlias = Literal["refuse", "shift", "truncate_middle"]
MessageDicts: TypeAlias = list[dict[str, Any]]
MIN_COMPLETION_TOKENS = 16  # tokens that are left for an answer where the request does not say how long it may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What was left out of a prompt."""

    policy: TruncationPolicy
    dropped_messages: int = 0
    dropped_tokens: int = 0

    @property
    def report(self) -> dict[str, Any]:
        """For the answer's field `overflow`."""
        return {"policy": self.policy, "dropped_messages": self.dropped_messages, "dropped_tokens": self.dropped_tokens}


def compute_prompt_limit(context: int, max_tokens: int | None) -> int:
    """How long a cut prompt may be: the answer has to fit behind it."""
    return max(1, context - max(min(max_tokens or MIN_COMPLETION_TOKENS, context // 2), 1))


def fit_plan(
    messages: MessageDicts,
    build_plan: Callable[[MessageDicts], ChatPlan],
    policy: TruncationPolicy,
    *,
    context: int,
    max_tokens: int | None,
) -> tuple[ChatPlan, Truncation | None]:
    """A plan that fits, and what had to be left out for it. `PromptTooLong` where nothing may be, or not enough."""
    plan = build_plan(messages)
    length = plan.prompt.cells
    if length <= context:
        return plan, None
    if policy == "refuse":
        raise PromptTooLong(length, context)
    room = compute_prompt_limit(context, max_tokens)
    head, groups = group_turns(messages)
    low, high = 1, len(groups) - 1  # the newest group always stays
    best: tuple[ChatPlan, int] | None = None
    while low <= high:  # the fewest groups that have to go
        dropped = (low + high) // 2
        kept = drop_groups(groups, dropped, policy)
        plan = build_plan([*head, *(message for group in kept for message in group)])
        if plan.prompt.cells <= room:
            best, high = (plan, len(messages) - len(head) - sum(map(len, kept))), dropped - 1
        else:
            low = dropped + 1
    if best is None:
        raise PromptTooLong(length, context)
    plan, gone = best
    return plan, Truncation(policy=policy, dropped_messages=gone, dropped_tokens=length - plan.prompt.cells)


def group_turns(messages: MessageDicts) -> tuple[MessageDicts, list[MessageDicts]]:
    """System messages at the start, which stay; and what may go only together: a question and all that follows it."""
    start = next((index for index, one in enumerate(messages) if one["role"] != "system"), len(messages))
    groups: list[MessageDicts] = []
    for message in messages[start:]:
        if message["role"] == "user" or not groups:
            groups.append([])
        groups[-1].append(message)
    return messages[:start], groups


def drop_groups(groups: Sequence[MessageDicts], count: int, policy: TruncationPolicy) -> list[MessageDicts]:
    """The groups without `count` of them: the oldest, or those in the middle.

    >>> without([[1], [2], [3], [4]], 2, "truncate_middle")
    [[1], [4]]
    """
    first = 0 if policy == "shift" else min(len(groups) - 1 - count, (len(groups) - count) // 2)
    return [*groups[:first], *groups[first + count :]]


def fit_tokens(
    tokens: Sequence[int], policy: TruncationPolicy, *, context: int, max_tokens: int | None
) -> tuple[Sequence[int], Truncation | None]:
    """The same for a prompt of tokens: their beginning goes, or their middle."""
    if len(tokens) <= context:
        return tokens, None
    if policy == "refuse":
        raise PromptTooLong(len(tokens), context)
    room = compute_prompt_limit(context, max_tokens)
    cut = Truncation(policy=policy, dropped_tokens=len(tokens) - room)
    if policy == "shift":
        return tokens[len(tokens) - room :], cut
    front = room // 2
    return [*tokens[:front], *tokens[len(tokens) - (room - front) :]], cut
