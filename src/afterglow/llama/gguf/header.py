"""Reads the header of a GGUF file as hostile input: every count, length and offset is checked before it is used.

Knows the format and the limits of llama.cpp's own reader. What the keys mean is for `inspection`.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.cursor import MAX_HEADER_BYTES, U32, U64, Cursor
from afterglow.llama.gguf.formats import NUMPY_TYPES, TENSOR_TYPES, ValueType

MAX_KEYS = 4096  # llama.cpp searches keys and tensors one by one; real models have under 200 and 3,000
MAX_TENSORS = 8192
MAX_KEY_BYTES = 1024
MAX_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**63 - 1
DATA_ALIGNMENT = 32  # llama.cpp aborts when the tensors it maps do not begin at a multiple of this


class StringArray:
    """An array of strings as it lies in the file; decoded when asked for."""

    def __init__(self, data: bytes, ends: array[int]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return decode_string(self._data[start + U64.size : self._ends[index]])

    def iter_raw(self) -> Iterator[bytes]:
        """The strings as llama.cpp takes them: up to the first zero byte."""
        data, start = self._data, 0
        for end in self._ends:
            yield data[start + 8 : end].partition(b"\0")[0]
            start = end


MetadataScalar: TypeAlias = int | float | bool | str
MetadataValue: TypeAlias = MetadataScalar | NDArray[Any] | StringArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; the first dimension varies fastest, `offset` counts from `Header.data_start`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says about itself. `types` has the stored type of each key, of its elements for an array."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, MetadataValue] = field(repr=False)
    value_types: dict[str, ValueType] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    data_start: int
    file_size: int

    @property
    def split_count(self) -> int:
        """How many files this model is divided into."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) else 1


