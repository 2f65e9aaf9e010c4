"""Rejects files on which llama.cpp would abort, hang or allocate absurd amounts of memory.

A file that passes may still fail to load or abort: `probe` tries it in a child process.
"""

from __future__ import annotations

import re
from pathlib import Path

from afterglow.llama.gguf.formats import SPLIT_FILE_NAME
from afterglow.llama.gguf.header import GGUFHeader, read_header
from afterglow.llama.gguf.inspection.dimensions import check_dimensions
from afterglow.llama.gguf.inspection.metadata import MetadataReader
from afterglow.llama.gguf.inspection.projector import check_adapter, check_projector
from afterglow.llama.gguf.inspection.tokens import check_tokens

# Types of intermediate results and integers: llama.cpp cannot multiply matrices of these. Tables of token and expert
# numbers are integers too; "tid2eid" is the only one of them that is named like a weight.
NON_WEIGHT_TYPES = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
WEIGHT_NAME = re.compile(r"^(?!.*tid2eid).*\.(weight|bias|lora_a|lora_b)$", re.DOTALL)
# llama.cpp adds or multiplies the elements of these directly, which it supports for F32 only.
F32_VECTOR_NAME = re.compile(r"(norm|ln[0-9]?)\.weight$|\.bias$")
F32_STATE_SUFFIXES = (".ssm_a", ".ssm_d", ".ssm_conv1d.weight")


def inspect_file(path: Path) -> GGUFHeader:
    """Read a file's header and check that it can be loaded; raise `InvalidModel` with the reason otherwise."""
    header = read_header(path)
    metadata = MetadataReader(header)
    if _get_split_index(metadata) > 0:
        return header  # the first part of a split model has the metadata of all parts
    if not metadata.architecture:
        metadata.fail("it names no architecture (general.architecture is missing or empty)")
    file_type = metadata.get_string("general.type")
    if file_type == "adapter":
        check_adapter(metadata)
    elif file_type == "mmproj" or metadata.architecture == "clip":
        check_projector(metadata)
    else:
        check_dimensions(metadata)
        check_tokens(metadata)
    _check_tensor_types(metadata)
    return header


def _get_split_index(metadata: MetadataReader) -> int:
    """Return the index of this part of a split model, from 0. llama.cpp finds the other parts by the file name."""
    index, count = metadata.get_uint16("split.no"), metadata.get_uint16("split.count")
    if count <= 1:
        return 0
    name = SPLIT_FILE_NAME.search(metadata.header.path.name)
    if name is None or (int(name[1]), int(name[2])) != (index + 1, count):
        metadata.fail(f"it is part {index + 1} of {count}, its name should end in -{index + 1:05}-of-{count:05}.gguf")
    return index


def _check_tensor_types(metadata: MetadataReader) -> None:
    """Check the type of each tensor: for others, llama.cpp's kernels abort or read out of bounds."""
    for tensor in metadata.header.tensors:
        if tensor.type in NON_WEIGHT_TYPES and WEIGHT_NAME.match(tensor.name):
            metadata.fail(f"tensor {tensor.name!r} is stored as {tensor.type}, which cannot be used for weights")
        is_vector = len(tensor.shape) == 1 and F32_VECTOR_NAME.search(tensor.name) is not None
        if (is_vector or tensor.name.endswith(F32_STATE_SUFFIXES)) and tensor.type != "F32":
            metadata.fail(f"tensor {tensor.name!r} is stored as {tensor.type}, it must be F32")
