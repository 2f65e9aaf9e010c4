"""The identity of a model file by its content, cheap enough to ask at every load."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

WHOLE = 32 * 1024 * 1024  # up to here every byte counts: metadata and vocabulary lie at the front
SAMPLES = 64
SAMPLE = 64 * 1024


def fingerprint(path: Path) -> str:
    """A digest of the file's size, its first 32 MiB, and samples spread over the rest.

    >>> fingerprint(Path("model.gguf"))
    '5d1c3f0a…'
    """
    size = path.stat().st_size
    digest = blake3(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(WHOLE))
        rest = size - WHOLE
        for index in range(SAMPLES if rest > 0 else 0):
            file.seek(WHOLE + rest * index // SAMPLES)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
