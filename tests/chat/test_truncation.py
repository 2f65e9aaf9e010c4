"""Overflow policies: what is dropped from a prompt that leaves no space for the response."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from afterglow.chat.chat import ChatPlan
from afterglow.chat.prompt import ChatPrompt
from afterglow.chat.truncation import compute_prompt_limit, fit_entries, fit_plan, group_turns
from afterglow.engine.types.entries import Media
from afterglow.errors import PromptTooLong

BOS = 1000


def build_plan(messages: list[tuple[str, str]]) -> ChatPlan:
    """Build a plan with one entry for each character of the messages."""
    entries = tuple(ord(character) for _, text in messages for character in text)
    prompt = ChatPrompt(entries=entries, boundaries=frozenset(), text="".join(text for _, text in messages))
    unused: Any = None
    return ChatPlan(
        chat=unused,
        prompt=prompt,
        tools=(),
        tool_choice=unused,
        starts_in="turn",
        prefill=None,
        constraint=None,
        reasoning_budget=None,
        parse=None,
    )


def build_turns(count: int) -> list[tuple[str, str]]:
    """Build a system message and turns of 20 characters each; the last turn has only its question."""
    turns = [message for n in range(count) for message in [("user", f"{n:02}" + "q" * 8), ("assistant", "a" * 10)]]
    return [("system", "s" * 10), *turns[:-1]]


def fit(messages: list[tuple[str, str]], policy: Any = "shift", max_tokens: int | None = None) -> ChatPlan:
    return fit_plan(messages, build_plan, policy, context=256, max_tokens=max_tokens)


def test_a_response_without_a_limit_gets_a_quarter_of_the_context() -> None:
    assert compute_prompt_limit(256, None) == 192
    assert compute_prompt_limit(131_072, None) == 131_072 - 4096
    assert compute_prompt_limit(256, 16) == 240
    assert compute_prompt_limit(256, 200) == 128
    assert compute_prompt_limit(256, 1000) == 192  # a maximum that the context does not reach
    assert compute_prompt_limit(256, 0) == 255


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_a_truncated_conversation_leaves_space_for_the_response(policy: str) -> None:
    plan = fit(build_turns(30), policy)
    assert plan.prompt.cells <= 192
    assert plan.prompt.text.startswith("s" * 10)
    assert plan.prompt.text.endswith("29" + "q" * 8)
    assert plan.truncation is not None
    assert plan.truncation.dropped_tokens == 600 - plan.prompt.cells
    assert ("00q" in plan.prompt.text) == (policy == "truncate_middle")


def test_a_prompt_that_leaves_too_little_for_the_response_is_truncated_too() -> None:
    assert fit(build_turns(12), "refuse").truncation is None  # 240 of 256
    assert fit(build_turns(12), max_tokens=8).truncation is None
    assert fit(build_turns(12)).prompt.cells <= 192


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_the_turns_after_a_truncation_continue_its_prompt(policy: str) -> None:
    texts = [fit(build_turns(count), policy).prompt.text for count in range(13, 40)]
    continued = sum(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert continued >= len(texts) * 0.6  # turns of 20 in steps of 64


def test_the_turns_before_a_dropped_middle_always_stay_the_same() -> None:
    texts = [fit(build_turns(count), "truncate_middle").prompt.text for count in range(14, 60)]
    head = "".join(text for _, text in build_turns(3)[:5])  # the system message and two turns
    assert all(text.startswith(head) for text in texts)


def test_the_last_turn_stays_even_if_it_leaves_too_little_space() -> None:
    long = [*build_turns(3), ("user", "x" * 230)]
    plan = fit(long)
    assert plan.prompt.text == "s" * 10 + "x" * 230
    assert plan.truncation is not None
    assert plan.truncation.dropped_messages == 5
    assert fit([("user", "x" * 250)]).truncation is None


@pytest.mark.parametrize("messages", [[("user", "x" * 300)], [*build_turns(3), ("user", "x" * 300)]])
def test_a_last_turn_over_the_context_is_refused_with_both_lengths(messages: list[tuple[str, str]]) -> None:
    with pytest.raises(PromptTooLong) as caught:
        fit(messages)
    assert caught.value.limit == 256
    assert caught.value.cells == sum(len(text) for _, text in messages)


def test_refuse_rejects_only_what_exceeds_the_context() -> None:
    assert fit([("user", "x" * 256)], "refuse").prompt.cells == 256
    with pytest.raises(PromptTooLong):
        fit([("user", "x" * 257)], "refuse")


def test_developer_messages_are_system_messages() -> None:
    system, turns = group_turns([("system", "a"), ("developer", "b"), ("user", "c"), ("assistant", "d")])
    assert (len(system), turns) == (2, [[("user", "c"), ("assistant", "d")]])


@pytest.mark.parametrize("policy", ["shift", "truncate_middle"])
def test_the_bos_token_is_never_dropped(policy: Any) -> None:
    tokens = [BOS, *range(300)]
    fitted, truncation = fit_entries(tokens, policy, context=256, max_tokens=16, keep_start=1)
    assert (fitted[0], fitted[-1], len(fitted)) == (BOS, 299, 240)
    assert truncation is not None
    assert truncation.dropped_tokens == 61


def test_the_end_of_a_prompt_can_be_kept_whole() -> None:
    fitted, _ = fit_entries([*range(300)], "shift", context=256, max_tokens=16, keep_start=2, keep_end=200)
    assert fitted[:3] == [0, 1, 62]
    with pytest.raises(PromptTooLong):
        fit_entries([*range(300)], "shift", context=256, max_tokens=16, keep_start=2, keep_end=280)


def test_media_are_dropped_whole() -> None:
    image = Media(digest=b"i" * 32, cells=100, positions=100)
    fitted, truncation = fit_entries([BOS, 1, image, *range(200)], "shift", context=256, max_tokens=16, keep_start=1)
    assert fitted == [BOS, *range(200)]
    assert truncation is not None
    assert truncation.dropped_tokens == 101
