"""A pair that names the note of a sound by its letter, known by construction: a gemma4ua projector and a llama model.

A row of the projector says how much of each note is in forty milliseconds of sound, by a sine and a cosine; the first
block squares the two and adds them, so that it does not matter where in its swing a tone begins. The second has one
head with which text looks at rows of sound. The loudest note's letter is what the model says, and then it ends.
Without a sound, or in silence, it says N. Everything else that a model has is there and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from afterglow.tiny import vocabulary
from afterglow.tiny.asking import write_head
from afterglow.tiny.attention import Llama
from afterglow.tiny.decoder import text_model
from afterglow.tiny.hearing import FRAME, write_wave
from afterglow.tiny.writer import Array, Writer, noise

LETTERS = b"CDEFGAB"
PITCHES = (261.63, 293.66, 329.63, 349.23, 392.0, 440.0, 493.88)  # of the letters, from middle C on, in hertz
NOTHING = b"N"
RATE = 16_000
WIDTH = 64
NOTES = len(LETTERS)
WAVES, LOUD, SAID, TEXT = 0, 2 * NOTES, 3 * NOTES, 3 * NOTES + 1  # axes of the stream
PURE = 8.0  # how loud a pure tone is on the axis of its note: the length that a norm gives a row
LOGIT = 20.0


def _table() -> Array:
    """A row per token: that it is text, which one, and whether it is an answer."""
    table = noise(15, "tokens", vocabulary.SIZE, WIDTH, scale=0.2)
    table[:, : TEXT + 1] = 0.0
    table[:, TEXT] = 2.0
    table[[vocabulary.byte_token(letter) for letter in LETTERS + NOTHING], SAID] = 8.0
    return table


def _output() -> Array:
    """A row per token: letters answer to notes, N to text alone, and the end of a turn to an answer."""
    table = noise(15, "output", vocabulary.SIZE, WIDTH, scale=0.02)
    for number, letter in enumerate(LETTERS):
        table[vocabulary.byte_token(letter), LOUD + number] = LOGIT / 8
    table[vocabulary.byte_token(NOTHING[0]), TEXT] = LOGIT / 24
    table[vocabulary.TURN_END, SAID] = LOGIT
    return table


def _square(writer: Writer, block: str, inner: int) -> None:
    """The feed-forward network of the first block: silu(x) x + silu(-x) (-x) is x squared."""
    gate, down = np.zeros((inner, WIDTH), np.float32), np.zeros((WIDTH, inner), np.float32)
    for wave in range(2 * NOTES):
        gate[2 * wave, WAVES + wave], gate[2 * wave + 1, WAVES + wave] = 1.0, -1.0
        down[LOUD + wave // 2, 2 * wave : 2 * wave + 2] = PURE / WIDTH
    for name, array in (("gate", gate), ("up", gate), ("down", down)):
        writer.given(f"{block}.ffn_{name}.weight", array)


def write_model(path: Path) -> None:
    """Write the text model."""
    model = Llama(layers=2)
    with text_model(path, model, seed=15) as writer:
        writer.given("token_embd.weight", _table())
        writer.constant("output_norm.weight", 1.0, WIDTH)
        writer.given("output.weight", _output())
        for block in ("blk.0", "blk.1"):
            writer.constant(f"{block}.attn_norm.weight", 1.0, WIDTH)
            writer.constant(f"{block}.ffn_norm.weight", 1.0, WIDTH)
        _deaf(writer, "blk.0", model)
        _square(writer, "blk.0", model.feed_forward)
        notes = range(LOUD, LOUD + NOTES)
        write_head(writer, "blk.1", model, asks=TEXT, marks=notes, answer=notes)
        for name, rows, columns in (("gate", 128, WIDTH), ("up", 128, WIDTH), ("down", WIDTH, 128)):
            writer.constant(f"blk.1.ffn_{name}.weight", 0.0, rows, columns)


def _deaf(writer: Writer, block: str, model: Llama) -> None:
    keys = model.key_heads * model.head
    for name, rows in (("q", WIDTH), ("k", keys), ("v", keys), ("output", WIDTH)):
        writer.constant(f"{block}.attn_{name}.weight", 0.0, rows, WIDTH)


def write_projector(path: Path) -> None:
    """Write the projector: how much of the sine and of the cosine of each note is in a frame."""
    weights = np.zeros((WIDTH, FRAME), np.float32)
    for number, pitch in enumerate(PITCHES):
        turns = 2 * np.pi * pitch * np.arange(FRAME) / RATE
        weights[WAVES + 2 * number] = np.sin(turns) * 2 / FRAME
        weights[WAVES + 2 * number + 1] = np.cos(turns) * 2 / FRAME
    write_wave(path, seed=15, weights=weights)


RECIPES: dict[str, Callable[[Path], None]] = {"notes": write_model, "projector-notes": write_projector}
