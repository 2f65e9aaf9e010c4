"""Where afterglow keeps what it can make or fetch again. `AFTERGLOW_CACHE` moves all of it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def get_cache_directory(name: str) -> Path:
    """Where the folder `name` of afterglow's cache is, or will be.

    >>> cache_directory("models").name
    'models'
    """
    chosen = os.environ.get("AFTERGLOW_CACHE")
    root = Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("afterglow", appauthor=False)
    return root / name
