"""Errors in the terminal: sentences without class names, with the flag that helps."""

from __future__ import annotations

import pytest

from afterglow.cli.error_messages import describe_error
from afterglow.errors import EngineCrashed, PromptTooLong


@pytest.mark.parametrize(
    ("tokens", "context", "trained", "advice"),
    [
        (8021, 4096, None, "Use --context 8192 or a shorter prompt."),
        (8192, 4096, 131_072, "Use --context 16384 or a shorter prompt."),
        (9000, 4096, 10_000, "Use --context 10000 or a shorter prompt."),
        (9000, 4096, 8192, "Use a shorter prompt; --context 8192 is the most that the model was trained with."),
        (9000, 8192, 8192, "The model was trained with 8,192: use a shorter prompt or another model."),
    ],
)
def test_a_long_prompt_names_the_context_that_it_needs(
    tokens: int, context: int, trained: int | None, advice: str
) -> None:
    text = describe_error(PromptTooLong(tokens, context), trained)
    assert text == f"The prompt is {tokens:,} tokens but the context is {context:,}. {advice}"


def test_other_errors_have_no_class_name() -> None:
    assert describe_error(EngineCrashed("signal SIGSEGV")) == "the engine crashed: signal SIGSEGV"
