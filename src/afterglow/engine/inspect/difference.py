"""Where a prompt parts from what is kept: the entries on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.engine.types.request import Request

MAX_SHOWN_ENTRIES = 4096  # entries of what is kept that are looked at behind the difference


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMiss:
    """Why a prompt would be computed as far as it would, and what is kept where the two part."""

    explanation: Explanation
    common_length: int  # entries that the prompt has in common with what is nearest to it
    cached_entries: tuple[int, ...]  # what is kept after those; empty: nothing, so the prompt only goes on


def explain_miss(engine: Engine, request: Request) -> PrefixMiss:
    """Compare a prompt with everything of its salt that is kept, or was until it had to go."""
    ids = engine.interner.intern(request.entries)
    best, at = np.zeros(0, dtype=np.int64), 0
    for kept in _iter_cached(engine.prefix_cache, ids, request.salt):
        shared = common_prefix_length(kept, ids)
        if shared > at or not len(best):
            best, at = kept, shared
    theirs = engine.interner.to_portable_entries(best[at : at + MAX_SHOWN_ENTRIES])
    return PrefixMiss(explanation=engine.explain(request), common_length=at, cached_entries=tuple(map(int, theirs)))


def _iter_cached(prefix_cache: PrefixCache, entries: Entries, salt: str) -> Iterator[Entries]:
    """What could be nearest, what was used last first."""
    for slot in sorted(prefix_cache.slots, key=lambda slot: -slot.last_used):
        if slot.salt == salt and len(slot):
            yield slot.entries
    yield _find_stored(prefix_cache, entries, salt)
    for checkpoint in prefix_cache.all_checkpoints:
        if checkpoint.salt == salt:
            yield checkpoint.entries
    yield from prefix_cache.eviction_history.find_by_salt(salt)


def _find_stored(prefix_cache: PrefixCache, entries: Entries, salt: str) -> Entries:
    """The stored conversation that is nearest: as far as it is covered, and then what was used last."""
    tree, cover = prefix_cache.store.tree, prefix_cache.store.find_stored_prefix(entries, salt)
    name = cover.blocks[-1].key if cover.blocks else tree.hasher.get_root_key(salt)
    found = [entries[: cover.length]]
    if cover.next_entry is not None:
        found.append(cover.blocks[-1].entries[cover.length - cover.blocks[-1].start :])
    while (following := tree.get_children(name)) and sum(map(len, found)) < cover.length + MAX_SHOWN_ENTRIES:
        last = max(following, key=lambda segment: segment.last_used)
        found.append(last.entries)
        name = last.key
    return np.concatenate(found)
