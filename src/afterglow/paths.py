"""Directories of afterglow: the cache, which can be computed or downloaded again, and the data of the user.

`AFTERGLOW_CACHE` and `AFTERGLOW_DATA` override their roots.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from afterglow.errors import InvalidArgument


def get_cache_directory(name: str) -> Path:
    """Return the path of a subdirectory of the afterglow cache. It may not exist yet.

    >>> get_cache_directory("models").name
    'models'
    """
    root = get_variable_path("AFTERGLOW_CACHE") or platformdirs.user_cache_path("afterglow", appauthor=False)
    return root / name


def get_data_directory(name: str) -> Path:
    """Return the path of a subdirectory for data that the user wrote, e.g. conversations. It may not exist yet.

    >>> get_data_directory("chat").name
    'chat'
    """
    root = get_variable_path("AFTERGLOW_DATA") or platformdirs.user_data_path("afterglow", appauthor=False)
    return root / name


def get_variable_path(variable: str) -> Path | None:
    """Return the path in an environment variable, in which `~` and `~user` are home directories; None if it is unset.

    >>> get_variable_path("NO_SUCH_VARIABLE")
    """
    value = os.environ.get(variable)
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError:
        raise InvalidArgument(variable, f"names {value}, but there is no such user") from None
