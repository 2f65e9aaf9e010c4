"""Explains prefix misses: where a prompt diverges from the cached prefixes, with the entries of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.engine.types.request import Request

MAX_SHOWN_ENTRIES = 4096  # cached entries returned after the divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMiss:
    """Why a prompt misses the prefix cache, and what is cached at the point of divergence."""

    explanation: Explanation
    common_length: int  # entries that the prompt shares with the nearest cached prefix
    cached_entries: tuple[int, ...]  # cached entries after those; empty if the prompt only continues the prefix
    cached_length: int = 0  # entries of the nearest cached prefix


def explain_miss(engine: Engine, request: Request) -> PrefixMiss:
    """Compare a prompt with everything cached or recently evicted under its salt."""
    entries = engine.interner.intern(request.entries)
    nearest, common_length = np.zeros(0, dtype=np.int64), 0
    for cached in _iter_cached(engine.prefix_cache, entries, engine.prefix_cache.build_namespace(request.salt)):
        shared = common_prefix_length(cached, entries)
        if shared > common_length or not len(nearest):
            nearest, common_length = cached, shared
    following = engine.interner.to_portable_entries(nearest[common_length : common_length + MAX_SHOWN_ENTRIES])
    return PrefixMiss(
        explanation=engine.explain(request),
        common_length=common_length,
        cached_entries=tuple(map(int, following)),
        cached_length=len(nearest),
    )


def _iter_cached(prefix_cache: PrefixCache, entries: Entries, namespace: str) -> Iterator[Entries]:
    """Yield the candidates for the nearest cached prefix: sequences (most recently used first), stored, evicted."""
    for slot in sorted(prefix_cache.slots, key=lambda slot: -slot.last_used):
        if slot.namespace == namespace and len(slot):
            yield slot.entries
    yield _find_stored(prefix_cache, entries, namespace)
    for checkpoint in prefix_cache.all_checkpoints:
        if checkpoint.salt == namespace:
            yield checkpoint.entries
    yield from prefix_cache.eviction_history.find_by_salt(namespace)


def _find_stored(prefix_cache: PrefixCache, entries: Entries, namespace: str) -> Entries:
    """Return the stored conversation nearest to a prompt: its stored prefix, then the most recently used blocks."""
    tree, prefix = prefix_cache.store.tree, prefix_cache.store.find_stored_prefix(entries, namespace)
    key = prefix.blocks[-1].key if prefix.blocks else tree.hasher.get_root_key(namespace)
    parts = [entries[: prefix.length]]
    if prefix.next_entry is not None:
        parts.append(prefix.blocks[-1].entries[prefix.length - prefix.blocks[-1].start :])
    while (children := tree.get_children(key)) and sum(map(len, parts)) < prefix.length + MAX_SHOWN_ENTRIES:
        latest = max(children, key=lambda block: block.last_used)
        parts.append(latest.entries)
        key = latest.key
    return np.concatenate(parts)
