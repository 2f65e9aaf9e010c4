"""Row tile: the rows of a sequence that llama.cpp's flash attention computes together on a CPU.

Fewer rows are computed one by one, each of which reads all cells again: after 3,072 tokens of SmolLM2, 63 rows took
1.1 s and 64 rows 0.6 s (benchmarks/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILE_ROWS = 64
MARGIN_ROWS = 4  # that must be saved at least
# Time of a cell for a row that is computed alone, relative to a row of a tile.
SINGLE_ROW_COST = 4.0
# Attention of one row to as many cells as there are weights per cell takes three times as long as the weights. Measured
# with SmolLM2: 3.3 to 4.3.
CELL_COST = 3.0


@dataclass(frozen=True, slots=True)
class RowTile:
    """Estimates the time of rows. With `balanced_cells`, attention of a single row takes as long as the weights.

    >>> tile = RowTile(balanced_cells=2000)
    >>> tile.count_min_rows(0), tile.count_min_rows(3000), tile.count_min_rows(30_000)
    (68, 39, 23)
    """

    balanced_cells: float

    @classmethod
    def build(cls, parameter_count: int, layer_count: int, embedding_length: int) -> RowTile:
        """Return the tile of a model whose layers all have attention to all cells."""
        return cls(parameter_count / (2 * layer_count * embedding_length) / CELL_COST)

    def estimate_time(self, rows: int, cells: int) -> float:
        """Return the time of a sequence's next rows after `cells`, in units of a row without attention."""
        tiles = -(-rows // TILE_ROWS)
        attention_rows = rows if rows < TILE_ROWS else tiles * TILE_ROWS / SINGLE_ROW_COST
        return rows + attention_rows * cells / self.balanced_cells

    def estimate_decode_time(self, spans: Sequence[tuple[int, int]]) -> float:
        """Return the time of a decode of the `(rows, cells)` of several sequences, in the same units."""
        shared, time = self.count_shared_rows(spans), 0.0
        for rows, cells in spans:
            time += self.estimate_time(min(rows, shared), cells)
            if rows > shared:
                time += self.estimate_time(max(rows - shared, TILE_ROWS), cells)
        return time

    def count_min_rows(self, cells: int) -> int:
        """Return the rows from which on a whole tile takes less time."""
        load = cells / self.balanced_cells
        return round(self.estimate_time(TILE_ROWS, cells) / (1 + load)) + MARGIN_ROWS

    def count_shared_rows(self, spans: Sequence[tuple[int, int]]) -> int:
        """Return the rows that a decode of the `(rows, cells)` of several sequences computes before its tiles.

        llama.cpp computes as many rows of all sequences together as the one with the fewest has, then of the others.

        >>> RowTile(balanced_cells=1000).count_shared_rows([(1, 500), (3, 20), (60, 2000), (200, 0)])
        3
        """
        return max([rows for rows, cells in spans if rows < min(TILE_ROWS, self.count_min_rows(cells))], default=0)
