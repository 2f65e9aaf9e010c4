"""Summary of a model file from its headers: number of parameters and quantization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod

from afterglow.llama.gguf.header import GGUFHeader, TensorInfo


def list_tensors(headers: Iterable[GGUFHeader]) -> list[TensorInfo]:
    """List the tensors of all files of a model."""
    return [tensor for header in headers for tensor in header.tensors]


def count_parameters(headers: Iterable[GGUFHeader]) -> int:
    """Return the number of weights."""
    return sum(prod(tensor.shape) for tensor in list_tensors(headers))


def find_quantization(headers: Iterable[GGUFHeader]) -> str:
    """Return the tensor type that has most of the bytes."""
    nbytes: Counter[str] = Counter()
    for tensor in list_tensors(headers):
        nbytes[tensor.type] += tensor.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else "none"
