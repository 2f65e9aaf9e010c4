"""Content fingerprint of a model file, cheap enough to compute at every load."""

from __future__ import annotations

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
    size = path.stat().st_size
    digest = blake3(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        rest = size - HEAD_BYTES
        for index in range(SAMPLE_COUNT if rest > 0 else 0):
            file.seek(HEAD_BYTES + rest * index // SAMPLE_COUNT)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
