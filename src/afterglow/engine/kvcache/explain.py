"""Why a prompt was, or would be, computed as far as it was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.engine.types.entries import Entries

MAX_EVICTED_PREFIXES = 64  # evicted sequences whose entries are kept, so that it can be told what is missing
MAX_EVICTED_PREFIX_BYTES = 4 * 1024**2  # of all their entries; the last is kept however long it is
MissCause: TypeAlias = Literal[
    "nothing in common", "all of it", "no checkpoint", "window passed", "on the grid", "evicted"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt was, or would be, computed as far as it was."""

    prompt_entries: int
    reused_entries: int  # entries that need not be computed
    shared_entries: int  # entries that the best match in memory has in common with the prompt
    next_prompt_entry: int | None  # the first differing entry of the prompt
    next_cached_entry: int | None  # and of what is in memory
    cause: MissCause  # why not more of what is shared, or was, is reused
    evicted_entries: int = 0  # entries of the prompt that memory held once

    @property
    def computed_entries(self) -> int:
        """Entries that have to be computed."""
        return self.prompt_entries - self.reused_entries

    @property
    def lost_entries(self) -> int:
        """Entries that have to be computed again for that cause."""
        return max(
            0, min(max(self.shared_entries, self.evicted_entries), self.prompt_entries - 1) - self.reused_entries
        )


class EvictionHistory:
    """What sequences held that had to go."""

    def __init__(self) -> None:
        self._evicted: deque[tuple[str, Entries]] = deque(maxlen=MAX_EVICTED_PREFIXES)

    def add(self, entries: Entries, salt: str) -> None:
        """These entries go."""
        if len(entries):
            self._evicted.append((salt, entries.copy()))
            while len(self._evicted) > 1 and sum(gone.nbytes for _, gone in self._evicted) > MAX_EVICTED_PREFIX_BYTES:
                self._evicted.popleft()

    def find_by_salt(self, salt: str) -> list[Entries]:
        """What went of a salt, the last first."""
        return [ids for whose, ids in reversed(self._evicted) if whose == salt]


def find_miss_cause(
    *, shared: int, reused: int, length: int, evicted: int, grid_position: int | None, is_windowed: bool
) -> MissCause:
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
    if reused == grid_position:
        return "on the grid"
    return "window passed" if is_windowed else "no checkpoint"
