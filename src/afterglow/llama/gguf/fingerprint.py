"""Content fingerprint of a model file, cheap enough to compute at every load."""

from __future__ import annotations

import functools
import mmap
from pathlib import Path

from blake3 import blake3

HEAD_BYTES = 32 * 1024 * 1024  # hashed completely: metadata and vocabulary are at the front of the file
SAMPLE_COUNT = 64
SAMPLE_BYTES = 64 * 1024


def compute_fingerprint(path: Path) -> str:
    """Hash the file's size, its first 32 MiB, and samples spread over the rest.

    >>> len(compute_fingerprint(Path("model.gguf")))
    64
    """
    status = path.stat()
    return _compute_fingerprint(path, status.st_size, status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=64)
def _compute_fingerprint(path: Path, size: int, modified: int, inode: int) -> str:
    """Compute a fingerprint once for each state of a file: a load needs it several times."""
    digest = blake3(str(size).encode())
    if size == 0:  # cannot be mapped
        return digest.hexdigest()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as content,
    ):
        digest.update(content[:HEAD_BYTES])
        rest = size - HEAD_BYTES
        for index in range(SAMPLE_COUNT if rest > 0 else 0):
            start = HEAD_BYTES + rest * index // SAMPLE_COUNT
            digest.update(content[start : start + SAMPLE_BYTES])
    return digest.hexdigest()
