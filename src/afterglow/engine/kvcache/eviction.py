"""Eviction policy of every cache: what stored data is worth, and what to evict first. Pure functions of plain values.

Data is worth the compute time that it is expected to save. The probability that it is used again halves with each
half-life of idle time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

HALF_LIFE_SECONDS = 3600.0
REUSE_PROBABILITY = 0.5  # of data that was just used
MAX_PINNED_FRACTION = 0.5  # of the budget of a tier; the rest stays available for unpinned data
MIN_LOG_VALUE = -100.0  # of data that saves no time


class Evictable(Protocol):
    """Stored data as the policy sees it."""

    key: bytes

    @property
    def pinned(self) -> bool: ...


EvictableT = TypeVar("EvictableT", bound=Evictable)
VictimT = TypeVar("VictimT")


def compute_log_value(seconds_saved: float, nbytes: float) -> float:
    """Return the binary logarithm of the seconds that stored data saves per byte if it is used again."""
    value = seconds_saved / max(nbytes, 1)
    return math.log2(value) if 0 < value < math.inf else MIN_LOG_VALUE


def compute_rank(log_value: float, last_used: float) -> float:
    """Return the position of stored data in the order of eviction; the lowest is evicted first.

    That is the order by expected seconds saved per byte. It does not change with time, because everything loses half of
    its value with each half-life.

    >>> hour = HALF_LIFE_SECONDS
    >>> compute_rank(compute_log_value(2.0, 100), 0.0) == compute_rank(compute_log_value(1.0, 100), hour)
    True
    """
    return log_value + last_used / HALF_LIFE_SECONDS


def estimate_eviction_cost(
    recompute_seconds: float, idle_seconds: float, transfer_seconds: float | None = None
) -> float:
    """Return the expected seconds that evicting costs later: to compute again or, if less, to store and load again."""
    probability = REUSE_PROBABILITY * math.pow(0.5, idle_seconds / HALF_LIFE_SECONDS)
    recompute = probability * recompute_seconds
    return recompute if transfer_seconds is None else min(recompute, transfer_seconds + probability * transfer_seconds)


def find_victim(ordered: Iterable[EvictableT], protected: Collection[bytes] = ()) -> EvictableT | None:
    """Return the first of the data, in the order of eviction, that is neither pinned nor has a protected key."""
    unpinned = (data for data in ordered if not data.pinned)
    return next((data for data in unpinned if data.key not in protected), None)


def choose_victims(ordered: Iterable[tuple[VictimT, int]], excess_bytes: int) -> list[VictimT]:
    """Return as many of the data, in the order of eviction and with their sizes, as free `excess_bytes`.

    >>> choose_victims([("old", 60), ("newer", 60), ("newest", 60)], 100)
    ['old', 'newer']
    """
    victims = []
    for victim, nbytes in ordered:
        if excess_bytes <= 0:
            break
        victims.append(victim)
        excess_bytes -= nbytes
    return victims


def choose_positions_to_drop(positions: Sequence[int], limit: int) -> list[int]:
    """Return which of the ascending checkpoint `positions` on one path to drop so that `limit` remain.

    The newest stays because the conversation continues there. The first stays because it is the system prompt, which
    most conversations share. Of the others, drop the one with the smallest gap to its predecessor relative to its
    distance from the end: old checkpoints become sparse, recent ones stay dense.
    """
    remaining, dropped = list(positions), []
    while len(remaining) > max(limit, 0):
        inner = range(1, len(remaining) - 1)
        if not inner:
            index = 0
        else:
            end = remaining[-1] + 1
            index = min(inner, key=lambda i: (remaining[i] - remaining[i - 1]) / (end - remaining[i]))
        dropped.append(remaining.pop(index))
    return dropped
