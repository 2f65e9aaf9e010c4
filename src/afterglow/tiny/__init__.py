"""Tiny GGUF models of every memory kind, written on demand: seeded, byte-identical, cached by content.

It knows names, recipes and files. What a model is, its module says; it loads nothing and needs no native library.
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
from afterglow.paths import cache_directory
from afterglow.tiny import (
    adapter,
    attention,
    chained,
    colours,
    constructed,
    embedding,
    hearing,
    hybrid,
    notes,
    projector,
    recurrent,
)
from afterglow.tiny.constructed import CYCLE, successor_of

__all__ = ["CYCLE", "names", "path", "successor_of"]

_RECIPES: dict[str, Callable[[Path], None]] = {
    **attention.RECIPES,
    **recurrent.RECIPES,
    **hybrid.RECIPES,
    **chained.RECIPES,
    **constructed.RECIPES,
    **embedding.RECIPES,
    **projector.RECIPES,
    **colours.RECIPES,
    **hearing.RECIPES,
    **notes.RECIPES,
    **adapter.RECIPES,
}


def names() -> list[str]:
    """The names that `path` knows.

    >>> names()[:3]
    ['attention', 'draft', 'window']
    """
    return list(_RECIPES)


def path(name: str, directory: Path | None = None) -> Path:
    """The file of a tiny model; it is written, in a few milliseconds, if it is not there yet.

    Without a directory it is in `$AFTERGLOW_CACHE/tiny`, or else in the user's cache.

    >>> model = path("attention")
    >>> model.read_bytes()[:4]
    b'GGUF'
    >>> path("attention") == model
    True
    """
    if name not in _RECIPES:
        raise ModelNotFound(name, f"the tiny models are {', '.join(_RECIPES)}")
    directory = directory or cache_directory("tiny")
    file = directory / f"{name}-{_fingerprint(name)}.gguf"
    if not file.exists():
        _write(_RECIPES[name], file)
    return file


def _fingerprint(name: str) -> str:
    """A short hash of the recipe: an edited generator writes a new file beside the old."""
    return blake2b(_sources() + name.encode(), digest_size=6).hexdigest()


@cache
def _sources() -> bytes:
    modules = [module for module in resources.files(__name__).iterdir() if module.name.endswith(".py")]
    return b"".join(module.read_bytes() for module in sorted(modules, key=lambda module: module.name))


def _write(recipe: Callable[[Path], None], file: Path) -> None:
    """Write beside the target and move into place: no reader ever sees half a file, whoever else is writing it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=file.parent) as scratch:
        unfinished = Path(scratch) / file.name
        recipe(unfinished)
        os.replace(unfinished, file)
