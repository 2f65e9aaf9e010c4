"""Explanation of prefix hits and misses: how much of a prompt is reused, and why not more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.engine.types.entries import Entries

MAX_EVICTED_PREFIXES = 64  # evicted sequences whose entries are recorded, so that a miss can be explained
MAX_EVICTED_PREFIX_BYTES = 4 * 1024**2  # of all recorded entries; the latest is recorded regardless of its length
MissCause: TypeAlias = Literal[
    "nothing in common", "fully reused", "no checkpoint", "window moved", "deterministic grid", "evicted"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How much of a prompt was, or would be, reused, and why not more."""

    prompt_entries: int
    reused_entries: int  # entries that are not computed
    shared_entries: int  # common prefix of the prompt and its best match in the cache
    next_prompt_entry: int | None  # first entry of the prompt after the common prefix
    next_cached_entry: int | None  # first entry of the match after the common prefix
    cause: MissCause  # why not more of what is, or was, cached is reused
    evicted_entries: int = 0  # entries of the prompt that were cached once

    @property
    def computed_entries(self) -> int:
        """Entries that have to be computed."""
        return self.prompt_entries - self.reused_entries

    @property
    def lost_entries(self) -> int:
        """Entries that have to be computed again because of `cause`."""
        cached = min(max(self.shared_entries, self.evicted_entries), self.prompt_entries - 1)
        return max(0, cached - self.reused_entries)


class EvictionHistory:
    """Entries of recently evicted sequences."""

    def __init__(self) -> None:
        self._evicted: deque[tuple[str, Entries]] = deque(maxlen=MAX_EVICTED_PREFIXES)

    def add(self, entries: Entries, namespace: str) -> None:
        """Record the entries of an evicted sequence."""
        if len(entries):
            self._evicted.append((namespace, entries.copy()))
            nbytes = sum(recorded.nbytes for _, recorded in self._evicted)
            while len(self._evicted) > 1 and nbytes > MAX_EVICTED_PREFIX_BYTES:
                nbytes -= self._evicted.popleft()[1].nbytes

    def find_by_namespace(self, namespace: str) -> list[Entries]:
        """Return the entries of evicted sequences with this namespace, the latest first."""
        return [entries for evicted_namespace, entries in reversed(self._evicted) if evicted_namespace == namespace]


def find_miss_cause(
    *, shared: int, reused: int, length: int, evicted: int, grid_position: int, is_windowed: bool
) -> MissCause:
    """Return why not more of a prompt is reused. `grid_position`: end of the last full chunk that is shared.

    >>> find_miss_cause(shared=10, reused=10, length=20, evicted=0, grid_position=10, is_windowed=False)
    'fully reused'
    """
    usable = min(shared, length - 1)
    if min(evicted, length - 1) > max(usable, reused):
        return "evicted"
    if not shared:
        return "nothing in common"
    if reused >= usable:
        return "fully reused"
    if reused == grid_position:
        return "deterministic grid"
    return "window moved" if is_windowed else "no checkpoint"
