"""Why a prompt was, or would be, computed as far as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

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


def cause_of(*, shared: int, reused: int, length: int, evicted: int, edge: int | None, window: bool) -> Cause:
    """Why so much of a prompt is reused and not more; `edge` is the last whole chunk in the deterministic mode.

    >>> cause_of(shared=10, reused=10, length=20, evicted=0, edge=None, window=False)
    'all of it'
    """
    usable = min(shared, length - 1)
    if min(evicted, length - 1) > max(usable, reused):
        return "evicted"
    if not shared:
        return "nothing in common"
    if reused >= usable:
        return "all of it"
    if reused == edge:
        return "on the grid"
    return "window passed" if window else "no checkpoint"
