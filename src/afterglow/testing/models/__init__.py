"""Tiny GGUF models of every memory kind: seeded, byte-identical, written on demand and cached by generator source.

This module maps names to writers and files. It loads no model and needs no native library.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from importlib import resources
from pathlib import Path

from afterglow.errors import ModelNotFound
from afterglow.paths import get_cache_directory
from afterglow.testing.models import (
    adapter,
    attention,
    audio_projector,
    colors,
    constructed,
    embedding,
    hybrid,
    mtp_heads,
    notes,
    projector,
    recurrent,
)
from afterglow.testing.models.constructed import CYCLE, get_successor

__all__ = ["CYCLE", "get_path", "get_successor", "list_names"]

_MODEL_WRITERS: dict[str, Callable[[Path], None]] = {
    **attention.MODEL_WRITERS,
    **recurrent.MODEL_WRITERS,
    **hybrid.MODEL_WRITERS,
    **mtp_heads.MODEL_WRITERS,
    **constructed.MODEL_WRITERS,
    **embedding.MODEL_WRITERS,
    **projector.MODEL_WRITERS,
    **colors.MODEL_WRITERS,
    **audio_projector.MODEL_WRITERS,
    **notes.MODEL_WRITERS,
    **adapter.MODEL_WRITERS,
}


def list_names() -> list[str]:
    """Return the names that `get_path` accepts.

    >>> list_names()[:3]
    ['attention', 'draft', 'window']
    """
    return list(_MODEL_WRITERS)


def get_path(name: str, directory: Path | None = None) -> Path:
    """Return the file of a tiny model. If it does not exist yet, write it in a few milliseconds.

    The default directory is `$AFTERGLOW_CACHE/tiny`, or else in the user's cache.

    >>> model = get_path("attention")
    >>> model.read_bytes()[:4]
    b'GGUF'
    >>> get_path("attention") == model
    True
    """
    if name not in _MODEL_WRITERS:
        raise ModelNotFound(name, f"the tiny models are {', '.join(_MODEL_WRITERS)}")
    directory = directory or get_cache_directory("tiny")
    file = directory / f"{name}-{_hash_generator(name)}.gguf"
    if not file.exists():
        _write_atomically(_MODEL_WRITERS[name], file)
    return file


def _hash_generator(name: str) -> str:
    """Return a short hash of the generator's source: an edited generator writes a new file."""
    return blake2b(_read_sources() + name.encode(), digest_size=6).hexdigest()


@cache
def _read_sources() -> bytes:
    modules = [module for module in resources.files(__name__).iterdir() if module.name.endswith(".py")]
    return b"".join(module.read_bytes() for module in sorted(modules, key=lambda module: module.name))


def _write_atomically(write_model: Callable[[Path], None], file: Path) -> None:
    """Write beside the target and rename, so that concurrent readers and writers never see a partial file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=file.parent) as scratch:
        unfinished = Path(scratch) / file.name
        write_model(unfinished)
        os.replace(unfinished, file)
