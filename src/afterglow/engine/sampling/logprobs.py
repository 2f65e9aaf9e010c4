"""How likely a model finds given tokens. Uses a sequence of its own and leaves it empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.context import LlamaContext

ScoringTask = Callable[[], list[float]]
TaskRunner = Callable[[ScoringTask], list[float]]
TokenLogprob: TypeAlias = tuple[
    float, tuple[tuple[int, float], ...]
]  # a log-probability, and those of the likeliest tokens


@dataclass(frozen=True, slots=True)
class ScoringWindow:
    """One pass: tokens [start, stop) are decoded from position 0, those from `scored` on are scored."""

    start: int
    score_start: int
    stop: int


def plan_windows(token_count: int, window_size: int) -> list[ScoringWindow]:
    """Passes that score tokens 1 … count-1, each once. Later passes begin half a context early, so that every
    token is scored with at least half a context before it."""
    passes = [ScoringWindow(0, 1, min(token_count, window_size))]
    while passes[-1].stop < token_count:
        scored = passes[-1].stop
        start = scored - window_size // 2
        passes.append(ScoringWindow(start, scored, min(token_count, start + window_size)))
    return passes


def compute_logprobs(
    context: LlamaContext, sequence: int, tokens: NDArray[np.int32], run: TaskRunner
) -> tuple[list[float], int]:
    """The log-probability of each token but the first, and in how many passes they were computed.

    Each decode goes through `run`, so that others can use the context between two of them.
    """
    if len(tokens) < 2:
        raise InvalidArgument("tokens", f"must be at least 2 to score one, not {len(tokens)}")
    passes = plan_windows(len(tokens), context.cells_per_sequence)
    values: list[float] = []
    try:
        for span in passes:
            run(lambda: [float(context.memory.remove(sequence))])
            values += _score_window(
                context, sequence, tokens[span.start : span.stop], span.score_start - span.start, run
            )
    finally:
        run(lambda: [float(context.memory.remove(sequence))])
    return values, len(passes)


def _score_window(
    context: LlamaContext, sequence: int, tokens: NDArray[np.int32], score_start: int, run: TaskRunner
) -> Iterator[float]:
    step = min(context.max_outputs, context.batch.capacity)
    for start in range(0, len(tokens) - 1, step):  # the last token predicts nothing we were asked for
        stop = min(start + step, len(tokens) - 1)
        wanted = range(max(start, score_start - 1), stop)

        def work(start: int = start, stop: int = stop, wanted: range = wanted) -> list[float]:
            rows = score_tokens(context, sequence, tokens[start : stop + 1], start, len(wanted), alternatives=0)
            return [logprob for logprob, _ in rows]

        yield from run(work)


def score_tokens(
    context: LlamaContext, sequence: int, tokens: NDArray[np.int32], position: int, count: int, *, alternatives: int
) -> list[TokenLogprob]:
    """Decode all tokens but the last, and say how likely each of the last `count` was, and what was likelier."""
    context.batch.clear()
    context.batch.add(tokens[:-1], position=position, sequence=sequence, outputs=count)
    context.decode()
    scored = []
    for row in range(len(tokens) - 1 - count, len(tokens) - 1):
        values = log_softmax(context.get_logits(row))
        scored.append((float(values[tokens[row + 1]]), find_top_logprobs(values, alternatives)))
    return scored


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The natural logarithm of every token's probability, in double precision."""
    row: NDArray[np.float64] = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return row


def find_top_logprobs(logprobs: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens, with their log-probabilities; among equals, the smaller number first."""
    return tuple((int(token), float(logprobs[token])) for token in np.argsort(-logprobs, kind="stable")[:count])
