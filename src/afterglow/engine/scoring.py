"""How likely a model finds given tokens. Uses a sequence of its own and leaves it empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.context import Context

Work = Callable[[], list[float]]
Run = Callable[[Work], list[float]]
Scored: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]  # a log-probability, and those of the likeliest tokens


@dataclass(frozen=True, slots=True)
class Span:
    """One pass: tokens [start, stop) are decoded from position 0, those from `scored` on are scored."""

    start: int
    scored: int
    stop: int


def spans(count: int, limit: int) -> list[Span]:
    """Passes that score tokens 1 … count-1, each once. Later passes begin half a context early, so that every
    token is scored with at least half a context before it."""
    passes = [Span(0, 1, min(count, limit))]
    while passes[-1].stop < count:
        scored = passes[-1].stop
        start = scored - limit // 2
        passes.append(Span(start, scored, min(count, start + limit)))
    return passes


def logprobs(context: Context, sequence: int, tokens: NDArray[np.int32], run: Run) -> tuple[list[float], int]:
    """The log-probability of each token but the first, and in how many passes they were computed.

    Each decode goes through `run`, so that others can use the context between two of them.
    """
    if len(tokens) < 2:
        raise InvalidArgument("tokens", f"must be at least 2 to score one, not {len(tokens)}")
    passes = spans(len(tokens), context.cells_per_sequence)
    values: list[float] = []
    try:
        for span in passes:
            run(lambda: [float(context.memory.remove(sequence))])
            values += _score(context, sequence, tokens[span.start : span.stop], span.scored - span.start, run)
    finally:
        run(lambda: [float(context.memory.remove(sequence))])
    return values, len(passes)


def _score(context: Context, sequence: int, tokens: NDArray[np.int32], scored: int, run: Run) -> Iterator[float]:
    step = min(context.max_outputs, context.batch.capacity)
    for start in range(0, len(tokens) - 1, step):  # the last token predicts nothing we were asked for
        stop = min(start + step, len(tokens) - 1)
        wanted = range(max(start, scored - 1), stop)

        def work(start: int = start, stop: int = stop, wanted: range = wanted) -> list[float]:
            rows = score_rows(context, sequence, tokens[start : stop + 1], start, len(wanted), alternatives=0)
            return [logprob for logprob, _ in rows]

        yield from run(work)


def score_rows(
    context: Context, sequence: int, tokens: NDArray[np.int32], position: int, count: int, *, alternatives: int
) -> list[Scored]:
    """Decode all tokens but the last, and say how likely each of the last `count` was, and what was likelier."""
    context.batch.clear()
    context.batch.add(tokens[:-1], position=position, sequence=sequence, outputs=count)
    context.decode()
    scored = []
    for row in range(len(tokens) - 1 - count, len(tokens) - 1):
        values = log_probabilities(context.logits(row))
        scored.append((float(values[tokens[row + 1]]), likeliest(values, alternatives)))
    return scored


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The natural logarithm of every token's probability, in double precision."""
    row: NDArray[np.float64] = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return row


def likeliest(values: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens, with their log-probabilities; among equals, the smaller number first."""
    return tuple((int(token), float(values[token])) for token in np.argsort(-values, kind="stable")[:count])
