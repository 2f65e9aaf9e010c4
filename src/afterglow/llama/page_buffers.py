"""Buffers for long-lived bytes: anonymous mappings that return to the system as soon as they are freed.

In the heap of one thread, long-lived bytes would lie between short-lived copies of states. The heap would fragment,
and the process would use more memory than its budget.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.parallel import count_threads, run_parallel

MIN_MAPPED_BYTES = 16 * 1024  # smaller buffers come from the heap
MAX_MAPPINGS = 16_384  # Linux allows a process 65,530 mappings, and llama.cpp needs some of them itself
MIN_TOUCHED_BYTES = 64 * 1024**2  # of smaller buffers, touching on several threads saves no time
MMAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def get_allocated_bytes(nbytes: int) -> int:
    """Return the memory that a buffer of `nbytes` takes: whole pages if it is mapped.

    >>> get_allocated_bytes(1000), get_allocated_bytes(8 * mmap.PAGESIZE - 5) == 8 * mmap.PAGESIZE
    (1000, True)
    """
    return nbytes if nbytes < MIN_MAPPED_BYTES else -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def allocate_zeros(*shape: int, populate: bool = True) -> NDArray[np.uint8]:
    """Allocate a zeroed long-lived buffer.

    Its pages are populated at once, which takes less time than touching them one by one. That holds the GIL: threads
    that fill buffers at the same time should not `populate` them.
    """
    nbytes = int(np.prod(shape))
    if nbytes >= MIN_MAPPED_BYTES and len(_mappings) < MAX_MAPPINGS:
        with contextlib.suppress(OSError):  # the system has no more mappings: fall back to the heap
            flags = getattr(mmap, "MAP_POPULATE", 0) if populate else 0
            mapping = mmap.mmap(-1, nbytes, flags=MMAP_FLAGS | flags)
            _mappings.add(mapping)
            return np.frombuffer(mapping, dtype=np.uint8).reshape(shape)
    return np.zeros(shape, dtype=np.uint8)


def allocate_touched(nbytes: int) -> NDArray[np.uint8]:
    """Allocate a short-lived buffer whose pages several threads have touched, because native code fills it on one.

    >>> len(allocate_touched(1000))
    1000
    """
    data = np.empty(nbytes, dtype=np.uint8)
    if nbytes >= MIN_TOUCHED_BYTES:
        step = -(-nbytes // (4 * count_threads()))
        run_parallel(_touch_pages, [(data[start : start + step],) for start in range(0, nbytes, step)])
    return data


def _touch_pages(data: NDArray[np.uint8]) -> None:
    data[:: mmap.PAGESIZE] = 0


def copy_to_pages(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Copy `data` to a long-lived buffer."""
    copy = allocate_zeros(*data.shape)
    copy[...] = data
    return copy
