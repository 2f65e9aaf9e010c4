"""Range checks of single numbers, so that no value that aborts the process reaches llama.cpp."""

from __future__ import annotations

import math
import operator
from typing import Any

from afterglow.errors import InvalidArgument

INT32_MAX = 2**31 - 1


def check_integer(name: str, value: Any, low: int = -INT32_MAX - 1, high: int = INT32_MAX) -> int:
    """Return `value` as an int in [low, high]; raise `InvalidArgument` for `name` otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(name, f"must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise InvalidArgument(name, f"must be from {low} to {high}, not {number}")
    return number


def check_float(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return `value` as a finite float in [low, high]; raise `InvalidArgument` for `name` otherwise."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(name, f"must be a number, not {value!r}") from None
    if not math.isfinite(number) or not low <= number <= high:
        raise InvalidArgument(name, f"must be from {low:g} to {high:g}, not {number!r}")
    return number
