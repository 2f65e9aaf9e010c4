"""A gemma4ua projector and a llama model that name the musical note of audio by its letter, by construction.

A row of the projector has the sine and cosine component of each note in 40 ms of audio. The first block adds their
squares, so that the phase does not matter. The second block has one head with which text attends to audio rows. The
model generates the letter of the loudest note, then the end token. Without audio, or for silence, it generates N. All
other tensors are present and contribute nothing.
"""

from __future__ import annotations

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
from afterglow.testing.models.audio_projector import FRAME_SAMPLES, write_gemma4ua
from afterglow.testing.models.decoder import open_text_model_writer
from afterglow.testing.models.writer import ModelWriter

LETTERS = b"CDEFGAB"
PITCHES_HZ = (261.63, 293.66, 329.63, 349.23, 392.0, 440.0, 493.88)  # of the letters, from middle C on
SAMPLE_RATE_HERTZ = 16_000
NOTE_COUNT = len(LETTERS)
# Axes of the residual stream.
WAVE_AXIS, LOUDNESS_AXIS, ANSWERED_AXIS, TEXT_AXIS = 0, 2 * NOTE_COUNT, 3 * NOTE_COUNT, 3 * NOTE_COUNT + 1
PURE_TONE_LOUDNESS = 8.0  # value of a pure tone on the axis of its note: the length of a normalized row
SEED = 15


def _write_squaring_feed_forward(writer: ModelWriter, block: str, inner: int) -> None:
    """Write the feed-forward network of the first block: silu(x) x + silu(-x) (-x) is x squared."""
    gate, down = np.zeros((inner, EMBEDDING_LENGTH), np.float32), np.zeros((EMBEDDING_LENGTH, inner), np.float32)
    for wave in range(2 * NOTE_COUNT):
        gate[2 * wave, WAVE_AXIS + wave], gate[2 * wave + 1, WAVE_AXIS + wave] = 1.0, -1.0
        down[LOUDNESS_AXIS + wave // 2, 2 * wave : 2 * wave + 2] = PURE_TONE_LOUDNESS / EMBEDDING_LENGTH
    for name, array in (("gate", gate), ("up", gate), ("down", down)):
        writer.add_tensor(f"{block}.ffn_{name}.weight", array)


def write_model(path: Path) -> None:
    """Write the text model."""
    model = Llama(layers=2)
    embedding = build_token_embedding(
        SEED, LETTERS, axes=TEXT_AXIS + 1, text_axis=TEXT_AXIS, answered_axis=ANSWERED_AXIS
    )
    output = build_output(SEED, text_axis=TEXT_AXIS, answered_axis=ANSWERED_AXIS)
    for number, letter in enumerate(LETTERS):
        output[vocabulary.get_byte_token(letter), LOUDNESS_AXIS + number] = ANSWER_LOGIT / 8
    with open_text_model_writer(path, model, seed=SEED) as writer:
        writer.add_tensor("token_embd.weight", embedding)
        writer.add_constant("output_norm.weight", 1.0, EMBEDDING_LENGTH)
        writer.add_tensor("output.weight", output)
        for block in ("blk.0", "blk.1"):
            writer.add_constant(f"{block}.attn_norm.weight", 1.0, EMBEDDING_LENGTH)
            writer.add_constant(f"{block}.ffn_norm.weight", 1.0, EMBEDDING_LENGTH)
        keys = model.kv_heads * model.head_size
        for name, rows in (("q", EMBEDDING_LENGTH), ("k", keys), ("v", keys), ("output", EMBEDDING_LENGTH)):
            writer.add_constant(f"blk.0.attn_{name}.weight", 0.0, rows, EMBEDDING_LENGTH)
        _write_squaring_feed_forward(writer, "blk.0", model.feed_forward_length)
        note_axes = range(LOUDNESS_AXIS, LOUDNESS_AXIS + NOTE_COUNT)
        write_answer_block(writer, "blk.1", model, query_axis=TEXT_AXIS, key_axes=note_axes, value_axes=note_axes)


def write_projector(path: Path) -> None:
    """Write the projector: the sine and cosine component of each note in a frame."""
    weights = np.zeros((EMBEDDING_LENGTH, FRAME_SAMPLES), np.float32)
    for number, pitch in enumerate(PITCHES_HZ):
        phase = 2 * np.pi * pitch * np.arange(FRAME_SAMPLES) / SAMPLE_RATE_HERTZ
        weights[WAVE_AXIS + 2 * number] = np.sin(phase) * 2 / FRAME_SAMPLES
        weights[WAVE_AXIS + 2 * number + 1] = np.cos(phase) * 2 / FRAME_SAMPLES
    write_gemma4ua(path, seed=SEED, weights=weights)
