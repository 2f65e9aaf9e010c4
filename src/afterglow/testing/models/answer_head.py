"""Attention head of the models that name an image's color or a note: text rows attend to media rows."""

from __future__ import annotations

import numpy as np

from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import ModelWriter

QUERY_GAIN = 2.0  # the score of a media row is about 24, that of text 0: media outweighs any amount of text


def write_answer_head(
    writer: ModelWriter, block: str, model: Llama, *, query_axis: int, key_axes: range, value_axes: range
) -> None:
    """Write a head with which rows with a value on `query_axis` attend to rows with values on `key_axes`.

    It copies their values on `value_axes`.
    """
    width, last = model.embedding_length, model.head_size - 2  # the dimensions that RoPE rotates slowest
    query, key = np.zeros((width, width), np.float32), np.zeros((model.kv_heads * model.head_size, width), np.float32)
    value, output = np.zeros_like(key), np.zeros((width, width), np.float32)
    query[last, query_axis] = QUERY_GAIN
    key[last, key_axes] = 1.0
    for index, axis in enumerate(value_axes):
        value[index, axis] = 1.0
        output[axis, index] = 4.0
    for name, array in (("q", query), ("k", key), ("v", value), ("output", output)):
        writer.add_tensor(f"{block}.attn_{name}.weight", array)
