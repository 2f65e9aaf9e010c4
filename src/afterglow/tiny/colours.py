"""A pair that names the colour of a picture by one letter, known by construction: a llava projector and a llama model.

The projector's rows say that they are of a picture, and what its mean colours are there. The model has one head that
looks at picture rows only; the letter whose corner of the colour cube is nearest is what it says, and then it ends.
Without a picture it says N. Everything else that a model has is there and adds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from afterglow.tiny import vocabulary
from afterglow.tiny.asking import write_head
from afterglow.tiny.attention import Llama
from afterglow.tiny.decoder import text_model
from afterglow.tiny.projector import INNER, PATCH, Size, describe_projector
from afterglow.tiny.projector import WIDTH as PATCH_WIDTH
from afterglow.tiny.writer import Array, Writer, noise

# Black (K), blue, green, cyan, red, magenta, yellow, white: red, green and blue counted in binary.
LETTERS = b"KBGCRMYW"
NOTHING = b"N"
WIDTH = 64
SEEN, SAID, TEXT, PICTURE = 0, 3, 4, 5  # axes of the stream: three of colour, an answer was given, what a row is
LOGIT = 20.0
IMAGE = 32  # pixels on a side


def _corners() -> Array:
    """The colours of the letters, each between -1 and 1."""
    return np.array(list(itertools.product((-1, 1), repeat=3)), np.float32)


def _table() -> Array:
    """A row per token: that it is text, which one, and whether it is an answer."""
    table = noise(11, "tokens", vocabulary.SIZE, WIDTH, scale=0.2)
    table[:, : PICTURE + 1] = 0.0
    table[:, TEXT] = 2.0
    table[[vocabulary.byte_token(letter) for letter in LETTERS + NOTHING], SAID] = 8.0
    return table


def _output() -> Array:
    """A row per token: letters answer to colours, N to text alone, and the end of a turn to an answer."""
    table = noise(11, "output", vocabulary.SIZE, WIDTH, scale=0.02)
    for letter, corner in zip(LETTERS, _corners(), strict=True):
        table[vocabulary.byte_token(letter), SEEN : SEEN + 3] = corner * LOGIT / 8
    table[vocabulary.byte_token(NOTHING[0]), TEXT] = LOGIT / 24
    table[vocabulary.TURN_END, SAID] = LOGIT
    return table


def write_model(path: Path) -> None:
    """Write the text model."""
    model = Llama(layers=1)
    with text_model(path, model, seed=11) as writer:
        writer.given("token_embd.weight", _table())
        writer.constant("output_norm.weight", 1.0, WIDTH)
        writer.given("output.weight", _output())
        block = "blk.0"
        writer.constant(f"{block}.attn_norm.weight", 1.0, WIDTH)
        writer.constant(f"{block}.ffn_norm.weight", 1.0, WIDTH)
        colours = range(SEEN, SEEN + 3)
        write_head(writer, block, model, asks=TEXT, marks=range(PICTURE, PICTURE + 1), answer=colours)
        for name, rows, columns in (("gate", 128, WIDTH), ("up", 128, WIDTH), ("down", WIDTH, 128)):
            writer.constant(f"{block}.ffn_{name}.weight", 0.0, rows, columns)


def write_projector(path: Path) -> None:
    """Write the projector: each row is the mean colour of its patch and the mark of a picture."""
    layers, patches = 2, (IMAGE // PATCH) ** 2  # the second is skipped by mtmd
    with Writer(path, "clip", seed=11, kind="mmproj") as writer:
        describe_projector(writer, "mlp", Size(layers=layers, image=IMAGE, text=WIDTH), {})
        writer.given("v.patch_embd.weight", _patches(), half=True)
        positions = np.zeros((patches + 1, PATCH_WIDTH), np.float32)
        positions[:, 6], positions[:, 7] = 1.0, -1.0  # the mark; in pairs, so that the norm moves nothing
        writer.given("v.position_embd.weight", positions)
        writer.constant("v.class_embd", 0.0, PATCH_WIDTH)
        writer.norm("v.pre_ln", PATCH_WIDTH)
        for layer in range(layers):
            _silent(writer, f"v.blk.{layer}")
        writer.norm("v.post_ln", PATCH_WIDTH)
        _last_step(writer)


def _patches() -> Array:
    """The mean of each colour in a patch, and its negative."""
    weights = np.zeros((PATCH_WIDTH, 3, PATCH, PATCH), np.float32)
    for colour in range(3):
        weights[2 * colour, colour], weights[2 * colour + 1, colour] = 1 / PATCH**2, -1 / PATCH**2
    return weights


def _silent(writer: Writer, block: str) -> None:
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        writer.linear(f"{block}.{name}", PATCH_WIDTH, PATCH_WIDTH, gain=0.0)
    writer.linear(f"{block}.ffn_up", INNER, PATCH_WIDTH, gain=0.0)
    writer.linear(f"{block}.ffn_down", PATCH_WIDTH, INNER, gain=0.0)
    writer.norm(f"{block}.ln1", PATCH_WIDTH)
    writer.norm(f"{block}.ln2", PATCH_WIDTH)


def _last_step(writer: Writer) -> None:
    """Colours and mark into the stream. A gelu of x less that of -x is x."""
    into, out = np.zeros((WIDTH, PATCH_WIDTH), np.float32), np.zeros((WIDTH, WIDTH), np.float32)
    for number, (axis, size) in enumerate([(SEEN, 1.0), (SEEN + 1, 1.0), (SEEN + 2, 1.0), (PICTURE, 4.0)]):
        into[2 * number, 2 * number], into[2 * number + 1, 2 * number] = 1.0, -1.0
        out[axis, 2 * number], out[axis, 2 * number + 1] = size, -size
    for name, array in (("mm.0", into), ("mm.2", out)):
        writer.given(f"{name}.weight", array)
        writer.constant(f"{name}.bias", 0.0, WIDTH)


RECIPES: dict[str, Callable[[Path], None]] = {"colours": write_model, "projector-colours": write_projector}
