"""Where afterglow keeps what it can make or fetch again. `AFTERGLOW_CACHE` moves all of it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_directory(name: str) -> Path:
    """The folder `name` inside afterglow's cache, created where it is missing."""
    root = os.environ.get("AFTERGLOW_CACHE") or platformdirs.user_cache_path("afterglow")
    folder = Path(root).expanduser() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
