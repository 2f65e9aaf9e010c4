"""Log-probabilities of given tokens. Scoring uses a context of its own, so that it disturbs no conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.context import LlamaContext

ResultT = TypeVar("ResultT")
MIN_SCORING_CELLS = 512
SCORING_SEQUENCE = 0  # the only one of a scoring context
TokenLogprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and those of the most likely tokens at its position."""


class TaskRunner(Protocol):
    """Runs a task in the thread of the engine and returns its result."""

    def __call__(self, task: Callable[[], ResultT], /) -> ResultT: ...


@dataclass(frozen=True, slots=True)
class ScoringWindow:
    """One pass: tokens [start, stop) are decoded from position 0, those from `score_start` on are scored."""

    start: int
    score_start: int
    stop: int


def plan_windows(token_count: int, window_size: int) -> list[ScoringWindow]:
    """Return the windows that score tokens 1 to `token_count - 1`, each once.

    Windows overlap by half, so that every token after the first window has at least half a window before it.
    """
    windows = [ScoringWindow(0, 1, min(token_count, window_size))]
    while windows[-1].stop < token_count:
        score_start = windows[-1].stop
        start = score_start - window_size // 2
        windows.append(ScoringWindow(start, score_start, min(token_count, start + window_size)))
    return windows


def get_scoring_context(target: LlamaContext, token_count: int) -> LlamaContext:
    """Return the context that scores texts of `token_count` tokens beside `target`.

    It has one sequence, and cells for the text only; it is replaced when a text is longer.
    """
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


def compute_logprobs(target: LlamaContext, tokens: NDArray[np.int32], run: TaskRunner) -> tuple[list[float], int]:
    """Return the log-probability of each token but the first, and the number of windows.

    Each decode goes through `run`, so that other requests run between two of them.
    """
    if len(tokens) < 2:
        raise InvalidArgument("tokens", f"must be at least 2 to score one, not {len(tokens)}")
    windows = plan_windows(len(tokens), target.cells_per_sequence)
    context = run(lambda: get_scoring_context(target, min(len(tokens), target.cells_per_sequence)))
    logprobs: list[float] = []
    for window in windows:
        run(lambda: context.memory.remove(SCORING_SEQUENCE))
        logprobs += _score_window(context, tokens[window.start : window.stop], window.score_start - window.start, run)
    return logprobs, len(windows)


def _score_window(
    context: LlamaContext, tokens: NDArray[np.int32], score_start: int, run: TaskRunner
) -> Iterator[float]:
    step = context.batch.capacity
    for start in range(0, len(tokens) - 1, step):  # the logits after the last token are not needed
        stop = min(start + step, len(tokens) - 1)
        scored = range(max(start, score_start - 1), stop)

        def score_step(start: int = start, stop: int = stop, scored: range = scored) -> list[float]:
            rows = score_tokens(context, tokens[start : stop + 1], start, len(scored), alternatives=0)
            return [logprob for logprob, _ in rows]

        yield from run(score_step)


def score_tokens(
    context: LlamaContext, tokens: NDArray[np.int32], position: int, count: int, *, alternatives: int
) -> list[TokenLogprob]:
    """Decode all tokens but the last. Return the log-probabilities of the last `count`, with the top alternatives."""
    context.batch.clear()
    context.batch.add(tokens[:-1], position=position, sequence=SCORING_SEQUENCE, outputs=count)
    context.decode()
    scored = []
    for row in range(len(tokens) - 1 - count, len(tokens) - 1):
        logprobs = log_softmax(context.get_logits(row))
        scored.append((float(logprobs[tokens[row + 1]]), find_top_logprobs(logprobs, alternatives)))
    return scored


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the natural logarithm of every token's probability, in double precision."""
    row: NDArray[np.float64] = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return row


def find_top_logprobs(logprobs: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens with their log-probabilities. Ties: the smaller token id first."""
    return tuple((int(token), float(logprobs[token])) for token in np.argsort(-logprobs, kind="stable")[:count])
