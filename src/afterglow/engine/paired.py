"""Cells of a model with those of its heads beside them, as one row of bytes each, so that they are stored together.

A row is the model's cell, a byte that says whether the heads know the entry, and the heads' cell.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidState
from afterglow.llama import layout as llama_layout
from afterglow.llama import pages
from afterglow.llama.layout import Cells

LENGTH = struct.Struct("<I")
Rows = NDArray[np.uint8]


class PairedCells:
    """The cells of a saved sequence; the heads have those of its last entries, or none."""

    def __init__(self, own: Cells, heads: Cells | None, layout: bytes) -> None:
        """`layout` is how the heads' cells are written, whether there are any or not; empty: they are left out."""
        self.layout = LENGTH.pack(len(own.layout)) + own.layout + layout
        self.width = own.width + 1 + (llama_layout.Layout.unpack(layout).width if layout else 0)
        self._own = own
        self._heads = heads if layout and heads is not None and _ends_alike(own, heads) else None

    def __len__(self) -> int:
        return len(self._own)

    def rows(self, start: int, stop: int) -> Rows:
        rows = pages.zeros(stop - start, self.width)
        own = self._own.width
        rows[:, :own] = self._own.rows(start, stop)
        if self._heads is not None:
            before = len(self._own) - len(self._heads)  # entries that the heads know nothing of
            first = max(start, before)
            if first < stop:
                rows[first - start :, own] = 1
                rows[first - start :, own + 1 :] = self._heads.rows(first - before, stop - before)
        return rows


def _ends_alike(own: Cells, heads: Cells) -> bool:
    """Whether the heads' cells stand where the last of the model's do."""
    if not 0 < len(heads) <= len(own):
        return False
    return bool(np.array_equal(own.positions[len(own) - len(heads) :], heads.positions))


def divide(layout: bytes, blocks: Sequence[Rows]) -> tuple[bytes, list[Rows], bytes, list[Rows]]:
    """The model's layout and cells, and those of its heads: of the last entries that they know without a gap."""
    if len(layout) < LENGTH.size:
        raise InvalidState("its layout is cut off")
    end = LENGTH.size + LENGTH.unpack_from(layout)[0]
    own, beside = layout[LENGTH.size : end], layout[end:]
    width = llama_layout.Layout.unpack(own).width
    if any(block.ndim != 2 or block.shape[1] <= width for block in blocks):
        raise InvalidState("its cells are of another size")
    heads: list[Rows] = []
    for block in reversed(blocks):
        unknown = np.flatnonzero(block[:, width] == 0)
        first = int(unknown[-1]) + 1 if len(unknown) else 0
        if first < len(block):
            heads.insert(0, block[first:, width + 1 :])
        if first:
            break
    return own, [block[:, :width] for block in blocks], beside, heads


def first_position(rows: Rows) -> int:
    """Where the first of these cells stands."""
    return int(np.ascontiguousarray(rows[0, :4]).view("<i4")[0])
