"""Reads the header of a GGUF file as untrusted input: every count, length and offset is checked before it is used.

Contains the format and the limits of llama.cpp's own reader. The meaning of the keys belongs to `inspection`.
"""

from __future__ import annotations

import functools
import os
import stat
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.formats import NUMPY_TYPES, TENSOR_TYPES, ValueType

# Limits on work, several times what the largest real models have: llama.cpp reads arrays element by element.
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_STRINGS = 1_500_000
MAX_NUMBERS = 8_000_000
MAX_KEYS = 4096  # llama.cpp searches keys and tensors linearly; real models have under 200 and 3,000
MAX_TENSORS = 8192
MAX_KEY_BYTES = 1024
MAX_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**63 - 1
DATA_ALIGNMENT_BYTES = 32  # llama.cpp aborts if a mapped tensor does not start at a multiple of this
READ_CHUNK_BYTES = 1024 * 1024

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """Reads a file forward without trusting it: a length is used only after the file size and a limit confirm it.

    Loads only what the header needs. Reads instead of mapping, so that a file that shrinks while it is read is an
    error and not a crash.
    """

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self.strings_left, self.numbers_left = MAX_STRINGS, MAX_NUMBERS  # over all arrays
        self.data = bytearray()
        self._file = file

    def fail(self, reason: str) -> NoReturn:
        raise InvalidModel(str(self.path), reason)

    def load_until(self, end: int, label: str) -> None:
        """Load the bytes before `end`."""
        if end > self.size:
            self.fail(f"{label} at byte {self.position:,} needs {end:,} bytes of file, the file has {self.size:,}")
        if end > MAX_HEADER_BYTES:
            self.fail(f"{label} makes the header {end:,} bytes long, over the limit of {MAX_HEADER_BYTES:,}")
        while len(self.data) < end:
            chunk = self._file.read(max(READ_CHUNK_BYTES, end - len(self.data)))
            if not chunk:
                self.fail(f"the file ended at byte {len(self.data):,} while it was read")
            self.data += chunk

    def count_elements(self, count: int, strings: bool, label: str) -> None:
        """Count an array's elements towards the limits."""
        if strings:
            self.strings_left -= count
        else:
            self.numbers_left -= count
        if self.strings_left < 0 or self.numbers_left < 0:
            limit = MAX_STRINGS if strings else MAX_NUMBERS
            self.fail(f"{label} has {count:,} elements, all arrays together may have {limit:,} of this kind")

    def read_bytes(self, count: int, label: str) -> bytes:
        end = self.position + count
        if end > len(self.data):
            self.load_until(end, label)
        chunk = bytes(self.data[self.position : end])
        self.position = end
        return chunk

    def read_integer(self, format: struct.Struct, label: str) -> int:
        value: int = format.unpack(self.read_bytes(format.size, label))[0]
        return value

    def read_string(self, label: str, limit: int) -> bytes:
        start = self.position
        length = self.read_integer(U64, label)
        remaining = self.size - self.position
        if length > remaining:
            self.fail(f"{label} at byte {start:,} claims a length of {length:,} bytes, the file has {remaining:,} more")
        if length > limit:
            self.fail(f"{label} at byte {start:,} is {length:,} bytes long, the limit is {limit:,}")
        return self.read_bytes(length, label)

    def read_name(self, label: str, limit: int) -> str:
        """Read a key or tensor name. llama.cpp compares names up to a zero byte, so one inside could hide a name."""
        start = self.position
        raw = self.read_string(label, limit)
        if not raw or b"\0" in raw:
            self.fail(f"{label} at byte {start:,} is {'empty' if not raw else 'not text: it has a zero byte'}")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{label} at byte {start:,} is not text: {raw[:32]!r}")


