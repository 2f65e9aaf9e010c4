"""A GGUF file taken apart so that a test can change one thing and write the rest consistently. Trusts what it reads."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

from afterglow.llama.gguf.formats import TENSOR_TYPES, ValueType

LAYOUTS = {
    ValueType.UINT8: "B", ValueType.INT8: "b", ValueType.UINT16: "H", ValueType.INT16: "h",
    ValueType.UINT32: "I", ValueType.INT32: "i", ValueType.UINT64: "Q", ValueType.INT64: "q",
    ValueType.FLOAT32: "f", ValueType.FLOAT64: "d", ValueType.BOOL: "B",
}  # fmt: skip


@dataclass
class Entry:
    """One key. `values` has one element unless `array`; strings are bytes."""

    key: bytes
    kind: int
    array: bool
    values: list[Any]


@dataclass
class Weights:
    """One tensor. `offset` is written as it is when not None."""

    name: bytes
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Document:
    """The whole file. `fields` has, after `write`, the place of every count and length."""

    version: int
    entries: list[Entry]
    weights: list[Weights]
    alignment: int = 32
    fields: dict[str, list[int]] = field(default_factory=dict)
    header_size: int = 0

    def entry(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key.encode()), None)

    def put(self, key: str, kind: ValueType, *values: Any, array: bool = False) -> None:
        """Set a key, new or not; several values are an array."""
        self.drop(key)
        self.entries.append(Entry(key.encode(), kind, array or len(values) > 1, list(values)))

    def drop(self, key: str) -> None:
        self.entries = [entry for entry in self.entries if entry.key != key.encode()]

    def write(self) -> bytes:
        """The file; tensors lie one after the other, each at a multiple of the alignment."""
        out = bytearray(b"GGUF" + struct.pack("<IQQ", self.version, len(self.weights), len(self.entries)))
        self.fields = {"tensor count": [8], "key count": [16]}
        for entry in self.entries:
            self._write_entry(out, entry)
        position = 0
        for weights in self.weights:
            self.fields.setdefault(f"length of the name of {weights.name!r}", []).append(len(out))
            out += struct.pack("<Q", len(weights.name)) + weights.name
            out += struct.pack(f"<I{len(weights.shape)}QI", len(weights.shape), *weights.shape, weights.kind)
            self.fields.setdefault(f"offset of {weights.name!r}", []).append(len(out))
            out += struct.pack("<Q", position if weights.offset is None else weights.offset)
            position += padded(len(weights.data), self.alignment)
        self.header_size = len(out)
        out += bytes(padded(len(out), self.alignment) - len(out))
        for weights in self.weights:
            out += weights.data + bytes(padded(len(weights.data), self.alignment) - len(weights.data))
        return bytes(out)

    def _write_entry(self, out: bytearray, entry: Entry) -> None:
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
            out += struct.pack(f"<{len(entry.values)}{LAYOUTS[ValueType(entry.kind)]}", *entry.values)


def padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def tensor_bytes(shape: list[int], kind: int) -> int:
    _, block, size = TENSOR_TYPES[kind]
    return math.prod(shape) // block * size


def parse(original: bytes) -> Document:
    """Take a good file apart."""
    version, tensor_count, key_count = struct.unpack_from("<IQQ", original, 4)
    position = 24
    entries = []
    for _ in range(key_count):
        entry, position = _parse_entry(original, position)
        entries.append(entry)
    document = Document(version, entries, [])
    if (alignment := document.entry("general.alignment")) is not None:
        document.alignment = alignment.values[0]
    tensors = []
    for _ in range(tensor_count):
        name, position = _parse_string(original, position)
        (dimensions,) = struct.unpack_from("<I", original, position)
        *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", original, position + 4)
        position += 16 + 8 * dimensions
        tensors.append((name, shape, kind, offset))
    start = padded(position, document.alignment)
    for name, shape, kind, offset in tensors:
        begin = start + offset
        document.weights.append(Weights(name, shape, kind, original[begin : begin + tensor_bytes(shape, kind)]))
    return document


def _parse_string(data: bytes, position: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    return data[position + 8 : position + 8 + length], position + 8 + length


def _parse_entry(data: bytes, position: int) -> tuple[Entry, int]:
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
        layout = f"<{count}{LAYOUTS[ValueType(kind)]}"
        values = list(struct.unpack_from(layout, data, position))
        position += struct.calcsize(layout)
    return Entry(key, kind, is_array, values), position
