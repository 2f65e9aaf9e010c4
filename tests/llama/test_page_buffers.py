"""Bytes that are kept: they take what is counted for them, and go back to the system when they are let go."""

from __future__ import annotations

import mmap

import numpy as np
import psutil
import pytest

from afterglow.llama import page_buffers

BLOCK = 34_304  # bytes that a segment of a small model takes


def taken() -> int:
    return int(psutil.Process().memory_info().rss)


def test_every_second_block_that_is_let_go_goes_back_to_the_system():
    """In a heap those that stay would hold the others."""
    blocks = [page_buffers.allocate_zeros(64, BLOCK // 64) for _ in range(2000)]
    full = taken()
    del blocks[::2]
    assert full - taken() >= 0.95 * 1000 * page_buffers.get_allocated_bytes(BLOCK)


def test_blocks_take_what_is_counted_for_them():
    before = taken()
    blocks = [page_buffers.allocate_zeros(BLOCK) for _ in range(1000)]
    assert taken() - before == pytest.approx(
        sum(page_buffers.get_allocated_bytes(block.nbytes) for block in blocks), rel=0.05
    )


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, page_buffers.MIN_MAPPED_BYTES - 1, page_buffers.MIN_MAPPED_BYTES, page_buffers.MIN_MAPPED_BYTES + 1, 10**6],
)
def test_bytes_are_zero_and_can_be_written(nbytes):
    block = page_buffers.allocate_zeros(nbytes)
    assert not block.any()
    block[:] = 7
    assert block.nbytes == nbytes <= page_buffers.get_allocated_bytes(nbytes) < nbytes + mmap.PAGESIZE


def test_a_copy_is_equal_and_apart():
    rows = np.arange(200 * 300, dtype=np.uint8).reshape(200, 300)
    copy = page_buffers.copy_to_pages(rows[:, 50:250])
    assert np.array_equal(copy, rows[:, 50:250])
    rows[:] = 0
    assert copy.any()


def test_where_the_system_has_no_more_pages_the_heap_has_to_do(monkeypatch):
    def refused(*arguments: object, **options: object) -> None:
        raise OSError("too many")

    monkeypatch.setattr(mmap, "mmap", refused)
    assert page_buffers.allocate_zeros(100, 1000).shape == (100, 1000)


def test_the_system_s_pieces_are_not_used_up(monkeypatch):
    monkeypatch.setattr(page_buffers, "MAX_MAPPINGS", len(page_buffers._mappings) + 2)
    blocks = [page_buffers.allocate_zeros(BLOCK) for _ in range(4)]
    assert len(page_buffers._mappings) == page_buffers.MAX_MAPPINGS
    del blocks
    assert len(page_buffers._mappings) == page_buffers.MAX_MAPPINGS - 2
