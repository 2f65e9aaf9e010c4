"""Damage to one tensor of a GGUF file: its type, shape, name, place or presence."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from afterglow.llama.gguf.formats import TENSOR_TYPES
from support.gguf_document import Document, Weights, tensor_bytes

HUGE = (2**16, 2**24, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def change_tensor(document: Document, random: Random) -> str:
    if not document.weights:
        return "no tensor to change"
    one, other = random.choice(document.weights), random.choice(document.weights)
    return random.choice(CHANGES)(document, one, other, random)


def retype(document: Document, one: Weights, other: Weights, random: Random) -> str:
    kind = random.choice((*TENSOR_TYPES, 4, 5, 31, 36, 43, 2**31, 2**32 - 1))
    if kind in TENSOR_TYPES:
        resize(one, one.shape, kind)
    one.kind = kind
    return f"{one.name!r} has type {kind}"


def reshape(document: Document, one: Weights, other: Weights, random: Random) -> str:
    shape = list(random.choice((one.shape[::-1], other.shape, [*one.shape, 1], [math.prod(one.shape)], [])))
    if shape and random.random() < 0.7:
        index = random.randrange(len(shape))
        old = shape[index]
        shape[index] = random.choice((0, 1, old * 2, old + 1, old // 2, *HUGE)) % 2**64
    if one.kind in TENSOR_TYPES and tensor_bytes(shape, one.kind) < 2**22 and random.random() < 0.8:
        resize(one, shape, one.kind)
    one.shape = shape
    return f"{one.name!r} has shape {shape}"


def reorder(document: Document, one: Weights, other: Weights, random: Random) -> str:
    one.name, other.name = other.name, one.name
    return f"{one.name!r} and {other.name!r} change places"


def move(document: Document, one: Weights, other: Weights, random: Random) -> str:
    one.offset = random.choice((0, 1, 32, 2**20, *HUGE)) % 2**64
    return f"{one.name!r} is moved to {one.offset}"


def remove(document: Document, one: Weights, other: Weights, random: Random) -> str:
    document.weights = [weights for weights in document.weights if weights is not one]
    return f"remove tensor {one.name!r}"


def rename(document: Document, one: Weights, other: Weights, random: Random) -> str:
    old = one.name
    one.name = random.choice((other.name, b"", b"x" * 63, b"x" * 64, old + b"\0", b"rope_freqs.weight"))
    return f"{old!r} is called {one.name!r}"


def repeat(document: Document, one: Weights, other: Weights, random: Random) -> str:
    name = random.choice((one.name, b"extra", b"blk.0.attn_q.bias", b"output.weight"))
    document.weights.append(replace(one, name=name))
    return f"{one.name!r} appears again as {name!r}"


def resize(one: Weights, shape: list[int], kind: int) -> None:
    """Give the tensor as many bytes as its new shape and type need."""
    size = tensor_bytes(shape, kind)
    if one.data and size <= 2**24:
        one.data = (one.data * (size // len(one.data) + 1))[:size]


CHANGES = (retype, reshape, reshape, reorder, move, remove, rename, repeat)
