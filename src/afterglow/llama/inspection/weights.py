"""Which kinds of numbers a text model's tensors may hold: on others llama.cpp's kernels abort or read wild memory."""

from __future__ import annotations

from afterglow.llama.header import TensorInfo
from afterglow.llama.inspection.facts import Facts

# Intermediate results and integers: no matrix of these can be multiplied. Tables of token and expert numbers are
# integers too; "tid2eid" is the one of them that is called a weight.
NEVER_WEIGHTS = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
VECTORS = {"F32", "F16"}


def check_weights(facts: Facts) -> None:
    for tensor in facts.header.tensors:
        if not _is_weight(tensor):
            continue
        if tensor.type in NEVER_WEIGHTS:
            facts.fail(f"tensor {tensor.name!r} is stored as {tensor.type}, which cannot be computed with")
        if _is_vector(tensor) and tensor.type not in VECTORS:
            facts.fail(f"tensor {tensor.name!r} is a vector stored as {tensor.type}, it must be F32 or F16")


def _is_weight(tensor: TensorInfo) -> bool:
    return tensor.name.endswith((".weight", ".bias")) and "tid2eid" not in tensor.name


def _is_vector(tensor: TensorInfo) -> bool:
    return len(tensor.shape) == 1 and tensor.name.endswith(("norm.weight", ".bias"))
