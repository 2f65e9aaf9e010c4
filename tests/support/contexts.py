"""Small steps that the binding's tests share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.context import LlamaContext

MEMORIES = ("attention", "window", "recurrent", "hybrid")
LAYOUTS = (False, True)
CLOSE = 5e-3  # another split of the same prompt moves logits by this much at most; a wrong past by far more


def tokens(count: int, seed: int = 0) -> list[int]:
    """Ordinary tokens of the tiny vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, count)]


def feed(context: LlamaContext, sequence: int, ids: list[int], position: int = 0) -> NDArray[np.float32]:
    """Decode `ids` in as many batches as it takes; the logits after the last, as a copy."""
    step = context.batch.capacity
    for start in range(0, len(ids), step):
        chunk = ids[start : start + step]
        context.batch.clear()
        context.batch.add(chunk, position=position + start, sequence=sequence, outputs=1)
        context.decode()
    return context.get_logits(len(chunk) - 1).copy()


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max())
