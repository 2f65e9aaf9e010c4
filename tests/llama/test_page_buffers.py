"""Long-lived buffers take the accounted memory and return it to the system when freed."""

from __future__ import annotations

import mmap

import numpy as np
import psutil
import pytest

from afterglow.llama import page_buffers

BLOCK_BYTES = 34_304  # a buffer of a small model


def get_rss() -> int:
    return int(psutil.Process().memory_info().rss)


def test_freed_buffers_return_to_the_system():
    """In a heap, the remaining buffers would prevent it."""
    buffers = [page_buffers.allocate_zeros(64, BLOCK_BYTES // 64) for _ in range(2000)]
    full = get_rss()
    del buffers[::2]
    assert full - get_rss() >= 0.95 * 1000 * page_buffers.get_allocated_bytes(BLOCK_BYTES)


def test_buffers_take_the_accounted_memory():
    before = get_rss()
    buffers = [page_buffers.allocate_zeros(BLOCK_BYTES) for _ in range(1000)]
    assert get_rss() - before == pytest.approx(
        sum(page_buffers.get_allocated_bytes(buffer.nbytes) for buffer in buffers), rel=0.05
    )


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, page_buffers.MIN_MAPPED_BYTES - 1, page_buffers.MIN_MAPPED_BYTES, page_buffers.MIN_MAPPED_BYTES + 1, 10**6],
)
def test_buffers_are_zeroed_and_writable(nbytes):
    buffer = page_buffers.allocate_zeros(nbytes)
    assert not buffer.any()
    buffer[:] = 7
    assert buffer.nbytes == nbytes <= page_buffers.get_allocated_bytes(nbytes) < nbytes + mmap.PAGESIZE


def test_a_copy_is_equal_and_independent():
    rows = np.arange(200 * 300, dtype=np.uint8).reshape(200, 300)
    copy = page_buffers.copy_to_pages(rows[:, 50:250])
    assert np.array_equal(copy, rows[:, 50:250])
    rows[:] = 0
    assert copy.any()


def test_without_free_mappings_the_heap_is_used(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("too many")

    monkeypatch.setattr(mmap, "mmap", fail)
    assert page_buffers.allocate_zeros(100, 1000).shape == (100, 1000)


def test_the_number_of_mappings_is_limited(monkeypatch):
    monkeypatch.setattr(page_buffers, "MAX_MAPPINGS", len(page_buffers._mappings) + 2)
    buffers = [page_buffers.allocate_zeros(BLOCK_BYTES) for _ in range(4)]
    assert len(page_buffers._mappings) == page_buffers.MAX_MAPPINGS
    del buffers
    assert len(page_buffers._mappings) == page_buffers.MAX_MAPPINGS - 2
