"""Cuts the attention part of a saved sequence into cells, and puts cells together again.

A full state is a header, the attention cells (of a sliding-window model: those of its full layers), and the rest, which
is what a partial state holds. Cells are stored there layer by layer; here a cell is one row of bytes: where it stands,
then its keys and values in every layer. Rows of one sequence can be cut and joined anywhere.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidState
from afterglow.llama import pages

HEADER = 8  # magic and sequence
MAGIC = 0xAF143CD8
NOTES = (12, 24, 20)  # bytes that say where a cell stands; models with several positions for a token have more
FLAGS = (8, 0)  # bytes before the layers that differ between builds; they are kept as they are
MOST_LAYERS = 4096
PACKED = struct.Struct("<IIII8sI")  # streams, bytes of notes, bytes of one value, bytes of flags, the flags, layers
LAYER = struct.Struct("<iIiI")  # type and bytes of a cell's keys, type and bytes of its values


@dataclass(frozen=True, slots=True)
class Layout:
    """How a build writes the cells of a model."""

    streams: int
    notes: int
    element: int  # bytes of one number where values are transposed; 0: they are not
    flags: bytes
    layers: tuple[tuple[int, int, int, int], ...]  # type and bytes of the keys, type and bytes of the values

    @property
    def width(self) -> int:
        """Bytes of one cell."""
        return self.notes + sum(keys + values for _, keys, _, values in self.layers)

    def pack(self) -> bytes:
        head = PACKED.pack(self.streams, self.notes, self.element, len(self.flags), self.flags, len(self.layers))
        return head + b"".join(LAYER.pack(*layer) for layer in self.layers)

    @classmethod
    def unpack(cls, data: bytes) -> Layout:
        """`InvalidState` where `data` is not what `pack` made."""
        try:
            streams, notes, element, size, flags, count = PACKED.unpack_from(data)
            layers = tuple(LAYER.iter_unpack(data[PACKED.size :]))
        except struct.error as error:
            raise InvalidState(f"its layout cannot be read: {error}") from error
        known = 0 < streams <= 256 and notes in NOTES and size in FLAGS and element <= 8
        known = known and not (element and any(values % element for *_, values in layers))
        if not known or len(layers) != count or any(min(layer) < 0 for layer in layers):
            raise InvalidState("its layout is not one of ours")
        return cls(streams, notes, element, flags[:size], layers)


class Cells:
    """The cells of one saved sequence, in the order of their positions."""

    def __init__(
        self,
        layout: Layout,
        count: int,
        parts: Sequence[tuple[NDArray[np.uint8], int]],
        order: NDArray[np.int64] | None,
    ) -> None:
        self.layout = layout.pack()
        self.width = layout.width
        self._count = count
        self._parts = parts  # each: (cells, bytes, ...) and where it goes in a row
        self._order = order  # None: they lie in order

    def __len__(self) -> int:
        return self._count

    @property
    def positions(self) -> NDArray[np.int32]:
        """Where they stand."""
        written = self._parts[0][0][:, :4].copy().view("<i4")[:, 0]
        return written if self._order is None else written[self._order]

    def rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Cells [start, stop) as a copy to be kept, a row each."""
        rows = pages.zeros(stop - start, self.width)
        chosen = slice(start, stop) if self._order is None else self._order[start:stop]
        for part, offset in self._parts:
            taken = part[chosen]
            rows[:, offset : offset + taken[0].size] = taken.reshape(stop - start, -1)
        return rows


def cut(data: NDArray[np.uint8], rest: int) -> Cells | None:
    """The cells in a full state that ends in `rest` bytes of a partial one; None where they lie in a way we do not
    know."""
    for notes, flags in itertools.product(NOTES, FLAGS):
        try:
            return _cut(data, rest, notes, flags)
        except (struct.error, ValueError):
            continue
    return None


def _cut(data: NDArray[np.uint8], rest: int, notes: int, flags: int) -> Cells:
    at = HEADER
    (streams,) = struct.unpack_from("<I", data.data, at)
    _expect(0 < streams <= 256)
    counts = 0
    count = 0
    while not count and counts < streams:
        at, counts = at + 4, counts + 1
        (count,) = struct.unpack_from("<I", data.data, at)
    written, order = _notes(data, at + 4, count, notes)
    at += 4 + count * notes
    transposed, layers = struct.unpack_from("<II", data.data, at)
    _expect(transposed in (0, 1) and layers <= MOST_LAYERS)  # none: every layer has a window
    kept = data[at + 8 : at + 8 + flags].tobytes()
    keys, at = _matrices(data, at + 8 + flags, layers, count)
    element = (struct.unpack_from("<iI", data.data, at)[1] if layers else 1) if transposed else 0
    values, at = (_transposed if transposed else _matrices)(data, at, layers, count)
    _expect(at + 4 * (streams - counts) + rest == len(data))
    parts, offset = [(written, 0)], notes
    for _, size, part in itertools.chain.from_iterable(zip(keys, values, strict=True)):
        parts.append((part, offset))
        offset += size
    described = tuple((*one[:2], *other[:2]) for one, other in zip(keys, values, strict=True))
    return Cells(Layout(streams, notes, element, kept, described), count, parts, order)


