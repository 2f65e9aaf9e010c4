"""Helpers of the routes: merged streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from afterglow.server.state import merge_streams


async def count_to(limit: int, error: Exception | None = None) -> AsyncIterator[int]:
    for number in range(limit):
        yield number
    if error is not None:
        raise error


def test_merged_streams_end_with_the_first_error_of_any_kind() -> None:
    async def read() -> list[tuple[int, int]]:
        return [item async for item in merge_streams([count_to(3), count_to(2, ValueError("a bug"))])]

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(asyncio.wait_for(read(), 30))


def test_merged_streams_give_the_items_of_all() -> None:
    async def read() -> list[tuple[int, int]]:
        return [item async for item in merge_streams([count_to(3), count_to(2)])]

    assert sorted(asyncio.run(read())) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
