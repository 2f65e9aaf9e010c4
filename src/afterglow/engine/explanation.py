"""Why a prompt was, or would be, computed as far as it was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.engine.entries import Ids

REMEMBERED = 64  # evicted sequences whose entries are kept, so that it can be told what is missing
REMEMBERED_BYTES = 4 * 1024**2  # of all their entries; the last is kept however long it is
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


class Evicted:
    """What sequences held that had to go."""

    def __init__(self) -> None:
        self._gone: deque[tuple[str, Ids]] = deque(maxlen=REMEMBERED)

    def remember(self, ids: Ids, salt: str) -> None:
        """These entries go."""
        if len(ids):
            self._gone.append((salt, ids.copy()))
            while len(self._gone) > 1 and sum(gone.nbytes for _, gone in self._gone) > REMEMBERED_BYTES:
                self._gone.popleft()

    def of(self, salt: str) -> list[Ids]:
        """What went of a salt, the last first."""
        return [ids for whose, ids in reversed(self._gone) if whose == salt]


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