def _notes(
    data: NDArray[np.uint8], at: int, count: int, notes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64] | None]:
    """Where the cells stand, and the order to read them in, where they do not lie in order."""
    _expect(bool(count) and at + count * notes <= len(data))
    written = data[at : at + count * notes].reshape(count, notes)
    positions = written[:, :4].copy().view("<i4")[:, 0]
    owners = written[:, 4:8].copy().view("<u4")[:, 0]
    _expect(bool((positions >= 0).all()) and bool((owners == 1).all()))
    in_order = bool((np.diff(positions) >= 0).all())
    return written, None if in_order else np.argsort(positions, kind="stable")


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError


Matrix = tuple[int, int, NDArray[np.uint8]]  # type, bytes of a cell, and (cells, bytes)


def _matrices(data: NDArray[np.uint8], at: int, layers: int, count: int) -> tuple[list[Matrix], int]:
    found: list[Matrix] = []
    for _ in range(layers):
        kind, size = struct.unpack_from("<iQ", data.data, at)
        at += 12
        _expect(0 <= kind < 256 and 0 < size < 2**31 and at + count * size <= len(data))
        found.append((kind, size, data[at : at + count * size].reshape(count, size)))
        at += count * size
    return found, at


def _transposed(data: NDArray[np.uint8], at: int, layers: int, count: int) -> tuple[list[Matrix], int]:
    found: list[Matrix] = []
    for _ in range(layers):
        kind, element, width = struct.unpack_from("<iII", data.data, at)
        at += 12
        size = element * width
        _expect(0 <= kind < 256 and 0 < element <= 8 and 0 < width < 2**28 and at + count * size <= len(data))
        matrix = data[at : at + count * size].reshape(width, count, element).transpose(1, 0, 2)
        found.append((kind, size, matrix))
        at += count * size
    return found, at


def join(layout: Layout, blocks: Sequence[NDArray[np.uint8]], rest: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """A full state of these cells and, where the model has other memory too, of a partial state."""
    count = sum(len(block) for block in blocks)
    if any(block.ndim != 2 or block.shape[1] != layout.width for block in blocks) or not count:
        raise InvalidState("its cells are of another size")
    heads = 12 * 2 * len(layout.layers) + 8 + len(layout.flags)
    size = HEADER + 4 + 4 * layout.streams + count * layout.width + heads
    tail = None if rest is None else rest[HEADER:]
    data = np.empty(size + (0 if tail is None else len(tail)), dtype=np.uint8)
    data[:HEADER] = np.frombuffer(struct.pack("<II", MAGIC, 0), dtype=np.uint8) if rest is None else rest[:HEADER]
    struct.pack_into("<II", data.data, HEADER, layout.streams, count)
    parts, at = _parts(data, HEADER + 8, layout, count)
    for number, block in zip(itertools.accumulate((len(block) for block in blocks), initial=0), blocks, strict=False):
        for part, offset in parts:  # one block after the other: it stays in the processor's cache
            part[number : number + len(block)] = block[:, offset : offset + part[0].size].reshape(
                len(block), *part.shape[1:]
            )
    data[at:size] = 0  # the other streams have no cells of this sequence
    if tail is not None:
        data[size:] = tail
    return data


Parts = list[tuple[NDArray[np.uint8], int]]  # where a part of every cell goes, and where it lies in a row


def _parts(data: NDArray[np.uint8], at: int, layout: Layout, count: int) -> tuple[Parts, int]:
    """Write all heads; what is left to fill, and where it ends."""
    parts: Parts = [(data[at : at + count * layout.notes].reshape(count, layout.notes), 0)]
    at += count * layout.notes
    struct.pack_into("<II", data.data, at, int(layout.element > 0), len(layout.layers))
    at += 8
    data[at : at + len(layout.flags)] = np.frombuffer(layout.flags, dtype=np.uint8)
    at += len(layout.flags)
    offsets = list(itertools.accumulate((keys + values for _, keys, _, values in layout.layers), initial=layout.notes))
    for (kind, size, _, _), offset in zip(layout.layers, offsets, strict=False):
        struct.pack_into("<iQ", data.data, at, kind, size)
        parts.append((data[at + 12 : at + 12 + count * size].reshape(count, size), offset))
        at += 12 + count * size
    for (_, keys, kind, size), offset in zip(layout.layers, offsets, strict=False):
        part = data[at + 12 : at + 12 + count * size]
        if element := layout.element:
            struct.pack_into("<iII", data.data, at, kind, element, size // element)
            parts.append((part.reshape(size // element, count, element).transpose(1, 0, 2), offset + keys))
        else:
            struct.pack_into("<iQ", data.data, at, kind, size)
            parts.append((part.reshape(count, size), offset + keys))
        at += 12 + count * size
    return parts, at
