"""Search for the longest stored prefix without an index. Pure."""

from __future__ import annotations

from collections.abc import Callable


def find_longest_prefix(has: Callable[[int], bool], count: int, known: int = 0) -> int:
    """Return how many of `count` items are stored, if none is stored without those before it.

    `has` tells whether the item with an index is stored; the first `known` items are not asked for. The distance
    doubles until an item is missing, then the gap is bisected: about 2 log2(n) questions for n further items.

    >>> find_longest_prefix(lambda index: index < 37, 1000)
    37
    >>> find_longest_prefix(lambda index: True, 10, known=4), find_longest_prefix(lambda index: False, 10)
    (10, 0)
    """
    low, distance = known, 1
    while low < count:
        probe = min(low + distance, count)
        if not has(probe - 1):
            return _bisect(has, low, probe - 1)
        low, distance = probe, 2 * distance
    return low


def _bisect(has: Callable[[int], bool], low: int, high: int) -> int:
    """Return the number of stored items, which is from `low` to `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if has(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
