"""Which kinds of numbers a tensor may hold: on others llama.cpp's kernels abort or read wild memory."""

from __future__ import annotations

import re

from afterglow.llama.gguf.inspection.metadata import MetadataReader

# Intermediate results and integers: no matrix of these can be multiplied. Tables of token and expert numbers are
# integers too; "tid2eid" is the one of them that is called a weight.
NON_WEIGHT_TYPES = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
WEIGHT_NAME = re.compile(r"^(?!.*tid2eid).*\.(weight|bias|lora_a|lora_b)$", re.DOTALL)
# llama.cpp adds or multiplies by the elements of these as they are, which it can do with F32 only.
F32_VECTOR_NAME = re.compile(r"(norm|ln[0-9]?)\.weight$|\.bias$")
F32_STATE_SUFFIXES = (".ssm_a", ".ssm_d", ".ssm_conv1d.weight")


def check_weights(metadata: MetadataReader) -> None:
    for tensor in metadata.header.tensors:
        if tensor.type in NON_WEIGHT_TYPES and WEIGHT_NAME.match(tensor.name):
            metadata.fail(f"tensor {tensor.name!r} is stored as {tensor.type}, which cannot be computed with")
        single = (len(tensor.shape) == 1 and F32_VECTOR_NAME.search(tensor.name)) or tensor.name.endswith(
            F32_STATE_SUFFIXES
        )
        if single and tensor.type != "F32":
            metadata.fail(f"tensor {tensor.name!r} is stored as {tensor.type}, it must be F32")
