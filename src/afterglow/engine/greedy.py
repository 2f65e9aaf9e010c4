"""The plainest loop there is: decode, take the most likely token, again. One request at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument, PromptTooLong
from afterglow.llama.context import Context


def generate(context: Context, sequence: int, prompt: NDArray[np.int32], max_tokens: int) -> Iterator[int]:
    """Yield up to `max_tokens` tokens after `prompt`, fewer where the model ends or the context is full.

    The sequence is empty before and after.
    """
    limit, ends = context.cells_per_sequence, context.model.vocabulary.ends
    if not len(prompt):
        raise InvalidArgument("prompt", "must have at least one token")
    if len(prompt) > limit:
        raise PromptTooLong(len(prompt), limit)
    try:
        row = _prefill(context, sequence, prompt)
        for position in range(len(prompt), min(len(prompt) + max_tokens, limit + 1)):
            token = int(context.logits(row).argmax())
            yield token
            if token in ends or position == limit:
                return
            context.batch.clear()
            context.batch.add([token], position=position, sequence=sequence, outputs=1)
            context.decode()
            row = 0
    finally:
        context.memory.remove(sequence)


def _prefill(context: Context, sequence: int, prompt: NDArray[np.int32]) -> int:
    """Decode the prompt in batches; the row of the last batch that has the logits after it."""
    step = context.batch.capacity
    for start in range(0, len(prompt), step):
        chunk = prompt[start : start + step]
        context.batch.clear()
        context.batch.add(chunk, position=start, sequence=sequence, outputs=int(start + step >= len(prompt)))
        context.decode()
    return len(chunk) - 1
