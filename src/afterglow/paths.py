"""Directories for data that can be computed or downloaded again. `AFTERGLOW_CACHE` overrides their root."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def get_cache_directory(name: str) -> Path:
    """Return the path of a subdirectory of the afterglow cache. It may not exist yet.

    >>> get_cache_directory("models").name
    'models'
    """
    override = os.environ.get("AFTERGLOW_CACHE")
    root = Path(override).expanduser() if override else platformdirs.user_cache_path("afterglow", appauthor=False)
    return root / name