class StringArray:
    """An array of strings as stored in the file; elements are decoded on access."""

    def __init__(self, data: bytes, ends: array[int]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return decode_string(self._data[start + U64.size : self._ends[index]])

    def iter_raw(self) -> Iterator[bytes]:
        """Yield the strings as llama.cpp reads them: up to the first zero byte."""
        data, start = self._data, 0
        for end in self._ends:
            yield data[start + 8 : end].partition(b"\0")[0]
            start = end


MetadataScalar: TypeAlias = int | float | bool | str
MetadataValue: TypeAlias = MetadataScalar | NDArray[Any] | StringArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. The first dimension varies fastest; `offset` is relative to `GGUFHeader.data_start`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file. `value_types` has the stored type of each key, of its elements for an array."""

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
        """Number of files of a split model."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) else 1


def decode_string(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")


def read_header(path: Path) -> GGUFHeader:
    """Read and check everything before the tensor data; the data itself is not read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # checked first: opening a pipe would wait for its writer
            raise InvalidModel(str(path), "it is not a regular file")
        return _read_file(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        raise InvalidModel(str(path), error.strerror or str(error)) from error


@functools.lru_cache(maxsize=2)  # a load reads the header of the model, and of the projector, twice
def _read_file(path: Path, size: int, modified: int, inode: int) -> GGUFHeader:
    """Read the header of a file once for each state of the file."""
    with path.open("rb", buffering=0) as file:
        return _read_header(Cursor(path, file, os.fstat(file.fileno()).st_size))


def _read_header(cursor: Cursor) -> GGUFHeader:
    version, tensor_count, key_count = _read_counts(cursor)
    metadata: dict[str, MetadataValue] = {}
    types: dict[str, ValueType] = {}
    for index in range(key_count):
        start = cursor.position
        key = cursor.read_name(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            cursor.fail(f"key {index} at byte {start:,} is {key!r} for a second time")
        metadata[key], types[key] = _read_value(cursor, f"the value of {key!r}")
    alignment = metadata.get("general.alignment", DATA_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or types.get("general.alignment", ValueType.UINT32) is not ValueType.UINT32:
        cursor.fail("general.alignment is not a 32-bit number")
    if alignment == 0 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment:,}, which is not a power of two")
    tensors = _read_tensors(cursor, tensor_count, alignment)
    data_start = _check_tensor_data(cursor, tensors, alignment) if tensors else cursor.position
    return GGUFHeader(cursor.path, version, alignment, metadata, types, tensors, data_start, cursor.size)


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
    for count, min_bytes, limit, label in ((keys, 14, MAX_KEYS, "keys"), (tensors, 25, MAX_TENSORS, "tensors")):
        if count * min_bytes > cursor.size:
            cursor.fail(f"it claims {count:,} {label}, the file has only {cursor.size:,} bytes")
        if count > limit:
            cursor.fail(f"it has {count:,} {label}, the limit is {limit:,}")
    return version, tensors, keys


def _read_value_type(cursor: Cursor, label: str) -> ValueType:
    start = cursor.position
    number = cursor.read_integer(U32, label)
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"{label} at byte {start:,} has the unknown type {number:,}")


def _read_value(cursor: Cursor, label: str) -> tuple[MetadataValue, ValueType]:
    kind = _read_value_type(cursor, label)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, label)
    if kind is ValueType.STRING:
        return decode_string(cursor.read_string(label, MAX_HEADER_BYTES)), kind
    dtype = np.dtype(NUMPY_TYPES[kind])
    value: int | float = np.frombuffer(cursor.read_bytes(dtype.itemsize, label), dtype)[0].item()
    return (bool(value) if kind is ValueType.BOOL else value), kind


def _read_array(cursor: Cursor, label: str) -> tuple[MetadataValue, ValueType]:
    start = cursor.position
    kind = _read_value_type(cursor, label)
    count = cursor.read_integer(U64, label)
    if kind is ValueType.ARRAY:
        cursor.fail(f"{label} at byte {start:,} is an array of arrays, which llama.cpp does not read")
    remaining = cursor.size - cursor.position
    size = U64.size if kind is ValueType.STRING else np.dtype(NUMPY_TYPES[kind]).itemsize
    if count * size > remaining:
        cursor.fail(f"{label} at byte {start:,} claims {count:,} elements, the file has {remaining:,} more bytes")
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


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for index in range(count):
        start = cursor.position
        name = cursor.read_name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in tensors:
            cursor.fail(f"tensor {index} at byte {start:,} is {name!r} for a second time")
        tensor = _read_tensor(cursor, name)
        if tensor.offset != expected:
            cursor.fail(f"tensor {name!r} has offset {tensor.offset:,}, the one before it ends at {expected:,}")
        expected += -(-tensor.nbytes // alignment) * alignment
        tensors[name] = tensor
    return tuple(tensors.values())


def _read_tensor(cursor: Cursor, name: str) -> TensorInfo:
    label = f"tensor {name!r}"
    dimensions = cursor.read_integer(U32, label)
    if dimensions > MAX_DIMENSIONS:
        cursor.fail(f"{label} claims {dimensions:,} dimensions, the limit is {MAX_DIMENSIONS}")
    shape = tuple(cursor.read_integer(U64, label) for _ in range(dimensions))
    elements = 1
    for size in shape:
        elements *= size
        if size == 0 or elements > MAX_ELEMENTS:
            cursor.fail(f"{label} has the impossible shape {list(shape)}")
    number = cursor.read_integer(U32, label)
    if number not in TENSOR_TYPES:
        cursor.fail(f"{label} has the unknown type {number:,}")
    kind, block, block_bytes = TENSOR_TYPES[number]
    row = shape[0] if shape else 1
    if row % block:
        cursor.fail(f"{label} has rows of {row:,} elements, {kind} needs a multiple of {block}")
    return TensorInfo(name, shape, kind, cursor.read_integer(U64, label), elements // block * block_bytes)


def _check_tensor_data(cursor: Cursor, tensors: tuple[TensorInfo, ...], alignment: int) -> int:
    start = -(-cursor.position // alignment) * alignment
    for tensor in tensors:
        begin, end = start + tensor.offset, start + tensor.offset + tensor.nbytes
        if end > cursor.size:
            cursor.fail(f"tensor {tensor.name!r} ends at byte {end:,}, the file has {cursor.size:,}: it is incomplete")
        if begin % DATA_ALIGNMENT_BYTES:
            cursor.fail(f"tensor {tensor.name!r} begins at byte {begin:,}, not at a multiple of {DATA_ALIGNMENT_BYTES}")
    return start
