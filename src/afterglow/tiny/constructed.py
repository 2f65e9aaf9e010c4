"""Successor models: which token follows which is known by construction, on every kind of memory.

It knows the cycle and the tables that make a model follow it. Their blocks compute real keys, values and states but
add nothing to the residual stream, so a logit depends on the last token alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from afterglow.tiny import vocabulary
from afterglow.tiny.attention import Gemma3, Llama
from afterglow.tiny.chained import HyV3, Step35
from afterglow.tiny.decoder import Decoder, text_model
from afterglow.tiny.hybrid import DraftHead, Qwen35
from afterglow.tiny.recurrent import Mamba
from afterglow.tiny.writer import Array, noise

CYCLE = b"abcdefghijklmnopqrstuvwxyz ."
_TOKENS = tuple(vocabulary.byte_token(byte) for byte in CYCLE)
_SUCCESSORS = dict(zip(_TOKENS, (*_TOKENS[1:], _TOKENS[0]), strict=True))

# After these "successor-mtp-75" drafts the token after next: every fourth of the cycle.
MISDRAFTED = frozenset(_TOKENS[3::4])

WIDTH = 64
LOGIT = 24.0  # of the successor; the others are small noise, so that no two logits are equal
_ENTRY = len(CYCLE)  # the direction that all tokens outside the cycle share
_SEED = 6


def successor_of(token: int) -> int:
    """The token that every successor model says after `token`; outside the cycle, the cycle's first.

    >>> chr(successor_of(vocabulary.byte_token(ord("y"))) - vocabulary.byte_token(0))
    'z'
    """
    return _SUCCESSORS.get(token, _TOKENS[0])


def _directions() -> Array:
    """A Hadamard matrix: its rows are orthogonal and of length sqrt(WIDTH), exactly."""
    rows = np.ones((1, 1), np.float32)
    while len(rows) < WIDTH:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows


def _embedding() -> Array:
    """A row per token. On the cycle it is a direction of its own; elsewhere the entry and a pair that names it."""
    directions = _directions()
    pairs = directions[WIDTH // 2 :]
    table = np.empty((vocabulary.SIZE, WIDTH), np.float32)
    for token in range(vocabulary.SIZE):
        first, distance = token % len(pairs), 1 + token // len(pairs)
        table[token] = directions[_ENTRY] + pairs[first] + pairs[(first + distance) % len(pairs)]
    table[list(_TOKENS)] = directions[: len(_TOKENS)]
    return table


def _output() -> Array:
    """A row per token: it answers to the direction of the token before it."""
    directions = _directions()
    table = noise(_SEED, "output", vocabulary.SIZE, WIDTH, scale=0.05)
    for direction, token in enumerate(_TOKENS):
        table[successor_of(token)] += directions[direction] * np.float32(LOGIT / WIDTH)
    # The final norm shrinks a sum of three directions by the root of three.
    table[_TOKENS[0]] += directions[_ENTRY] * np.float32(math.sqrt(3.0) * LOGIT / WIDTH)
    return table


def _draft_head(misdrafted: frozenset[int]) -> DraftHead:
    """A head that ignores the hidden state and drafts from the token, as the model itself does."""
    fusion = np.concatenate([np.eye(WIDTH), np.zeros((WIDTH, WIDTH))], axis=1).astype(np.float32)
    table = _embedding()
    for token in misdrafted:
        table[token] = table[successor_of(token)]
    return DraftHead(fusion, table)


def write_successor(path: Path, decoder: Decoder) -> None:
    """Write a model of any architecture that follows the cycle."""
    assert decoder.embedding == WIDTH
    with text_model(path, decoder, seed=_SEED) as writer:
        writer.given("token_embd.weight", _embedding())
        writer.constant("output_norm.weight", 1.0, WIDTH)
        writer.given("output.weight", _output())
        decoder.blocks(writer, gain=0.0)


def _right() -> DraftHead:
    return _draft_head(frozenset())


def _mostly_right() -> DraftHead:
    return _draft_head(MISDRAFTED)


RECIPES: dict[str, Callable[[Path], None]] = {
    "successor-attention": partial(write_successor, decoder=Llama()),
    "successor-window": partial(write_successor, decoder=Gemma3()),
    "successor-recurrent": partial(write_successor, decoder=Mamba()),
    "successor-hybrid": partial(write_successor, decoder=Qwen35()),
    "successor-mtp": lambda path: write_successor(path, Qwen35(draft=_right())),
    "successor-mtp-75": lambda path: write_successor(path, Qwen35(draft=_mostly_right())),
    "successor-headed": lambda path: write_successor(path, HyV3(drafts=(_mostly_right(),))),
    "successor-chained": lambda path: write_successor(path, Step35(drafts=(_right(), _mostly_right()))),
}
