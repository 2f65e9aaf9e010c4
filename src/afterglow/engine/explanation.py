"""Why a prompt was, or would be, computed as far as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.engine.entries import Ids, last_edge

Cause: TypeAlias = Literal["nothing in common", "all of it", "no checkpoint", "window passed", "on the grid", "evicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt was, or would be, computed as far as it was."""

    prompt: int
    reused: int  # entries that need not be computed
    shared: int  # entries that the best match in memory has in common with the prompt
    ours: int | None  # the first differing entry of the prompt
    theirs: int | None  # and of what is in memory
    cause: Cause  # why not more of what is shared, or was, is reused
    evicted: int = 0  # entries of the prompt that memory held once

    @property
    def computed(self) -> int:
        """Entries that have to be computed."""
        return self.prompt - self.reused

    @property
    def lost(self) -> int:
        """Entries that have to be computed again for that cause."""
        return max(0, min(max(self.shared, self.evicted), self.prompt - 1) - self.reused)


def cause_of(ids: Ids, *, shared: int, reused: int, evicted: int, grid: int, window: bool) -> Cause:
    """Why so much of a prompt is reused and not more; `grid` is that of the deterministic mode, or 0.

    >>> cause_of(np.arange(20), shared=10, reused=10, evicted=0, grid=0, window=False)
    'all of it'
    """
    last = len(ids) - 1
    usable = min(shared, last)
    if min(evicted, last) > max(usable, reused):
        return "evicted"
    if not shared:
        return "nothing in common"
    if reused >= usable:
        return "all of it"
    if grid and reused == last_edge(usable, ids, grid):
        return "on the grid"
    return "window passed" if window else "no checkpoint"
