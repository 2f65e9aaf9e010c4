"""Splits the attention part of a saved sequence into cells, and joins cells to a state.

A full state is a header, the attention cells (of a sliding-window model: those of its full-attention layers), and the
bytes of a partial state. llama.cpp stores cells layer by layer; here a cell is one row of bytes: its cell info
(position and owner), then its keys and values in every layer. Rows of a sequence can be split and joined anywhere.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from afterglow.errors import InvalidState
from afterglow.llama import page_buffers
from afterglow.llama.parallel import copy_parallel

HEADER_BYTES = 8  # magic and sequence
STATE_MAGIC = 0xAF143CD8
CELL_INFO_SIZES = (12, 24, 20)  # models with several positions per token have more
ELEMENT_SIZES = (1, 2, 4, 8)  # of transposed values
FLAG_SIZES = (8, 0)  # bytes before the layers that differ between builds; stored unchanged
MAX_LAYERS = 4096
MATRIX_HEADER_BYTES = 12  # before the keys, and before the values, of a layer
# streams, cell_info_bytes, element_bytes, number of flag bytes, flags, layers
LAYOUT_HEADER = struct.Struct("<IIII8sI")
LAYER_RECORD = struct.Struct("<iIiI")  # type and bytes of a cell's keys, type and bytes of its values


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a llama.cpp build stores the cells of a model."""

    streams: int
    cell_info_bytes: int
    element_bytes: int  # bytes of one element if the values are transposed; 0: they are not
    flags: bytes
    layers: tuple[tuple[int, int, int, int], ...]  # type and bytes of the keys, type and bytes of the values

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        return self.cell_info_bytes + sum(keys + values for _, keys, _, values in self.layers)

    def pack(self) -> bytes:
        head = LAYOUT_HEADER.pack(
            self.streams, self.cell_info_bytes, self.element_bytes, len(self.flags), self.flags, len(self.layers)
        )
        return head + b"".join(LAYER_RECORD.pack(*layer) for layer in self.layers)

    @classmethod
    def unpack(cls, data: bytes) -> KVLayout:
        """Parse the result of `pack`; raise `InvalidState` for anything else."""
        try:
            streams, cell_info_bytes, element, size, flags, count = LAYOUT_HEADER.unpack_from(data)
            layers = tuple(LAYER_RECORD.iter_unpack(data[LAYOUT_HEADER.size :]))
        except struct.error as error:
            raise InvalidState(f"its layout cannot be read: {error}") from error
        valid = 0 < streams <= 256 and cell_info_bytes in CELL_INFO_SIZES and size in FLAG_SIZES
        valid = valid and element in (0, *ELEMENT_SIZES)
        valid = valid and not (element and any(values % element for *_, values in layers))
        if not valid or len(layers) != count or any(min(layer) < 0 for layer in layers):
            raise InvalidState("its layout is unknown")
        return cls(streams, cell_info_bytes, element, flags[:size], layers)


