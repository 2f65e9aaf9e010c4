"""A llava projector and a llama model that name the color of an image by one letter, by construction.

The projector's rows have an image flag and the mean color of a patch. The model has one head that attends only to
image rows; it generates the letter of the nearest corner of the color cube, then the end token. Without an image it
generates N. All other tensors are present and contribute nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from afterglow.testing.models import vocabulary
from afterglow.testing.models.answer_head import write_answer_head
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.decoder import open_text_model_writer
from afterglow.testing.models.projector import EMBEDDING_LENGTH as PATCH_WIDTH
from afterglow.testing.models.projector import (
    FEED_FORWARD_LENGTH,
    PATCH_PIXELS,
    ProjectorSize,
    write_projector_metadata,
)
from afterglow.testing.models.writer import FloatArray, ModelWriter, draw_noise

# Black (K), blue, green, cyan, red, magenta, yellow, white: red, green and blue counted in binary.
LETTERS = b"KBGCRMYW"
NO_IMAGE_LETTER = b"N"
EMBEDDING_LENGTH = 64
# Axes of the residual stream: three of color, one for "the answer was given", and the type of a row.
COLOR_AXIS, ANSWERED_AXIS, TEXT_AXIS, IMAGE_AXIS = 0, 3, 4, 5
ANSWER_LOGIT = 20.0
IMAGE_SIDE_PIXELS = 32


def _build_color_corners() -> FloatArray:
    """Return the colors of the letters, each component -1 or 1."""
    return np.array(list(itertools.product((-1, 1), repeat=3)), np.float32)


def _build_token_embedding() -> FloatArray:
    """Return a row per token: the text flag, its identity, and whether it is an answer."""
    table = draw_noise(11, "tokens", vocabulary.VOCABULARY_SIZE, EMBEDDING_LENGTH, scale=0.2)
    table[:, : IMAGE_AXIS + 1] = 0.0
    table[:, TEXT_AXIS] = 2.0
    table[[vocabulary.get_byte_token(letter) for letter in LETTERS + NO_IMAGE_LETTER], ANSWERED_AXIS] = 8.0
    return table


def _build_output() -> FloatArray:
    """Return a row per token: letters respond to colors, N to text alone, and the end of a turn to an answer."""
    table = draw_noise(11, "output", vocabulary.VOCABULARY_SIZE, EMBEDDING_LENGTH, scale=0.02)
    for letter, corner in zip(LETTERS, _build_color_corners(), strict=True):
        table[vocabulary.get_byte_token(letter), COLOR_AXIS : COLOR_AXIS + 3] = corner * ANSWER_LOGIT / 8
    table[vocabulary.get_byte_token(NO_IMAGE_LETTER[0]), TEXT_AXIS] = ANSWER_LOGIT / 24
    table[vocabulary.TURN_END_TOKEN, ANSWERED_AXIS] = ANSWER_LOGIT
    return table


def write_model(path: Path) -> None:
    """Write the text model."""
    model = Llama(layers=1)
    with open_text_model_writer(path, model, seed=11) as writer:
        writer.add_tensor("token_embd.weight", _build_token_embedding())
        writer.add_constant("output_norm.weight", 1.0, EMBEDDING_LENGTH)
        writer.add_tensor("output.weight", _build_output())
        block = "blk.0"
        writer.add_constant(f"{block}.attn_norm.weight", 1.0, EMBEDDING_LENGTH)
        writer.add_constant(f"{block}.ffn_norm.weight", 1.0, EMBEDDING_LENGTH)
        color_axes = range(COLOR_AXIS, COLOR_AXIS + 3)
        image_axes = range(IMAGE_AXIS, IMAGE_AXIS + 1)
        write_answer_head(writer, block, model, query_axis=TEXT_AXIS, key_axes=image_axes, value_axes=color_axes)
        for name, rows, columns in (
            ("gate", 128, EMBEDDING_LENGTH),
            ("up", 128, EMBEDDING_LENGTH),
            ("down", EMBEDDING_LENGTH, 128),
        ):
            writer.add_constant(f"{block}.ffn_{name}.weight", 0.0, rows, columns)


def write_projector(path: Path) -> None:
    """Write the projector: each row is the mean color of its patch and the image flag."""
    layers, patches = 2, (IMAGE_SIDE_PIXELS // PATCH_PIXELS) ** 2  # mtmd skips the second layer
    size = ProjectorSize(layers=layers, image_pixels=IMAGE_SIDE_PIXELS, text_embedding_length=EMBEDDING_LENGTH)
    with ModelWriter(path, "clip", seed=11, kind="mmproj") as writer:
        write_projector_metadata(writer, "mlp", size, {})
        writer.add_tensor("v.patch_embd.weight", _build_patch_embedding(), half=True)
        positions = np.zeros((patches + 1, PATCH_WIDTH), np.float32)
        positions[:, 6], positions[:, 7] = 1.0, -1.0  # the image flag; a pair, so that the norm does not shift it
        writer.add_tensor("v.position_embd.weight", positions)
        writer.add_constant("v.class_embd", 0.0, PATCH_WIDTH)
        writer.add_norm("v.pre_ln", PATCH_WIDTH)
        for layer in range(layers):
            _write_silent_block(writer, f"v.blk.{layer}")
        writer.add_norm("v.post_ln", PATCH_WIDTH)
        _write_projection(writer)


def _build_patch_embedding() -> FloatArray:
    """Return weights for the mean of each color channel in a patch, and its negative."""
    weights = np.zeros((PATCH_WIDTH, 3, PATCH_PIXELS, PATCH_PIXELS), np.float32)
    for channel in range(3):
        weights[2 * channel, channel], weights[2 * channel + 1, channel] = 1 / PATCH_PIXELS**2, -1 / PATCH_PIXELS**2
    return weights


def _write_silent_block(writer: ModelWriter, block: str) -> None:
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        writer.add_linear(f"{block}.{name}", PATCH_WIDTH, PATCH_WIDTH, gain=0.0)
    writer.add_linear(f"{block}.ffn_up", FEED_FORWARD_LENGTH, PATCH_WIDTH, gain=0.0)
    writer.add_linear(f"{block}.ffn_down", PATCH_WIDTH, FEED_FORWARD_LENGTH, gain=0.0)
    writer.add_norm(f"{block}.ln1", PATCH_WIDTH)
    writer.add_norm(f"{block}.ln2", PATCH_WIDTH)


def _write_projection(writer: ModelWriter) -> None:
    """Project colors and image flag into the residual stream: gelu(x) - gelu(-x) is x."""
    first = np.zeros((EMBEDDING_LENGTH, PATCH_WIDTH), np.float32)
    second = np.zeros((EMBEDDING_LENGTH, EMBEDDING_LENGTH), np.float32)
    scales = [(COLOR_AXIS, 1.0), (COLOR_AXIS + 1, 1.0), (COLOR_AXIS + 2, 1.0), (IMAGE_AXIS, 4.0)]
    for index, (axis, scale) in enumerate(scales):
        first[2 * index, 2 * index], first[2 * index + 1, 2 * index] = 1.0, -1.0
        second[axis, 2 * index], second[axis, 2 * index + 1] = scale, -scale
    for name, array in (("mm.0", first), ("mm.2", second)):
        writer.add_tensor(f"{name}.weight", array)
        writer.add_constant(f"{name}.bias", 0.0, EMBEDDING_LENGTH)


MODEL_WRITERS: dict[str, Callable[[Path], None]] = {"colors": write_model, "projector-colors": write_projector}
