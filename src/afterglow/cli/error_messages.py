"""Errors as sentences for the terminal, with the flag that helps."""

from __future__ import annotations

from afterglow.errors import AfterglowError, PromptTooLong


def describe_error(error: AfterglowError, trained_context: int | None = None) -> str:
    """Describe an error in one line. `trained_context` is the context length that the model was trained with.

    >>> describe_error(PromptTooLong(8021, 4096))
    'The prompt is 8,021 tokens but the context is 4,096. Use --context 8192 or a shorter prompt.'
    """
    if isinstance(error, PromptTooLong):
        return describe_long_prompt(error, trained_context)
    return str(error)


def describe_long_prompt(error: PromptTooLong, trained_context: int | None) -> str:
    """Describe a prompt that exceeds the context, and the context that it needs."""
    numbers = f"The prompt is {error.cells:,} tokens but the context is {error.limit:,}."
    if trained_context is not None and error.cells >= trained_context:
        if error.limit >= trained_context:
            return f"{numbers} The model was trained with {trained_context:,}: use a shorter prompt or another model."
        return (
            f"{numbers} Use a shorter prompt; --context {trained_context} is the most that the model was trained with."
        )
    context = 1 << error.cells.bit_length()  # the next power of two
    if trained_context is not None:
        context = min(context, trained_context)
    return f"{numbers} Use --context {context} or a shorter prompt."
