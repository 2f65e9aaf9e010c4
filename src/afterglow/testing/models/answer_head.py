"""The one head of the pairs that name what they see or hear: text asks, and rows of a certain kind answer."""

from __future__ import annotations

import numpy as np

from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import ModelWriter

QUERY_GAIN = 2.0  # makes the score of a row that answers about 24, that of text is 0: it outweighs any context


def write_answer_head(
    writer: ModelWriter, block: str, model: Llama, *, query_axis: int, key_axes: range, value_axes: range
) -> None:
    """Rows with `asks` on that axis look at rows with something on the axes of `marks`, and get what those have on the
    axes of `answer`."""
    width, last = model.embedding_length, model.head_size - 2  # the pair of a head that positions turn slowest
    query, key = np.zeros((width, width), np.float32), np.zeros((model.kv_heads * model.head_size, width), np.float32)
    value, output = np.zeros_like(key), np.zeros((width, width), np.float32)
    query[last, query_axis] = QUERY_GAIN
    key[last, key_axes] = 1.0
    for place, axis in enumerate(value_axes):
        value[place, axis] = 1.0
        output[axis, place] = 4.0
    for name, array in (("q", query), ("k", key), ("v", value), ("output", output)):
        writer.add_tensor(f"{block}.attn_{name}.weight", array)
