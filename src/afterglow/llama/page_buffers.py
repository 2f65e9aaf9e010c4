"""Memory for bytes that are kept: whole pages of the system, which has them back as soon as nobody needs them.

Bytes that stay would lie between those of states that are copied and soon gone again, in the heap of one thread. It
would have holes that nothing fits into, and the process more memory than it may keep.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

MIN_MAPPED_BYTES = 16 * 1024  # bytes that are not worth pages of their own
MAX_MAPPINGS = 16_384  # pieces at a time: Linux lets a process have 65,530, and llama.cpp needs some of them itself
MMAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)  # they are filled at once
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def get_allocated_bytes(nbytes: int) -> int:
    """What so many bytes take.

    >>> size(1000), size(8 * mmap.PAGESIZE - 5) == 8 * mmap.PAGESIZE
    (1000, True)
    """
    return nbytes if nbytes < MIN_MAPPED_BYTES else -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def allocate_zeros(*shape: int) -> NDArray[np.uint8]:
    """Bytes to be filled and kept."""
    nbytes = int(np.prod(shape))
    if nbytes >= MIN_MAPPED_BYTES and len(_mappings) < MAX_MAPPINGS:
        with contextlib.suppress(OSError):  # the system has no more: the heap has to do
            piece = mmap.mmap(-1, nbytes, flags=MMAP_FLAGS)
            _mappings.add(piece)
            return np.frombuffer(piece, dtype=np.uint8).reshape(shape)
    return np.zeros(shape, dtype=np.uint8)


def copy_to_pages(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy to be kept."""
    kept = allocate_zeros(*data.shape)
    kept[...] = data
    return kept
