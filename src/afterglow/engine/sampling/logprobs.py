"""Log-probabilities of tokens: the log-softmax of a row of logits, and its most likely tokens."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.candidates import find_largest

TokenLogprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and those of the most likely tokens at its position."""


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the natural logarithm of every token's probability, in double precision."""
    row: NDArray[np.float64] = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return row


def find_top_logprobs(
    logits: NDArray[np.float32], logprobs: NDArray[np.float64], count: int
) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens with their log-probabilities. Ties: the smaller token id first."""
    return tuple((token, float(logprobs[token])) for token in find_largest(logits, count))
