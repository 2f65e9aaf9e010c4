"""Mutations of a single tensor of a GGUF file: its type, shape, name, offset or presence."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from afterglow.llama.gguf.formats import TENSOR_TYPES
from support.gguf_document import Document, TensorData, count_tensor_bytes

HUGE_NUMBERS = (2**16, 2**24, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def change_tensor(document: Document, random: Random) -> str:
    if not document.tensors:
        return "no tensor to change"
    tensor, other = random.choice(document.tensors), random.choice(document.tensors)
    return random.choice(TENSOR_MUTATIONS)(document, tensor, other, random)


def retype(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    kind = random.choice((*TENSOR_TYPES, 4, 5, 31, 36, 43, 2**31, 2**32 - 1))
    if kind in TENSOR_TYPES:
        resize(tensor, tensor.shape, kind)
    tensor.kind = kind
    return f"{tensor.name!r} has type {kind}"


def reshape(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    shape = list(random.choice((tensor.shape[::-1], other.shape, [*tensor.shape, 1], [math.prod(tensor.shape)], [])))
    if shape and random.random() < 0.7:
        index = random.randrange(len(shape))
        old = shape[index]
        shape[index] = random.choice((0, 1, old * 2, old + 1, old // 2, *HUGE_NUMBERS)) % 2**64
    if tensor.kind in TENSOR_TYPES and count_tensor_bytes(shape, tensor.kind) < 2**22 and random.random() < 0.8:
        resize(tensor, shape, tensor.kind)
    tensor.shape = shape
    return f"{tensor.name!r} has shape {shape}"


def reorder(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    tensor.name, other.name = other.name, tensor.name
    return f"{tensor.name!r} and {other.name!r} are swapped"


def move(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    tensor.offset = random.choice((0, 1, 32, 2**20, *HUGE_NUMBERS)) % 2**64
    return f"{tensor.name!r} is moved to {tensor.offset}"


def remove(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    document.tensors = [item for item in document.tensors if item is not tensor]
    return f"remove tensor {tensor.name!r}"


def rename(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    old = tensor.name
    tensor.name = random.choice((other.name, b"", b"x" * 63, b"x" * 64, old + b"\0", b"rope_freqs.weight"))
    return f"{old!r} is renamed to {tensor.name!r}"


def repeat(document: Document, tensor: TensorData, other: TensorData, random: Random) -> str:
    name = random.choice((tensor.name, b"extra", b"blk.0.attn_q.bias", b"output.weight"))
    document.tensors.append(replace(tensor, name=name))
    return f"{tensor.name!r} is duplicated as {name!r}"


def resize(tensor: TensorData, shape: list[int], kind: int) -> None:
    """Resize the tensor's data to its new shape and type."""
    size = count_tensor_bytes(shape, kind)
    if tensor.data and size <= 2**24:
        tensor.data = (tensor.data * (size // len(tensor.data) + 1))[:size]


TENSOR_MUTATIONS = (retype, reshape, reshape, reorder, move, remove, rename, repeat)