def decode_string(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


def read_header(path: Path) -> GGUFHeader:
    """Read and check everything in front of the tensor data; the data itself is not touched."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # asked first: to open a pipe is to wait for its writer
            raise InvalidModel(str(path), "it is not a regular file")
        with path.open("rb", buffering=0) as file:
            return _read_header(Cursor(path, file, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise InvalidModel(str(path), error.strerror or str(error)) from error


def _read_header(cursor: Cursor) -> GGUFHeader:
    version, tensor_count, key_count = _read_counts(cursor)
    metadata: dict[str, MetadataValue] = {}
    types: dict[str, ValueType] = {}
    for index in range(key_count):
        place = cursor.position
        key = cursor.read_name(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            cursor.fail(f"key {index} at byte {place:,} is {key!r} for a second time")
        metadata[key], types[key] = _read_value(cursor, f"the value of {key!r}")
    alignment = _get_alignment(cursor, metadata, types)
    tensors = _read_tensors(cursor, tensor_count, alignment)
    start = cursor.position
    if tensors:
        start = _check_tensor_data(cursor, tensors, alignment)
    return GGUFHeader(cursor.path, version, alignment, metadata, types, tensors, start, cursor.size)


def _read_counts(cursor: Cursor) -> tuple[int, int, int]:
    magic = cursor.read_bytes(4, "the magic number")
    if magic != b"GGUF":
        cursor.fail(f"it is not a GGUF file: it begins with {magic!r}")
    version = cursor.read_integer(U32, "the version")
    if version & 0xFFFF == 0:
        cursor.fail(f"it was written for big-endian machines (version field {version:#010x})")
    if version not in (2, 3):
        cursor.fail(f"it is GGUF version {version:,}; versions 2 and 3 can be read")
    tensors = cursor.read_integer(U64, "the number of tensors")
    keys = cursor.read_integer(U64, "the number of keys")
    # The shortest key has 14 bytes (length, one letter, type, one byte), the shortest tensor 25.
    for count, smallest, limit, what in ((keys, 14, MAX_KEYS, "keys"), (tensors, 25, MAX_TENSORS, "tensors")):
        if count * smallest > cursor.size:
            cursor.fail(f"it claims {count:,} {what}, the file has only {cursor.size:,} bytes")
        if count > limit:
            cursor.fail(f"it has {count:,} {what}, the limit is {limit:,}")
    return version, tensors, keys


def _read_value_type(cursor: Cursor, label: str) -> ValueType:
    place = cursor.position
    number = cursor.read_integer(U32, label)
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"{label} at byte {place:,} has the unknown type {number:,}")


def _read_value(cursor: Cursor, label: str) -> tuple[MetadataValue, ValueType]:
    kind = _read_value_type(cursor, label)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, label)
    if kind is ValueType.STRING:
        return decode_string(cursor.read_string(label, MAX_HEADER_BYTES)), kind
    number = np.dtype(NUMPY_TYPES[kind])
    value: int | float = np.frombuffer(cursor.read_bytes(number.itemsize, label), number)[0].item()
    return (bool(value) if kind is ValueType.BOOL else value), kind


def _read_array(cursor: Cursor, label: str) -> tuple[MetadataValue, ValueType]:
    place = cursor.position
    kind = _read_value_type(cursor, label)
    count = cursor.read_integer(U64, label)
    if kind is ValueType.ARRAY:
        cursor.fail(f"{label} at byte {place:,} is an array of arrays, which llama.cpp does not read")
    room = cursor.size - cursor.position
    size = U64.size if kind is ValueType.STRING else np.dtype(NUMPY_TYPES[kind]).itemsize
    if count * size > room:
        cursor.fail(f"{label} at byte {place:,} claims {count:,} elements, the file has {room:,} more bytes")
    cursor.count_elements(count, kind is ValueType.STRING, label)
    if kind is ValueType.STRING:
        return _read_strings(cursor, count, label), kind
    elements = np.frombuffer(cursor.read_bytes(count * size, label), NUMPY_TYPES[kind])
    return (elements != 0 if kind is ValueType.BOOL else elements), kind


def _read_strings(cursor: Cursor, count: int, label: str) -> StringArray:
    start = position = cursor.position
    data, loaded, unpack = cursor.data, len(cursor.data), U64.unpack_from
    ends = array("Q")
    for _ in range(count):
        if position + 8 > loaded:
            cursor.load_until(position + 8, label)
            loaded = len(data)
        position += 8 + unpack(data, position)[0]
        if position > loaded:
            cursor.load_until(position, f"string {len(ends):,} of {label}")
            loaded = len(data)
        ends.append(position - start)
    return StringArray(cursor.read_bytes(position - start, label), ends)


def _get_alignment(cursor: Cursor, metadata: dict[str, MetadataValue], types: dict[str, ValueType]) -> int:
    alignment = metadata.get("general.alignment", DATA_ALIGNMENT)
    if not isinstance(alignment, int) or types.get("general.alignment", ValueType.UINT32) is not ValueType.UINT32:
        cursor.fail("general.alignment is not a 32-bit number")
    if alignment == 0 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment:,}, which is not a power of two")
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for index in range(count):
        place = cursor.position
        name = cursor.read_name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in tensors:
            cursor.fail(f"tensor {index} at byte {place:,} is {name!r} for a second time")
        tensor = _read_tensor(cursor, name)
        if tensor.offset != expected:
            cursor.fail(f"tensor {name!r} has offset {tensor.offset:,}, the one before it ends at {expected:,}")
        expected += -(-tensor.nbytes // alignment) * alignment
        tensors[name] = tensor
    return tuple(tensors.values())


def _read_tensor(cursor: Cursor, name: str) -> TensorInfo:
    what = f"tensor {name!r}"
    dimensions = cursor.read_integer(U32, what)
    if dimensions > MAX_DIMENSIONS:
        cursor.fail(f"{what} claims {dimensions:,} dimensions, the limit is {MAX_DIMENSIONS}")
    shape = tuple(cursor.read_integer(U64, what) for _ in range(dimensions))
    elements = 1
    for size in shape:
        elements *= size
        if size == 0 or elements > MAX_ELEMENTS:
            cursor.fail(f"{what} has the impossible shape {list(shape)}")
    number = cursor.read_integer(U32, what)
    if number not in TENSOR_TYPES:
        cursor.fail(f"{what} has the unknown type {number:,}")
    kind, block, block_bytes = TENSOR_TYPES[number]
    row = shape[0] if shape else 1
    if row % block:
        cursor.fail(f"{what} has rows of {row:,} elements, {kind} needs a multiple of {block}")
    return TensorInfo(name, shape, kind, cursor.read_integer(U64, what), elements // block * block_bytes)


def _check_tensor_data(cursor: Cursor, tensors: tuple[TensorInfo, ...], alignment: int) -> int:
    start = -(-cursor.position // alignment) * alignment
    for tensor in tensors:
        begin, end = start + tensor.offset, start + tensor.offset + tensor.nbytes
        if end > cursor.size:
            cursor.fail(f"tensor {tensor.name!r} ends at byte {end:,}, the file has {cursor.size:,}: it is incomplete")
        if begin % DATA_ALIGNMENT:
            cursor.fail(f"tensor {tensor.name!r} begins at byte {begin:,}, not at a multiple of {DATA_ALIGNMENT}")
    return start
