"""Text model that names a color or a note: text rows attend to media rows, and the answer is one letter."""

from __future__ import annotations

import numpy as np

from afterglow.testing.models import vocabulary
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import FloatArray, ModelWriter, draw_noise

EMBEDDING_LENGTH = 64
NO_MEDIA_LETTER = b"N"
ANSWER_LOGIT = 20.0
QUERY_GAIN = 2.0  # the score of a media row is about 24, that of text 0: media outweighs any amount of text


def build_token_embedding(seed: int, letters: bytes, *, axes: int, text_axis: int, answered_axis: int) -> FloatArray:
    """Return a row per token: the text flag, its identity outside the first `axes`, and whether it is an answer."""
    table = draw_noise(seed, "tokens", vocabulary.VOCABULARY_SIZE, EMBEDDING_LENGTH, scale=0.2)
    table[:, :axes] = 0.0
    table[:, text_axis] = 2.0
    table[[vocabulary.get_byte_token(letter) for letter in letters + NO_MEDIA_LETTER], answered_axis] = 8.0
    return table


def build_output(seed: int, *, text_axis: int, answered_axis: int) -> FloatArray:
    """Return a row per token: N responds to text alone, the end of a turn to an answer. The caller adds the letters."""
    table = draw_noise(seed, "output", vocabulary.VOCABULARY_SIZE, EMBEDDING_LENGTH, scale=0.02)
    table[vocabulary.get_byte_token(NO_MEDIA_LETTER[0]), text_axis] = ANSWER_LOGIT / 24
    table[vocabulary.TURN_END_TOKEN, answered_axis] = ANSWER_LOGIT
    return table


def write_answer_block(
    writer: ModelWriter, block: str, model: Llama, *, query_axis: int, key_axes: range, value_axes: range
) -> None:
    """Write a head with which rows with a value on `query_axis` attend to rows with values on `key_axes`.

    It copies their values on `value_axes`. The feed-forward network adds nothing.
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
    for name in ("gate", "up"):
        writer.add_constant(f"{block}.ffn_{name}.weight", 0.0, model.feed_forward_length, width)
    writer.add_constant(f"{block}.ffn_down.weight", 0.0, width, model.feed_forward_length)
