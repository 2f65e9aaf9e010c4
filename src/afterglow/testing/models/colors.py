"""A llava projector and a llama model that name the color of an image by one letter, by construction.

The projector's rows have an image flag and the mean color of a patch. The model has one head that attends only to
image rows; it generates the letter of the nearest corner of the color cube, then the end token. Without an image it
generates N. All other tensors are present and contribute nothing.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from afterglow.testing.models import vocabulary
from afterglow.testing.models.answer_head import (
    ANSWER_LOGIT,
    EMBEDDING_LENGTH,
    build_output,
    build_token_embedding,
    write_answer_block,
)
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.decoder import open_text_model_writer
from afterglow.testing.models.projector import EMBEDDING_LENGTH as PATCH_WIDTH
from afterglow.testing.models.projector import (
    FEED_FORWARD_LENGTH,
    PATCH_PIXELS,
    ProjectorSize,
    write_projector_metadata,
)
from afterglow.testing.models.writer import ModelWriter

# Black (K), blue, green, cyan, red, magenta, yellow, white: red, green and blue counted in binary.
LETTERS = b"KBGCRMYW"
# Axes of the residual stream: three of color, one for "the answer was given", and the type of a row.
COLOR_AXES, ANSWERED_AXIS, TEXT_AXIS, IMAGE_AXIS = range(3), 3, 4, 5
SEED = 11
IMAGE_SIDE_PIXELS = 32


def write_model(path: Path) -> None:
    """Write the text model."""
    model = Llama(layers=1)
    embedding = build_token_embedding(
        SEED, LETTERS, axes=IMAGE_AXIS + 1, text_axis=TEXT_AXIS, answered_axis=ANSWERED_AXIS
    )
    output = build_output(SEED, text_axis=TEXT_AXIS, answered_axis=ANSWERED_AXIS)
    for letter, corner in zip(LETTERS, itertools.product((-1, 1), repeat=3), strict=True):
        output[vocabulary.get_byte_token(letter), COLOR_AXES] = np.array(corner) * ANSWER_LOGIT / 8
    with open_text_model_writer(path, model, seed=SEED) as writer:
        writer.add_tensor("token_embd.weight", embedding)
        writer.add_constant("output_norm.weight", 1.0, EMBEDDING_LENGTH)
        writer.add_tensor("output.weight", output)
        writer.add_constant("blk.0.attn_norm.weight", 1.0, EMBEDDING_LENGTH)
        writer.add_constant("blk.0.ffn_norm.weight", 1.0, EMBEDDING_LENGTH)
        image_axes = range(IMAGE_AXIS, IMAGE_AXIS + 1)
        write_answer_block(writer, "blk.0", model, query_axis=TEXT_AXIS, key_axes=image_axes, value_axes=COLOR_AXES)


def write_projector(path: Path) -> None:
    """Write the projector: each row is the mean color of its patch and the image flag."""
    layers, patches = 2, (IMAGE_SIDE_PIXELS // PATCH_PIXELS) ** 2  # mtmd skips the second layer
    size = ProjectorSize(layers=layers, image_pixels=IMAGE_SIDE_PIXELS, text_embedding_length=EMBEDDING_LENGTH)
    with ModelWriter(path, "clip", seed=SEED, kind="mmproj") as writer:
        write_projector_metadata(writer, "mlp", size, {})
        weights = np.zeros((PATCH_WIDTH, 3, PATCH_PIXELS, PATCH_PIXELS), np.float32)
        for channel in range(3):  # the mean of each color channel in a patch, and its negative
            weights[2 * channel, channel] = 1 / PATCH_PIXELS**2
            weights[2 * channel + 1, channel] = -1 / PATCH_PIXELS**2
        writer.add_tensor("v.patch_embd.weight", weights, half=True)
        positions = np.zeros((patches + 1, PATCH_WIDTH), np.float32)
        positions[:, 6], positions[:, 7] = 1.0, -1.0  # the image flag; a pair, so that the norm does not shift it
        writer.add_tensor("v.position_embd.weight", positions)
        writer.add_constant("v.class_embd", 0.0, PATCH_WIDTH)
        writer.add_norm("v.pre_ln", PATCH_WIDTH)
        for layer in range(layers):
            block = f"v.blk.{layer}"  # adds nothing
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                writer.add_linear(f"{block}.{name}", PATCH_WIDTH, PATCH_WIDTH, gain=0.0)
            writer.add_linear(f"{block}.ffn_up", FEED_FORWARD_LENGTH, PATCH_WIDTH, gain=0.0)
            writer.add_linear(f"{block}.ffn_down", PATCH_WIDTH, FEED_FORWARD_LENGTH, gain=0.0)
            writer.add_norm(f"{block}.ln1", PATCH_WIDTH)
            writer.add_norm(f"{block}.ln2", PATCH_WIDTH)
        writer.add_norm("v.post_ln", PATCH_WIDTH)
        _write_projection(writer)


def _write_projection(writer: ModelWriter) -> None:
    """Project colors and image flag into the residual stream: gelu(x) - gelu(-x) is x."""
    first = np.zeros((EMBEDDING_LENGTH, PATCH_WIDTH), np.float32)
    second = np.zeros((EMBEDDING_LENGTH, EMBEDDING_LENGTH), np.float32)
    for index, axis in enumerate((*COLOR_AXES, IMAGE_AXIS)):
        scale = 4.0 if axis == IMAGE_AXIS else 1.0
        first[2 * index, 2 * index], first[2 * index + 1, 2 * index] = 1.0, -1.0
        second[axis, 2 * index], second[axis, 2 * index + 1] = scale, -scale
    for name, array in (("mm.0", first), ("mm.2", second)):
        writer.add_tensor(f"{name}.weight", array)
        writer.add_constant(f"{name}.bias", 0.0, EMBEDDING_LENGTH)
