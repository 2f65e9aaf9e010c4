"""Returns the untouched part of new allocations to the operating system, so that a KV cache takes RAM as it is used.

llama.cpp writes zeros to the whole KV cache when it creates a context, which makes every page of it resident. A private
page that contains only zeros can be dropped without a change: its next use gets a new page of zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 64 * 1024  # examined and dropped together
MIN_MAPPING_BYTES = 16 * 1024**2  # of a new range of addresses; smaller ones belong to Python
MADV_DONTNEED = 4
NO_SWITCH_SECONDS = 3600.0
Range = tuple[int, int]


@contextlib.contextmanager
def drop_zero_pages() -> Iterator[None]:
    """Drop the pages of zeros in what is allocated inside the block. No effect outside of Linux.

    Other threads must not write to memory that was allocated in the block; those of Python cannot run meanwhile.
    """
    if sys.platform != "linux":
        yield
        return
    before = read_anonymous_ranges()
    yield
    interval = sys.getswitchinterval()
    sys.setswitchinterval(NO_SWITCH_SECONDS)  # no thread may run between a check and the drop of the same pages
    try:
        for start, end in subtract_ranges(read_anonymous_ranges(), before):
            if end - start >= MIN_MAPPING_BYTES:
                _drop_range(start, end)
    finally:
        sys.setswitchinterval(interval)


def read_anonymous_ranges() -> list[Range]:
    """Return the address ranges of private, writable memory without a file, in ascending order."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and not name:
            start, _, end = addresses.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def subtract_ranges(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` that are in none of `others`. Both are in ascending order.

    >>> list(subtract_ranges([(0, 10), (20, 30)], [(2, 4), (8, 25)]))
    [(0, 2), (4, 8), (25, 30)]
    """
    for start, end in ranges:
        for other_start, other_end in others:
            if other_end <= start or other_start >= end:
                continue
            if start < other_start:
                yield start, other_start
            start = other_end
        if start < end:
            yield start, end


@functools.cache
def _get_c_library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(None)  # keeps the GIL during calls
    library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _drop_range(start: int, end: int) -> None:
    """Drop all chunks of zeros in a range of addresses."""
    library, zeros = _get_c_library(), bytes(CHUNK_BYTES)
    # The first and the last page may have been part of another allocation.
    chunk = -(-(start + mmap.PAGESIZE) // CHUNK_BYTES) * CHUNK_BYTES
    while chunk + CHUNK_BYTES < end:
        if library.memcmp(chunk, zeros, CHUNK_BYTES) == 0:
            library.madvise(chunk, CHUNK_BYTES, MADV_DONTNEED)
        chunk += CHUNK_BYTES
