"""Helpers of the routes: merged streams, calls to engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from afterglow.server.models import ModelRegistry
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ENGINE_CALL_THREADS, ServerState, merge_streams


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


def test_an_engine_that_does_not_answer_blocks_no_calls_to_other_models() -> None:
    answers = threading.Event()

    async def run(state: ServerState) -> int:
        waiting = [
            asyncio.ensure_future(state.run_engine_call("silent", answers.wait)) for _ in range(2 * ENGINE_CALL_THREADS)
        ]
        try:
            return await asyncio.wait_for(state.run_engine_call("other", lambda: 7), 30)
        finally:
            answers.set()
            await asyncio.gather(*waiting)

    with ServerState(ModelRegistry({}), ServerSettings()) as state:
        assert asyncio.run(run(state)) == 7
