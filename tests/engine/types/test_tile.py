"""Row tiles: whole tiles take less time than rows that are computed one by one."""

from __future__ import annotations

import pytest

from afterglow.engine.types.tile import TILE_ROWS, RowTile

TILE = RowTile(balanced_cells=1000)


def test_the_more_cells_the_fewer_rows_take_as_long_as_a_tile() -> None:
    limits = [TILE.count_min_rows(cells) for cells in (0, 500, 1000, 4000, 16_000)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > TILE_ROWS
    assert limits[-1] < TILE_ROWS / 2


def test_the_time_of_rows_grows_with_the_cells_before_them_a_quarter_as_fast_in_tiles() -> None:
    assert TILE.estimate_time(32, 0) == 32
    assert TILE.estimate_time(32, 1000) == 64
    assert TILE.estimate_time(TILE_ROWS, 1000) == TILE_ROWS * 1.25


@pytest.mark.parametrize(
    ("spans", "time"),
    [
        ([(TILE_ROWS, 1000)], TILE_ROWS * 1.25),
        ([(1, 1000), (1 + TILE_ROWS, 1000)], 2 + 2 + TILE_ROWS * 1.25),  # one row of both, then a tile
        ([(10, 1000)], 20),
        ([(60, 1000)], TILE_ROWS * 1.25),  # padded
    ],
)
def test_a_decode_takes_the_time_of_its_shared_rows_and_of_its_tiles(spans: list[tuple[int, int]], time: float) -> None:
    assert TILE.estimate_decode_time(spans) == time
