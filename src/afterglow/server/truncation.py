"""Truncation of prompts that exceed the context, by the policy of the request. The response reports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.chat.chat import ChatPlan
from afterglow.errors import PromptTooLong
from afterglow.server.schema.chat import MessageDict
from afterglow.server.schema.sampling import TruncationPolicy

MIN_COMPLETION_TOKENS = 16  # reserved for the completion if the request does not set a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What was dropped from a prompt."""

    policy: TruncationPolicy
    dropped_messages: int = 0
    dropped_tokens: int = 0

    @property
    def report(self) -> dict[str, Any]:
        """Value of the response field `overflow`."""
        return {"policy": self.policy, "dropped_messages": self.dropped_messages, "dropped_tokens": self.dropped_tokens}


def compute_prompt_limit(context: int, max_tokens: int | None) -> int:
    """Return the maximum length of a truncated prompt, which leaves space for the completion."""
    return max(1, context - max(min(max_tokens or MIN_COMPLETION_TOKENS, context // 2), 1))


def fit_plan(
    messages: list[MessageDict],
    build_plan: Callable[[list[MessageDict]], ChatPlan],
    policy: TruncationPolicy,
    *,
    context: int,
    max_tokens: int | None,
) -> tuple[ChatPlan, Truncation | None]:
    """Return a plan that fits the context, and what was dropped for it.

    Raises `PromptTooLong` if the policy forbids truncation or the last turn alone does not fit.
    """
    plan = build_plan(messages)
    length = plan.prompt.cells
    if length <= context:
        return plan, None
    if policy == "refuse":
        raise PromptTooLong(length, context)
    prompt_limit = compute_prompt_limit(context, max_tokens)
    system, turns = group_turns(messages)
    low, high = 1, len(turns) - 1  # the last turn always stays
    best: tuple[ChatPlan, int] | None = None
    while low <= high:  # binary search for the smallest number of dropped turns
        dropped = (low + high) // 2
        remaining = drop_turns(turns, dropped, policy)
        plan = build_plan([*system, *(message for turn in remaining for message in turn)])
        if plan.prompt.cells <= prompt_limit:
            best, high = (plan, len(messages) - len(system) - sum(map(len, remaining))), dropped - 1
        else:
            low = dropped + 1
    if best is None:
        raise PromptTooLong(length, context)
    plan, dropped_messages = best
    dropped_tokens = length - plan.prompt.cells
    return plan, Truncation(policy=policy, dropped_messages=dropped_messages, dropped_tokens=dropped_tokens)


def group_turns(messages: list[MessageDict]) -> tuple[list[MessageDict], list[list[MessageDict]]]:
    """Split messages into the leading system messages and the turns.

    A turn is a user message with all messages that follow it. Turns are dropped as a whole.
    """
    start = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns: list[list[MessageDict]] = []
    for message in messages[start:]:
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return messages[:start], turns


def drop_turns(turns: Sequence[list[MessageDict]], count: int, policy: TruncationPolicy) -> list[list[MessageDict]]:
    """Return the turns without `count` of them: the oldest, or those in the middle.

    >>> drop_turns([[1], [2], [3], [4]], 2, "truncate_middle")
    [[1], [4]]
    """
    first = 0 if policy == "shift" else min(len(turns) - 1 - count, (len(turns) - count) // 2)
    return [*turns[:first], *turns[first + count :]]


def fit_tokens(
    tokens: Sequence[int], policy: TruncationPolicy, *, context: int, max_tokens: int | None
) -> tuple[Sequence[int], Truncation | None]:
    """Return tokens that fit the context, and what was dropped: tokens at the start or in the middle.

    Raises `PromptTooLong` if the policy forbids truncation.
    """
    if len(tokens) <= context:
        return tokens, None
    if policy == "refuse":
        raise PromptTooLong(len(tokens), context)
    prompt_limit = compute_prompt_limit(context, max_tokens)
    truncation = Truncation(policy=policy, dropped_tokens=len(tokens) - prompt_limit)
    if policy == "shift":
        return tokens[len(tokens) - prompt_limit :], truncation
    front = prompt_limit // 2
    return [*tokens[:front], *tokens[len(tokens) - (prompt_limit - front) :]], truncation
