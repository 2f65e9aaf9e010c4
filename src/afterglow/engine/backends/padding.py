"""Row padding: small prefills on a CPU are padded to a row tile of flash attention (see `types/tile.py`).

The cells of padding rows are removed after the decode. Other rows do not see them, because they come later.
"""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.engine.types.backend import DecodeSpan
from afterglow.engine.types.tile import SINGLE_ROW_COST, TILE_ROWS, RowTile
from afterglow.llama.context import LlamaContext

TILED_CACHE_TYPES = ("f16", "f32")  # other types are never computed in tiles


class RowPadding:
    """Decides which decodes are padded. Pure, except for its counter."""

    def __init__(self, tile: RowTile) -> None:
        self.padded_decodes = 0
        self._tile = tile

    def plan(self, spans: Sequence[DecodeSpan]) -> dict[int, int]:
        """Return the padding rows of each sequence of a decode that is padded; none if that would not save time.

        llama.cpp computes as many rows of all spans together as the smallest one has, then the next rows of the others.
        So the rows that prompts have beyond the spans of answers are padded to one tile. A prompt of another length
        would make the tiles incomplete.
        """
        rows = [len(span.entries) for span in spans]
        if max(rows) * SINGLE_ROW_COST < TILE_ROWS:
            return {}
        limits = [self._tile.count_min_rows(span.position) for span in spans]
        small = self._tile.count_shared_rows([(count, span.position) for count, span in zip(rows, spans, strict=True)])
        padding: dict[int, int] = {}
        for span, count, limit in zip(spans, rows, limits, strict=True):
            if limit <= count - small < TILE_ROWS:
                padding[span.sequence] = small + TILE_ROWS - count
            elif count >= limit and count - small != TILE_ROWS:
                return {}
        return padding


def build_row_tile(context: LlamaContext) -> RowTile | None:
    """Return the tile of a context that computes on the CPU; None if its attention is not computed in tiles."""
    settings, info = context.settings, context.model.info
    cache_types = {settings.cache_type_k, settings.cache_type_v}
    if settings.flash_attention is False or not cache_types <= {*TILED_CACHE_TYPES}:
        return None
    if context.memory.kind != "attention":  # only some layers have attention to all cells
        return None
    return RowTile.build(info.parameter_count, info.layer_count, info.embedding_length)


def build_row_padding(context: LlamaContext, tile: RowTile | None) -> RowPadding | None:
    """Return the padding for a context with this tile; None if its cells cannot be removed again."""
    # Cells that sequences share may be needed by others.
    if tile is None or context.settings.kv_unified or context.model.info.uses_mrope:
        return None
    return RowPadding(tile)
