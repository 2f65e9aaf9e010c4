"""A parsed GGUF file: a test can change one thing and serialize the rest consistently. Trusts its input."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

from afterglow.llama.gguf.formats import TENSOR_TYPES, ValueType

STRUCT_FORMATS = {
    ValueType.UINT8: "B", ValueType.INT8: "b", ValueType.UINT16: "H", ValueType.INT16: "h",
    ValueType.UINT32: "I", ValueType.INT32: "i", ValueType.UINT64: "Q", ValueType.INT64: "q",
    ValueType.FLOAT32: "f", ValueType.FLOAT64: "d", ValueType.BOOL: "B",
}  # fmt: skip


@dataclass
class MetadataEntry:
    """One metadata key. `values` has one element unless `array`; strings are bytes."""

    key: bytes
    kind: int
    array: bool
    values: list[Any]


@dataclass
class TensorData:
    """One tensor. `offset` overrides the computed one if not None."""

    name: bytes
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Document:
    """The whole file. After `to_bytes`, `fields` has the byte offset of every count and length."""

    version: int
    entries: list[MetadataEntry]
    tensors: list[TensorData]
    alignment: int = 32
    fields: dict[str, list[int]] = field(default_factory=dict)
    header_size: int = 0

    def find(self, key: str) -> MetadataEntry | None:
        return next((entry for entry in self.entries if entry.key == key.encode()), None)

    def set(self, key: str, kind: ValueType, *values: Any, array: bool = False) -> None:
        """Set a key; several values are an array."""
        self.remove(key)
        self.entries.append(MetadataEntry(key.encode(), kind, array or len(values) > 1, list(values)))

    def remove(self, key: str) -> None:
        self.entries = [entry for entry in self.entries if entry.key != key.encode()]

    def to_bytes(self) -> bytes:
        """Serialize the file. Tensors are consecutive, each at a multiple of the alignment."""
        out = bytearray(b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.entries)))
        self.fields = {"tensor count": [8], "key count": [16]}
        for entry in self.entries:
            self._write_entry(out, entry)
        position = 0
        for tensor in self.tensors:
            self.fields.setdefault(f"length of the name of {tensor.name!r}", []).append(len(out))
            out += struct.pack("<Q", len(tensor.name)) + tensor.name
            out += struct.pack(f"<I{len(tensor.shape)}QI", len(tensor.shape), *tensor.shape, tensor.kind)
            self.fields.setdefault(f"offset of {tensor.name!r}", []).append(len(out))
            out += struct.pack("<Q", position if tensor.offset is None else tensor.offset)
            position += pad(len(tensor.data), self.alignment)
        self.header_size = len(out)
        out += bytes(pad(len(out), self.alignment) - len(out))
        for tensor in self.tensors:
            out += tensor.data + bytes(pad(len(tensor.data), self.alignment) - len(tensor.data))
        return bytes(out)

    def _write_entry(self, out: bytearray, entry: MetadataEntry) -> None:
        self.fields.setdefault(f"length of the key {entry.key!r}", []).append(len(out))
        out += struct.pack("<Q", len(entry.key)) + entry.key
        if entry.array:
            out += struct.pack("<II", ValueType.ARRAY, entry.kind)
            self.fields.setdefault(f"count of {entry.key!r}", []).append(len(out))
            out += struct.pack("<Q", len(entry.values))
        else:
            out += struct.pack("<I", entry.kind)
        if entry.kind == ValueType.STRING:
            for value in entry.values:
                self.fields.setdefault(f"string length in {entry.key!r}", []).append(len(out))
                out += struct.pack("<Q", len(value)) + value
        else:
            out += struct.pack(f"<{len(entry.values)}{STRUCT_FORMATS[ValueType(entry.kind)]}", *entry.values)


def pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def count_tensor_bytes(shape: list[int], kind: int) -> int:
    _, block, size = TENSOR_TYPES[kind]
    return math.prod(shape) // block * size


def parse_document(original: bytes) -> Document:
    """Parse a valid file."""
    version, tensor_count, key_count = struct.unpack_from("<IQQ", original, 4)
    position = 24
    entries = []
    for _ in range(key_count):
        entry, position = _parse_entry(original, position)
        entries.append(entry)
    document = Document(version, entries, [])
    if (alignment := document.find("general.alignment")) is not None:
        document.alignment = alignment.values[0]
    tensor_infos = []
    for _ in range(tensor_count):
        name, position = _parse_string(original, position)
        (dimensions,) = struct.unpack_from("<I", original, position)
        *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", original, position + 4)
        position += 16 + 8 * dimensions
        tensor_infos.append((name, shape, kind, offset))
    start = pad(position, document.alignment)
    for name, shape, kind, offset in tensor_infos:
        begin = start + offset
        document.tensors.append(
            TensorData(name, shape, kind, original[begin : begin + count_tensor_bytes(shape, kind)])
        )
    return document


def _parse_string(data: bytes, position: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    return data[position + 8 : position + 8 + length], position + 8 + length


def _parse_entry(data: bytes, position: int) -> tuple[MetadataEntry, int]:
    key, position = _parse_string(data, position)
    (kind,) = struct.unpack_from("<I", data, position)
    position, count, is_array = position + 4, 1, kind == ValueType.ARRAY
    if is_array:
        kind, count = struct.unpack_from("<IQ", data, position)
        position += 12
    values: list[Any] = []
    if kind == ValueType.STRING:
        for _ in range(count):
            value, position = _parse_string(data, position)
            values.append(value)
    else:
        format = f"<{count}{STRUCT_FORMATS[ValueType(kind)]}"
        values = list(struct.unpack_from(format, data, position))
        position += struct.calcsize(format)
    return MetadataEntry(key, kind, is_array, values), position
