"""Cells of a model with those of its heads beside them, as one row of bytes each, so that they are stored together.

A row is the model's cell, a byte that says whether the heads know the entry, and the heads' cell.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidState
from afterglow.llama import kv_layout as llama_layout
from afterglow.llama import page_buffers
from afterglow.llama.kv_layout import SavedCells

LAYOUT_LENGTH = struct.Struct("<I")
CellRows = NDArray[np.uint8]


class PairedCells:
    """The cells of a saved sequence; the heads have those of its last entries, or none."""

    def __init__(self, model_cells: SavedCells, head_cells: SavedCells | None, head_layout: bytes) -> None:
        """`layout` is how the heads' cells are written, whether there are any or not; empty: they are left out."""
        self.layout = LAYOUT_LENGTH.pack(len(model_cells.layout)) + model_cells.layout + head_layout
        self.cell_bytes = (
            model_cells.cell_bytes + 1 + (llama_layout.KVLayout.unpack(head_layout).cell_bytes if head_layout else 0)
        )
        self._model_cells = model_cells
        self._head_cells = (
            head_cells if head_layout and head_cells is not None and _has_same_end(model_cells, head_cells) else None
        )

    def __len__(self) -> int:
        return len(self._model_cells)

    def copy_rows(self, start: int, stop: int) -> CellRows:
        rows = page_buffers.allocate_zeros(stop - start, self.cell_bytes)
        own = self._model_cells.cell_bytes
        rows[:, :own] = self._model_cells.copy_rows(start, stop)
        if self._head_cells is not None:
            before = len(self._model_cells) - len(self._head_cells)  # entries that the heads know nothing of
            first = max(start, before)
            if first < stop:
                rows[first - start :, own] = 1
                rows[first - start :, own + 1 :] = self._head_cells.copy_rows(first - before, stop - before)
        return rows


def _has_same_end(model_cells: SavedCells, head_cells: SavedCells) -> bool:
    """Whether the heads' cells stand where the last of the model's do."""
    if not 0 < len(head_cells) <= len(model_cells):
        return False
    return bool(np.array_equal(model_cells.positions[len(model_cells) - len(head_cells) :], head_cells.positions))


def split_cells(layout: bytes, blocks: Sequence[CellRows]) -> tuple[bytes, list[CellRows], bytes, list[CellRows]]:
    """The model's layout and cells, and those of its heads: of the last entries that they know without a gap."""
    if len(layout) < LAYOUT_LENGTH.size:
        raise InvalidState("its layout is cut off")
    end = LAYOUT_LENGTH.size + LAYOUT_LENGTH.unpack_from(layout)[0]
    own, beside = layout[LAYOUT_LENGTH.size : end], layout[end:]
    width = llama_layout.KVLayout.unpack(own).cell_bytes
    if any(block.ndim != 2 or block.shape[1] <= width for block in blocks):
        raise InvalidState("its cells are of another size")
    heads: list[CellRows] = []
    for block in reversed(blocks):
        unknown = np.flatnonzero(block[:, width] == 0)
        first = int(unknown[-1]) + 1 if len(unknown) else 0
        if first < len(block):
            heads.insert(0, block[first:, width + 1 :])
        if first:
            break
    return own, [block[:, :width] for block in blocks], beside, heads


def read_first_position(rows: CellRows) -> int:
    """Where the first of these cells stands."""
    return int(np.ascontiguousarray(rows[0, :4]).view("<i4")[0])
