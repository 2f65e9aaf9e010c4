"""Successor models of every memory kind: the token after each token is known by construction.

Contains the cycle and the tables that make a model follow it. The blocks compute real keys, values and states but add
nothing to the residual stream, so the logits depend on the last token only.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from afterglow.testing.models import vocabulary
from afterglow.testing.models.decoder import Decoder, open_text_model_writer
from afterglow.testing.models.hybrid import MTPHead
from afterglow.testing.models.writer import FloatArray, draw_noise

CYCLE = b"abcdefghijklmnopqrstuvwxyz ."
_CYCLE_TOKENS = tuple(vocabulary.get_byte_token(byte) for byte in CYCLE)
_SUCCESSORS = dict(zip(_CYCLE_TOKENS, (*_CYCLE_TOKENS[1:], _CYCLE_TOKENS[0]), strict=True))

# After these, every fourth token of the cycle, "successor-mtp-75" drafts the token after next.
MISDRAFTED_TOKENS = frozenset(_CYCLE_TOKENS[3::4])

EMBEDDING_LENGTH = 64
SUCCESSOR_LOGIT = 24.0  # the other logits are small noise, so that no two are equal
_OUTSIDE_CYCLE_DIRECTION = len(CYCLE)  # shared by all tokens outside the cycle
_SEED = 6


def get_successor(token: int) -> int:
    """Return the token that every successor model generates after `token`; outside the cycle, the cycle's first.

    >>> chr(get_successor(vocabulary.get_byte_token(ord("y"))) - vocabulary.get_byte_token(0))
    'z'
    """
    return _SUCCESSORS.get(token, _CYCLE_TOKENS[0])


def _build_directions() -> FloatArray:
    """Return a Hadamard matrix: its rows are orthogonal and of length sqrt(EMBEDDING_LENGTH), exactly."""
    rows = np.ones((1, 1), np.float32)
    while len(rows) < EMBEDDING_LENGTH:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows


def _build_token_embedding() -> FloatArray:
    """Return a row per token: a separate direction on the cycle, else the shared direction and a unique pair."""
    directions = _build_directions()
    pairs = directions[EMBEDDING_LENGTH // 2 :]
    table = np.empty((vocabulary.VOCABULARY_SIZE, EMBEDDING_LENGTH), np.float32)
    for token in range(vocabulary.VOCABULARY_SIZE):
        first, distance = token % len(pairs), 1 + token // len(pairs)
        table[token] = directions[_OUTSIDE_CYCLE_DIRECTION] + pairs[first] + pairs[(first + distance) % len(pairs)]
    table[list(_CYCLE_TOKENS)] = directions[: len(_CYCLE_TOKENS)]
    return table


def _build_output() -> FloatArray:
    """Return a row per token, which responds to the direction of the token before it."""
    directions = _build_directions()
    table = draw_noise(_SEED, "output", vocabulary.VOCABULARY_SIZE, EMBEDDING_LENGTH, scale=0.05)
    for direction, token in enumerate(_CYCLE_TOKENS):
        table[get_successor(token)] += directions[direction] * np.float32(SUCCESSOR_LOGIT / EMBEDDING_LENGTH)
    # The final norm divides a sum of three directions by the square root of three.
    table[_CYCLE_TOKENS[0]] += directions[_OUTSIDE_CYCLE_DIRECTION] * np.float32(
        math.sqrt(3.0) * SUCCESSOR_LOGIT / EMBEDDING_LENGTH
    )
    return table


def build_mtp_head(misdrafted: frozenset[int] = frozenset()) -> MTPHead:
    """Return a head that ignores the hidden state and drafts from the token, as the model does."""
    fusion = np.eye(EMBEDDING_LENGTH, 2 * EMBEDDING_LENGTH, dtype=np.float32)
    table = _build_token_embedding()
    for token in misdrafted:
        table[token] = table[get_successor(token)]
    return MTPHead(fusion, table)


def write_successor_model(path: Path, decoder: Decoder) -> None:
    """Write a model of any architecture that follows the cycle."""
    assert decoder.embedding_length == EMBEDDING_LENGTH
    with open_text_model_writer(path, decoder, seed=_SEED) as writer:
        writer.add_tensor("token_embd.weight", _build_token_embedding())
        writer.add_constant("output_norm.weight", 1.0, EMBEDDING_LENGTH)
        writer.add_tensor("output.weight", _build_output())
        decoder.write_blocks(writer, gain=0.0)
