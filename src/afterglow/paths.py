"""Directories of afterglow: the cache, which can be computed or downloaded again, and the data of the user.

`AFTERGLOW_CACHE` and `AFTERGLOW_DATA` override their roots.
"""

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


def get_data_directory(name: str) -> Path:
    """Return the path of a subdirectory for data that the user wrote, e.g. conversations. It may not exist yet.

    >>> get_data_directory("chat").name
    'chat'
    """
    override = os.environ.get("AFTERGLOW_DATA")
    root = Path(override).expanduser() if override else platformdirs.user_data_path("afterglow", appauthor=False)
    return root / name