@dataclass(frozen=True, slots=True)
class CellPart:
    """Part of every cell: its info, or the keys or the values of consecutive layers of equal size.

    `cells` is a view of a state. It is copied as a whole: one copy for each layer would take several times as long.
    """

    cells: NDArray[np.unsignedinteger]  # (layers, cells, bytes), or (layers, cells, elements) of transposed values
    offset: int  # of the first layer in a row
    distance: int  # between layers in a row

    def view_rows(self, rows: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
        """Return this part of `rows` in the shape of `cells`."""
        layers, _, width = self.cells.shape
        nbytes = width * self.cells.itemsize
        assert self.offset + (layers - 1) * self.distance + nbytes <= rows.shape[1], "a row is shorter than its layout"
        assert rows.strides[1] == 1
        strides = (self.distance, rows.strides[0], 1)
        return as_strided(rows[:, self.offset :], (layers, len(rows), nbytes), strides).view(self.cells.dtype)


class SavedCells:
    """The cells of one saved sequence, in the order of their positions."""

    def __init__(
        self, layout: KVLayout, count: int, parts: Sequence[CellPart], order: NDArray[np.int64] | None
    ) -> None:
        self.layout = layout.pack()
        self.cell_bytes = layout.cell_bytes
        self._count = count
        self._parts = parts
        self._order = order  # None: stored in order of position

    def __len__(self) -> int:
        return self._count

    @property
    def positions(self) -> NDArray[np.int32]:
        """The position of each cell."""
        positions = self._parts[0].cells[0, :, :4].copy().view("<i4")[:, 0]
        return positions if self._order is None else positions[self._order]

    def copy_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Copy cells [start, stop) to a long-lived buffer, one row per cell. Thread-safe."""
        rows = page_buffers.allocate_zeros(stop - start, self.cell_bytes, populate=False)  # several threads copy
        selection = slice(start, stop) if self._order is None else self._order[start:stop]
        for part in self._parts:
            part.view_rows(rows)[...] = part.cells[:, selection]
        return rows


def parse_cells(data: NDArray[np.uint8], partial_bytes: int) -> SavedCells | None:
    """Parse the cells of a full state that ends in `partial_bytes` of a partial state; None for an unknown layout."""
    for cell_info_bytes, flag_bytes in itertools.product(CELL_INFO_SIZES, FLAG_SIZES):
        try:
            return _parse_cells(data, partial_bytes, cell_info_bytes, flag_bytes)
        except (struct.error, ValueError):
            continue
    return None


def _parse_cells(data: NDArray[np.uint8], partial_bytes: int, cell_info_bytes: int, flag_bytes: int) -> SavedCells:
    at = HEADER_BYTES
    (streams,) = struct.unpack_from("<I", data.data, at)
    _require(0 < streams <= 256)
    counts = 0
    count = 0
    while not count and counts < streams:
        at, counts = at + 4, counts + 1
        (count,) = struct.unpack_from("<I", data.data, at)
    at += 4
    _require(bool(count) and at + count * cell_info_bytes <= len(data))
    cell_info = data[at : at + count * cell_info_bytes].reshape(count, cell_info_bytes)
    positions = cell_info[:, :4].copy().view("<i4")[:, 0]
    owners = cell_info[:, 4:8].copy().view("<u4")[:, 0]
    _require(bool((positions >= 0).all()) and bool((owners == 1).all()))
    in_order = bool((np.diff(positions) >= 0).all())
    order = None if in_order else np.argsort(positions, kind="stable")
    at += count * cell_info_bytes
    transposed, layers = struct.unpack_from("<II", data.data, at)
    _require(transposed in (0, 1) and layers <= MAX_LAYERS)  # zero if every layer has a sliding window
    flags = data[at + 8 : at + 8 + flag_bytes].tobytes()
    keys_start = at + 8 + flag_bytes
    keys, at = _parse_matrices(data, keys_start, layers, count)
    element = (struct.unpack_from("<iI", data.data, at)[1] if layers else 1) if transposed else 0
    values_start = at
    values, at = _parse_matrices(data, at, layers, count, transposed=bool(transposed))
    _require(at + 4 * (streams - counts) + partial_bytes == len(data))
    layer_sizes = tuple((*key, *value) for key, value in zip(keys, values, strict=True))
    layout = KVLayout(streams, cell_info_bytes, element, flags, layer_sizes)
    parts = [CellPart(cell_info[None], 0, 0), *_view_layers(data, keys_start, values_start, layout, count)]
    return SavedCells(layout, count, parts, order)


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


def _parse_matrices(
    data: NDArray[np.uint8], at: int, layers: int, count: int, *, transposed: bool = False
) -> tuple[list[tuple[int, int]], int]:
    """Return the type and the bytes per cell of each layer, and the end of their matrices."""
    matrices: list[tuple[int, int]] = []
    for _ in range(layers):
        if transposed:
            kind, element, width = struct.unpack_from("<iII", data.data, at)
            _require(element in ELEMENT_SIZES and 0 < width < 2**28)
        else:
            kind, width = struct.unpack_from("<iQ", data.data, at)
            element = 1
            _require(0 < width < 2**31)
        at, size = at + MATRIX_HEADER_BYTES, element * width
        _require(0 <= kind < 256 and at + count * size <= len(data))
        matrices.append((kind, size))
        at += count * size
    return matrices, at


def _view_layers(
    data: NDArray[np.uint8], keys_start: int, values_start: int, layout: KVLayout, count: int
) -> list[CellPart]:
    """Return the keys and the values of all layers in a state, of which the headers start at these offsets."""
    parts: list[CellPart] = []
    offset = layout.cell_info_bytes
    for (keys, values), run in itertools.groupby((layer[1], layer[3]) for layer in layout.layers):
        layers = len(list(run))
        parts.append(CellPart(_view_matrices(data, keys_start, layers, count, keys), offset, keys + values))
        view = _view_matrices(data, values_start, layers, count, values, layout.element_bytes)
        parts.append(CellPart(view, offset + keys, keys + values))
        keys_start += layers * (MATRIX_HEADER_BYTES + count * keys)
        values_start += layers * (MATRIX_HEADER_BYTES + count * values)
        offset += layers * (keys + values)
    return parts


def _view_matrices(
    data: NDArray[np.uint8], at: int, layers: int, count: int, size: int, element: int = 0
) -> NDArray[np.unsignedinteger]:
    """Return a view of consecutive matrices of equal size, of which the first header starts at `at`.

    Elements of transposed values are numbers: copying them one by one takes a tenth of the time of copying their bytes.
    """
    distance = MATRIX_HEADER_BYTES + count * size
    assert at + layers * distance <= len(data)
    matrices = data[at : at + layers * distance].reshape(layers, distance)[:, MATRIX_HEADER_BYTES:]
    if element:
        return matrices.view(f"<u{element}").reshape(layers, size // element, count).transpose(0, 2, 1)
    return matrices.reshape(layers, count, size)


def join_cells(
    layout: KVLayout, blocks: Sequence[NDArray[np.uint8]], partial: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    """Build a full state of these cells and, if the model has other memory too, of a partial state."""
    count = sum(len(block) for block in blocks)
    if any(block.ndim != 2 or block.shape[1] != layout.cell_bytes for block in blocks) or not count:
        raise InvalidState("its cells have the wrong size")
    header_bytes = 12 * 2 * len(layout.layers) + 8 + len(layout.flags)
    size = HEADER_BYTES + 4 + 4 * layout.streams + count * layout.cell_bytes + header_bytes
    tail = None if partial is None else partial[HEADER_BYTES:]
    data = np.empty(size + (0 if tail is None else len(tail)), dtype=np.uint8)
    header = np.frombuffer(struct.pack("<II", STATE_MAGIC, 0), dtype=np.uint8) if partial is None else partial
    data[:HEADER_BYTES] = header[:HEADER_BYTES]
    struct.pack_into("<II", data.data, HEADER_BYTES, layout.streams, count)
    parts, at = _write_headers(data, HEADER_BYTES + 8, layout, count)

    def copy_block(start: int, block: NDArray[np.uint8]) -> None:
        for part in parts:
            part.cells[:, start : start + len(block)] = part.view_rows(block)

    starts = itertools.accumulate((len(block) for block in blocks), initial=0)
    copy_parallel(count * layout.cell_bytes, copy_block, zip(starts, blocks, strict=False))
    data[at:size] = 0  # the other streams have no cells of this sequence
    if tail is not None:
        data[size:] = tail
    return data


def _write_headers(data: NDArray[np.uint8], at: int, layout: KVLayout, count: int) -> tuple[list[CellPart], int]:
    """Write all headers; return the parts that remain to be filled, and their end."""
    info = data[at : at + count * layout.cell_info_bytes].reshape(1, count, layout.cell_info_bytes)
    at += count * layout.cell_info_bytes
    struct.pack_into("<II", data.data, at, int(layout.element_bytes > 0), len(layout.layers))
    at += 8
    data[at : at + len(layout.flags)] = np.frombuffer(layout.flags, dtype=np.uint8)
    at += len(layout.flags)
    keys_start = at
    for kind, size, _, _ in layout.layers:
        struct.pack_into("<iQ", data.data, at, kind, size)
        at += MATRIX_HEADER_BYTES + count * size
    values_start = at
    for _, _, kind, size in layout.layers:
        if element := layout.element_bytes:
            struct.pack_into("<iII", data.data, at, kind, element, size // element)
        else:
            struct.pack_into("<iQ", data.data, at, kind, size)
        at += MATRIX_HEADER_BYTES + count * size
    return [CellPart(info, 0, 0), *_view_layers(data, keys_start, values_start, layout, count)], at
