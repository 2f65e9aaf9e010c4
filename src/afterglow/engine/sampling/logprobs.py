"""Log-probabilities of given tokens. Scoring uses a context of its own, so that it disturbs no conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.candidates import find_largest
from afterglow.llama.context import LlamaContext

MIN_SCORING_CELLS = 512
SCORING_SEQUENCE = 0  # the only one of a scoring context
TokenLogprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and those of the most likely tokens at its position."""


@dataclass(frozen=True, slots=True)
class ScoringWindow:
    """One pass: tokens [start, stop) are decoded from position 0, those from `score_start` on are scored."""

    start: int
    score_start: int
    stop: int


def plan_windows(token_count: int, window_size: int) -> list[ScoringWindow]:
    """Return windows that score the tokens from 1 on, each once. They overlap by half, so each token has context."""
    windows = [ScoringWindow(0, 1, min(token_count, window_size))]
    while windows[-1].stop < token_count:
        score_start = windows[-1].stop
        start = score_start - window_size // 2
        windows.append(ScoringWindow(start, score_start, min(token_count, start + window_size)))
    return windows


def get_scoring_context(target: LlamaContext, token_count: int) -> LlamaContext:
    """Return the context, with one sequence, that scores texts of `token_count` tokens; a longer text replaces it."""
    return target.get_companion("scoring", lambda: _create_scoring_context(target, token_count), min_cells=token_count)


def _create_scoring_context(target: LlamaContext, token_count: int) -> LlamaContext:
    cells = max(MIN_SCORING_CELLS, 1 << (token_count - 1).bit_length())
    settings = replace(
        target.settings,
        cells=min(cells, target.cells_per_sequence),
        sequences=1,
        kv_unified=False,
        recurrent_snapshots=0,
        batch=min(target.batch.capacity, target.max_outputs),  # every row has an output
    )
    return LlamaContext(target.model, settings, owner=target)


def score_tokens(
    context: LlamaContext, tokens: NDArray[np.int32], position: int, count: int, *, alternatives: int
) -> list[TokenLogprob]:
    """Decode all tokens but the last. Return the log-probabilities of the last `count`, with the top alternatives."""
    context.batch.clear()
    context.batch.add(tokens[:-1], position=position, sequence=SCORING_SEQUENCE, outputs=count)
    context.decode()
    scored = []
    for row in range(len(tokens) - 1 - count, len(tokens) - 1):
        logits = context.get_logits(row)
        logprobs = log_softmax(logits)
        scored.append((float(logprobs[tokens[row + 1]]), find_top_logprobs(logits, logprobs, alternatives)))
    return scored


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
