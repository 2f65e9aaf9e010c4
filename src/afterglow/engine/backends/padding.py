"""Row padding: small prefills on a CPU are padded to the rows that llama.cpp's flash attention computes together.

Its kernel computes 64 rows of a sequence as one tile. Fewer rows are computed one by one, each of which reads all cells
again: after 3,072 tokens of SmolLM2, 63 rows took 1.1 s and 64 rows 0.6 s (benchmarks/LOG.md). The cells of padding
rows are removed after the decode. Other rows do not see them, because they come later.
"""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.engine.types.backend import DecodeSpan
from afterglow.llama.context import LlamaContext

TILE_ROWS = 64
TILED_CACHE_TYPES = ("f16", "f32")  # other types are never computed in tiles
MARGIN_ROWS = 4  # that must be saved at least
# Time of a cell for a row that is computed alone, relative to a row of a tile.
SINGLE_ROW_COST = 4.0
# Attention of one row to as many cells as there are weights per cell takes three times as long as the weights. Measured
# with SmolLM2: 3.3 to 4.3.
CELL_COST = 3.0


class RowPadding:
    """Decides which decodes are padded. Pure, except for its counter.

    >>> padding = RowPadding(balanced_cells=2000)
    >>> padding.count_min_rows(0), padding.count_min_rows(3000), padding.count_min_rows(30_000)
    (68, 39, 23)
    """

    def __init__(self, balanced_cells: float) -> None:
        """With `balanced_cells` in the KV cache, attention of a single row takes as long as the rest of the model."""
        self.padded_decodes = 0
        self._balanced_cells = balanced_cells

    def count_min_rows(self, cells: int) -> int:
        """Return the rows of a sequence from which on a tile takes less time."""
        load = cells / self._balanced_cells
        return round(TILE_ROWS * (1 + load / SINGLE_ROW_COST) / (1 + load)) + MARGIN_ROWS

    def plan(self, spans: Sequence[DecodeSpan]) -> dict[int, int]:
        """Return the padding rows of each sequence of a decode that is padded; none if that would not save time.

        llama.cpp computes as many rows of all spans together as the smallest one has, then the next rows of the others.
        So the rows that prompts have beyond the spans of answers are padded to one tile. A prompt of another length
        would make the tiles incomplete.
        """
        rows = [len(span.entries) for span in spans]
        if max(rows) * SINGLE_ROW_COST < TILE_ROWS:
            return {}
        limits = [self.count_min_rows(span.position) for span in spans]
        small = max([count for count, limit in zip(rows, limits, strict=True) if count < limit], default=0)
        padding: dict[int, int] = {}
        for span, count, limit in zip(spans, rows, limits, strict=True):
            if limit <= count - small < TILE_ROWS:
                padding[span.sequence] = small + TILE_ROWS - count
            elif count >= limit and count - small != TILE_ROWS:
                return {}
        return padding


def build_row_padding(context: LlamaContext) -> RowPadding | None:
    """Return the padding for a context that computes on the CPU; None if its attention is not computed in tiles."""
    settings, info = context.settings, context.model.info
    is_tiled = settings.flash_attention is not False and {settings.cache_type_k, settings.cache_type_v} <= {
        *TILED_CACHE_TYPES
    }
    # The last cells can be removed only from attention, and cells that sequences share may be needed by others.
    if not is_tiled or context.memory.kind != "attention" or settings.kv_unified or info.uses_mrope:
        return None
    weights_per_cell = info.parameter_count / (2 * info.layer_count * info.embedding_length)
    return RowPadding(weights_per_cell / CELL_COST)
