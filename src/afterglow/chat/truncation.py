"""Truncation of prompts that leave no space for the response, by an overflow policy. Responses report it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from afterglow.chat.chat import ChatPlan
from afterglow.chat.messages import SYSTEM_ROLES, MessageLike
from afterglow.chat.prompt import Truncation, TruncationPolicy, count_cells
from afterglow.engine.types.entries import Entry
from afterglow.errors import InvalidArgument, PromptTooLong
from afterglow.llama.vocabulary import Vocabulary

MessageT = TypeVar("MessageT", bound=MessageLike)
MAX_RESERVED_TOKENS = 4096  # for a response without a limit: a quarter of the context, at most this


def compute_prompt_limit(context: int, max_tokens: int | None) -> int:
    """Return the maximum cells of a truncated prompt.

    The rest of the context is for the response: `max_tokens`, at most half of the context; without a limit, or with one
    that the context does not reach, a quarter of the context, at most 4,096 tokens.

    >>> compute_prompt_limit(4096, max_tokens=100), compute_prompt_limit(4096, max_tokens=None)
    (3996, 3072)
    """
    has_limit = max_tokens is not None and max_tokens < context
    reserved = min(max_tokens or 0, context // 2) if has_limit else min(context // 4, MAX_RESERVED_TOKENS)
    return context - max(reserved, 1)


# --- conversations


def fit_plan(
    messages: Sequence[MessageT],
    build_plan: Callable[[list[MessageT]], ChatPlan],
    policy: TruncationPolicy,
    *,
    context: int,
    max_tokens: int | None,
) -> ChatPlan:
    """Return a plan that leaves space for the response. `ChatPlan.truncation` says what was dropped for it.

    Raises `PromptTooLong` if the prompt exceeds the context and the policy forbids truncation, or if the system
    messages and the last turn alone exceed it.
    """
    plan = build_plan(list(messages))
    length, limit = plan.prompt.cells, compute_prompt_limit(context, max_tokens)
    if policy == "refuse" or length <= limit:
        return check_length(plan, length, context)
    system, turns = group_turns(messages)
    # Dropping in steps keeps the prompt of the following turns a continuation of this one, which is a prefix hit.
    step = max(1, context // 4)
    target = length - step * -((limit - length) // step)
    head = 0 if policy == "shift" else _count_head_turns(system, turns, build_plan, (limit - step) // 2)
    low, high = 1, len(turns) - 1  # the last turn always stays
    best: tuple[ChatPlan, int] | None = None
    while low <= high:  # binary search for the smallest number of dropped turns
        dropped = (low + high) // 2
        remaining = drop_turns(turns, dropped, head)
        candidate = build_plan([*system, *(message for turn in remaining for message in turn)])
        fits = candidate.prompt.cells <= target
        if fits or dropped == len(turns) - 1:
            best = candidate, len(messages) - len(system) - sum(map(len, remaining))
        low, high = (low, dropped - 1) if fits else (dropped + 1, high)
    if best is None:  # there is only one turn
        return check_length(plan, length, context)
    plan, dropped_messages = best
    truncation = Truncation(policy=policy, dropped_messages=dropped_messages, dropped_tokens=length - plan.prompt.cells)
    return check_length(replace(plan, truncation=truncation), length, context)


def check_length(plan: ChatPlan, length: int, context: int) -> ChatPlan:
    """Return the plan if its prompt fits the context. `length` is that of the whole prompt, for the error."""
    if plan.prompt.cells > context:
        raise PromptTooLong(length, context)
    return plan


def group_turns(messages: Sequence[MessageT]) -> tuple[list[MessageT], list[list[MessageT]]]:
    """Split messages into the leading system messages and the turns.

    A turn is a user message with all messages that follow it. Turns are dropped as a whole.
    """
    start = next((i for i, message in enumerate(messages) if get_role(message) not in SYSTEM_ROLES), len(messages))
    turns: list[list[MessageT]] = []
    for message in messages[start:]:
        if get_role(message) == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return list(messages[:start]), turns


def get_role(message: MessageLike) -> str:
    """Return the role of a message of any form."""
    if isinstance(message, tuple):
        return message[0]
    return str(message["role"]) if isinstance(message, dict) else message.role  # type: ignore[union-attr]


def _count_head_turns(
    system: list[MessageT],
    turns: Sequence[list[MessageT]],
    build_plan: Callable[[list[MessageT]], ChatPlan],
    max_cells: int,
) -> int:
    """Return how many turns before the middle stay: those that fit into `max_cells`, so that later turns do not change
    it. The question of the next turn is counted with them, because templates expect a prompt to end with one."""
    low, high = 0, len(turns) - 1
    while low < high:  # binary search
        count = (low + high + 1) // 2
        head = [*system, *(message for turn in turns[:count] for message in turn), turns[count][0]]
        low, high = (count, high) if build_plan(head).prompt.cells <= max_cells else (low, count - 1)
    return low


def drop_turns(turns: Sequence[list[MessageT]], count: int, head: int) -> list[list[MessageT]]:
    """Return the turns without `count` of them after the first `head`. The last turn always stays.

    >>> drop_turns([[1], [2], [3], [4]], 2, head=1)
    [[1], [4]]
    """
    first = min(head, len(turns) - 1 - count)
    return [*turns[:first], *turns[first + count :]]


# --- prompts without messages


def count_bos(entries: Sequence[Entry], vocabulary: Vocabulary) -> int:
    """Return 1 if the entries start with the BOS token, else 0."""
    return int(len(entries) > 0 and entries[0] == vocabulary.special_tokens.get("bos"))


def fit_entries(
    entries: Sequence[Entry],
    policy: TruncationPolicy,
    *,
    context: int,
    max_tokens: int | None,
    keep_start: int = 0,
    keep_end: int = 0,
) -> tuple[Sequence[Entry], Truncation | None]:
    """Return entries that leave space for the completion, and what was dropped: from the start or the middle.

    The first `keep_start` entries (e.g. the BOS token) and the last `keep_end` are never dropped. Raises
    `PromptTooLong` if the prompt exceeds the context and the policy forbids truncation, or if these entries exceed it.
    """
    if policy == "compact":
        reason = (
            "must be `shift` or `truncate_middle` for a prompt without messages, not `compact`: it summarizes messages"
        )
        raise InvalidArgument("overflow", reason)
    length, limit = count_cells(entries), compute_prompt_limit(context, max_tokens)
    if policy == "refuse" or length <= limit:
        if length > context:
            raise PromptTooLong(length, context)
        return entries, None
    first, front = keep_start, count_cells(entries[:keep_start])
    while policy == "truncate_middle" and front < limit // 2:
        front += count_cells(entries[first : first + 1])
        first += 1
    stop, remaining = first, length
    while remaining > limit and stop < len(entries) - keep_end:
        remaining -= count_cells(entries[stop : stop + 1])
        stop += 1
    if remaining > context:
        raise PromptTooLong(length, context)
    truncation = Truncation(policy=policy, dropped_tokens=length - remaining)
    return [*entries[:first], *entries[stop:]], truncation
