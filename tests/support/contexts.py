"""Helpers for tests of the binding: random tokens, decodes, comparison of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.context import LlamaContext

MEMORY_KINDS = ("attention", "window", "recurrent", "hybrid")
KV_LAYOUTS = (False, True)  # values of `kv_unified`
LOGIT_TOLERANCE = 5e-3  # a different batch split changes logits by at most this; a wrong prefix by far more


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Return random ordinary tokens of the tiny vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, count)]


def decode_tokens(context: LlamaContext, sequence: int, tokens: list[int], position: int = 0) -> NDArray[np.float32]:
    """Decode `tokens` in as many batches as needed; return a copy of the logits after the last."""
    step = context.batch.capacity
    for start in range(0, len(tokens), step):
        chunk = tokens[start : start + step]
        context.batch.clear()
        context.batch.add(chunk, position=position + start, sequence=sequence, outputs=1)
        context.decode()
    return context.get_logits(len(chunk) - 1).copy()


def max_difference(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    return float(np.abs(first - second).max())
