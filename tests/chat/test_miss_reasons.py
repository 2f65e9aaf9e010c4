"""Why a prompt missed, in words: the cause that a person would name."""

from __future__ import annotations

import pytest

from afterglow.chat.miss_reasons import explain_miss, find_last_role
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
    "thoughts left out": (
        "reasoning stripped", f"{SYSTEM}Be kind.{USER}2+2?{ASSISTANT}",
        f"4{USER}And 3+3?", f"<think>\nTwo and two.\n</think>\n\n4{USER}And 3+3?",
    ),
    "thoughts left out of a template that opens them": (
        "reasoning stripped", f"{SYSTEM}Be kind.{USER}2+2?{ASSISTANT}<think>\n",
        f"\n</think>\n\n4{USER}", "Two.\n</think>\n\n4",
    ),
    "another system prompt": ("system prompt", f"{SYSTEM}You are ", f"a pirate.{USER}Hi", f"helpful.{USER}Hi"),
    "a developer's message": ("system prompt", "<|start|>developer<|message|># Be ", "brief", "kind"),
    "an edited answer": ("answer changed", f"{SYSTEM}Be kind.{USER}Hi{ASSISTANT}Hello, ", "dear", "friend"),
    "another question": ("another question", f"{SYSTEM}Be kind.{USER}My colour is ", "blue", "green"),
    "another question to mistral": ("another question", "<s>[INST] My colour is ", "blue", "green"),
    "another question to gemma": ("another question", "<start_of_turn>user\nMy colour is ", "blue", "green"),
    "another result": ("tool result", f"{USER}Hi<|im_end|>\n<|im_start|>tool\n", "sunny", "rainy"),
    "a gap more": ("white space", f"{SYSTEM}Be", "  kind.", " kind."),
    "a line more": ("white space", f"{SYSTEM}Be kind.", "\n\nAnd good.", "\nAnd good."),
    "plain text": ("another text", "Once upon a time there was a ", "king", "queen"),
    "other tokens": ("other tokens", "Hel", "lo", "lo wor"),
}  # fmt: skip


def found(*, prompt: int = 100, reused: int = 40, shared: int = 40, evicted: int = 0, cause: MissCause = "all of it"):
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
def test_a_difference_has_the_cause_that_a_person_would_name(case: str) -> None:
    likely, before, ours, theirs = CASES[case]
    words = explain_miss(found(), shared_text=before, prompt_text=ours, cached_text=theirs)
    assert words.reason == likely
    assert words.prompt_text in words.message
    assert words.cached_text in words.message


@pytest.mark.parametrize(
    ("explanation", "texts", "likely"),
    [
        (found(reused=0, shared=0, cause="nothing in common"), ("", "Hi", ""), "nothing kept"),
        (found(reused=99, shared=100), ("Hi", "", " there"), "all of it"),
        (found(), ("Hi", " there", ""), "goes on"),
        (found(evicted=80, cause="evicted"), ("Hi", " there", " now"), "evicted"),
        (found(reused=8, cause="no checkpoint"), ("Hi", " there", " now"), "no checkpoint"),
        (found(reused=8, cause="window passed"), ("Hi", " there", " now"), "window passed"),
        (found(reused=32, cause="on the grid"), ("Hi", " there", " now"), "on the grid"),
    ],
)
def test_what_memory_is_to_blame_for_is_said_first(explanation, texts, likely) -> None:
    before, ours, theirs = texts
    words = explain_miss(explanation, shared_text=before, prompt_text=ours, cached_text=theirs)
    assert words.reason == likely
    assert f"{explanation.reused} of 100 tokens" in words.message


def test_long_texts_are_shown_in_part() -> None:
    words = explain_miss(found(), shared_text="a" * 500 + " ", prompt_text="b" * 500, cached_text="c" * 500)
    assert len(words.message) < 600
    assert words.shared_text.startswith("…")
    assert words.prompt_text.endswith("…")


def test_a_text_without_messages_has_no_role() -> None:
    assert find_last_role("Once upon a time the user said") is None
