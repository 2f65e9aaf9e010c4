"""Cells of a model paired with those of its MTP heads, one row of bytes each, so that they are stored together.

A row is the model's cell, a byte that says whether the heads have a cell for the entry, and the heads' cell.
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
    """Cells of a saved sequence. The heads have cells for its last entries, or none."""

    def __init__(self, model_cells: SavedCells, head_cells: SavedCells | None, head_layout: bytes) -> None:
        """`head_layout` is required even if there are no head cells; if it is empty, head cells are left out."""
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
        model_bytes = self._model_cells.cell_bytes
        rows[:, :model_bytes] = self._model_cells.copy_rows(start, stop)
        if self._head_cells is not None:
            uncovered = len(self._model_cells) - len(self._head_cells)  # leading entries without head cells
            first = max(start, uncovered)
            if first < stop:
                rows[first - start :, model_bytes] = 1
                head_rows = self._head_cells.copy_rows(first - uncovered, stop - uncovered)
                rows[first - start :, model_bytes + 1 :] = head_rows
        return rows


def _has_same_end(model_cells: SavedCells, head_cells: SavedCells) -> bool:
    """Return whether the heads' cells have the positions of the model's last cells."""
    if not 0 < len(head_cells) <= len(model_cells):
        return False
    return bool(np.array_equal(model_cells.positions[len(model_cells) - len(head_cells) :], head_cells.positions))


def split_cells(layout: bytes, blocks: Sequence[CellRows]) -> tuple[bytes, list[CellRows], bytes, list[CellRows]]:
    """Return the model's layout and cells, and those of its heads: the longest gapless run at the end."""
    if len(layout) < LAYOUT_LENGTH.size:
        raise InvalidState("its layout is truncated")
    end = LAYOUT_LENGTH.size + LAYOUT_LENGTH.unpack_from(layout)[0]
    model_layout, head_layout = layout[LAYOUT_LENGTH.size : end], layout[end:]
    width = llama_layout.KVLayout.unpack(model_layout).cell_bytes
    if any(block.ndim != 2 or block.shape[1] <= width for block in blocks):
        raise InvalidState("its cells have another size")
    head_rows: list[CellRows] = []
    for block in reversed(blocks):
        uncovered = np.flatnonzero(block[:, width] == 0)
        first = int(uncovered[-1]) + 1 if len(uncovered) else 0
        if first < len(block):
            head_rows.insert(0, block[first:, width + 1 :])
        if first:
            break
    return model_layout, [block[:, :width] for block in blocks], head_layout, head_rows


def read_first_position(rows: CellRows) -> int:
    """Return the position of the first cell."""
    return int(np.ascontiguousarray(rows[0, :4]).view("<i4")[0])
