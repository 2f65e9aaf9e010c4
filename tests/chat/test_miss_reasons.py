"""Explanations of prefix misses: the reason and the message."""

from __future__ import annotations

from typing import get_args

import pytest

from afterglow.chat.miss_reasons import (
    CACHE_REASON_MESSAGES,
    REASON_SUMMARIES,
    TEXT_REASON_MESSAGES,
    MissReason,
    explain_miss,
    find_last_role,
)
from afterglow.engine.kvcache.explain import Explanation, MissCause

SYSTEM = "<|im_start|>system\n"
USER = "<|im_end|>\n<|im_start|>user\n"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>system<|end_header_id|>\n\n"
WEATHER = '{"type": "function", "function": {"name": "weather", "parameters": {}}}'
CLOCK = '{"type": "function", "function": {"name": "clock", "parameters": {}}}'

CASES = {
    "a date of numbers": ("date", f"{SYSTEM}The date is 2026-11-1", f"5. Be kind.{USER}Hi", f"4. Be kind.{USER}Hi"),
    "a weekday": ("date", f"{SYSTEM}Today is ", "Tuesday. Be kind.", "Monday. Be kind."),
    "a month": ("date", f"{LLAMA}Today Date: 26 ", "Jul 2024", "Aug 2024"),
    "a time": ("date", f"{SYSTEM}It is 1", "2:30 now", "1:59 now"),
    "a number": ("number", f"{SYSTEM}You have ", "17 apples.", "23 apples."),
    "the order of tools": (
        "tools reordered", f"{SYSTEM}<tools>\n",
        f"{WEATHER}\n{CLOCK}\n</tools>{USER}Hi", f"{CLOCK}\n{WEATHER}\n</tools>{USER}Hi",
    ),
    "one more tool": ("tools changed", f"{SYSTEM}<tools>\n{WEATHER}\n", f"{CLOCK}\n</tools>", f"</tools>{USER}Hi"),
    "another description": (
        "tools changed", f'{SYSTEM}<tools>\n{{"function": {{"name": "clock", "description": "', 'Tells"}}', 'Says"}}',
    ),
    "a number in a tool": (
        "tools changed", f'{SYSTEM}<tools>\n{{"function": {{"name": "clock", "description": "At most ', '5"}}', '6"}}',
    ),
    "reasoning stripped": (
        "reasoning stripped", f"{SYSTEM}Be kind.{USER}2+2?{ASSISTANT}",
        f"4{USER}And 3+3?", f"<think>\nTwo and two.\n</think>\n\n4{USER}And 3+3?",
    ),
    "reasoning stripped by a template that opens it": (
        "reasoning stripped", f"{SYSTEM}Be kind.{USER}2+2?{ASSISTANT}<think>\n",
        f"\n</think>\n\n4{USER}", "Two.\n</think>\n\n4",
    ),
    "another system prompt": ("system prompt", f"{SYSTEM}You are ", f"a pirate.{USER}Hi", f"helpful.{USER}Hi"),
    "a developer's message": ("system prompt", "<|start|>developer<|message|># Be ", "brief", "kind"),
    "an edited answer": ("assistant message", f"{SYSTEM}Be kind.{USER}Hi{ASSISTANT}Hello, ", "dear", "friend"),
    "another question": ("user message", f"{SYSTEM}Be kind.{USER}My colour is ", "blue", "green"),
    "another question to mistral": ("user message", "<s>[INST] My colour is ", "blue", "green"),
    "another question to gemma": ("user message", "<start_of_turn>user\nMy colour is ", "blue", "green"),
    "another result": ("tool result", f"{USER}Hi<|im_end|>\n<|im_start|>tool\n", "sunny", "rainy"),
    "one more space": ("whitespace", f"{SYSTEM}Be", "  kind.", " kind."),
    "one more newline": ("whitespace", f"{SYSTEM}Be kind.", "\n\nAnd good.", "\nAnd good."),
    "plain text": ("text", "Once upon a time there was a ", "king", "queen"),
    "other tokens": ("tokenization", "Hel", "lo", "lo wor"),
}  # fmt: skip


def build_explanation(
    *, prompt: int = 100, reused: int = 40, shared: int = 40, evicted: int = 0, cause: MissCause = "fully reused"
) -> Explanation:
    return Explanation(
        prompt_entries=prompt,
        reused_entries=reused,
        shared_entries=shared,
        next_prompt_entry=1,
        next_cached_entry=2,
        cause=cause,
        evicted_entries=evicted,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_text_difference_has_the_expected_reason(case: str) -> None:
    reason, shared_text, prompt_text, cached_text = CASES[case]
    report = explain_miss(
        build_explanation(), shared_text=shared_text, prompt_text=prompt_text, cached_text=cached_text
    )
    assert report.reason == reason
    assert report.prompt_text in report.message
    assert report.cached_text in report.message


@pytest.mark.parametrize(
    ("explanation", "texts", "reason"),
    [
        (build_explanation(reused=0, shared=0, cause="nothing in common"), ("", "Hi", ""), "not cached"),
        (build_explanation(reused=99, shared=100), ("Hi", "", " there"), "fully reused"),
        (build_explanation(reused=100, shared=100), ("Hi", "", " there"), "repeated"),
        (build_explanation(), ("Hi", " there", ""), "continuation"),
        (build_explanation(evicted=80, cause="evicted"), ("Hi", " there", " now"), "evicted"),
        (build_explanation(reused=8, cause="no checkpoint"), ("Hi", " there", " now"), "no checkpoint"),
        (build_explanation(reused=8, cause="window moved"), ("Hi", " there", " now"), "window moved"),
        (build_explanation(reused=32, cause="deterministic grid"), ("Hi", " there", " now"), "deterministic grid"),
    ],
)
def test_cache_reasons_take_precedence_over_text_reasons(explanation, texts, reason) -> None:
    shared_text, prompt_text, cached_text = texts
    report = explain_miss(explanation, shared_text=shared_text, prompt_text=prompt_text, cached_text=cached_text)
    assert report.reason == reason
    assert f"{explanation.reused_entries} of 100 tokens" in report.message


def test_long_texts_are_truncated() -> None:
    report = explain_miss(
        build_explanation(), shared_text="a" * 500 + " ", prompt_text="b" * 500, cached_text="c" * 500
    )
    assert len(report.message) < 600
    assert report.shared_text.startswith("…")
    assert report.prompt_text.endswith("…")


def test_a_text_without_messages_has_no_role() -> None:
    assert find_last_role("Once upon a time the user said") is None


def test_every_reason_has_a_summary_and_a_message():
    reasons = set(get_args(MissReason))
    assert REASON_SUMMARIES.keys() == reasons
    assert CACHE_REASON_MESSAGES.keys() | TEXT_REASON_MESSAGES.keys() == reasons
