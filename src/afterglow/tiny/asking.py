"""The one head of the pairs that name what they see or hear: text asks, and rows of a certain kind answer."""

from __future__ import annotations

import numpy as np

from afterglow.tiny.attention import Llama
from afterglow.tiny.writer import Writer

ATTENTION = 2.0  # makes the score of a row that answers about 24, that of text is 0: it outweighs any context


def write_head(writer: Writer, block: str, model: Llama, *, asks: int, marks: range, answer: range) -> None:
    """Rows with `asks` on that axis look at rows with something on the axes of `marks`, and get what those have on the
    axes of `answer`."""
    width, last = model.embedding, model.head - 2  # the pair of a head that positions turn slowest
    query, key = np.zeros((width, width), np.float32), np.zeros((model.key_heads * model.head, width), np.float32)
    value, output = np.zeros_like(key), np.zeros((width, width), np.float32)
    query[last, asks] = ATTENTION
    key[last, marks] = 1.0
    for place, axis in enumerate(answer):
        value[place, axis] = 1.0
        output[axis, place] = 4.0
    for name, array in (("q", query), ("k", key), ("v", value), ("output", output)):
        writer.given(f"{block}.attn_{name}.weight", array)
