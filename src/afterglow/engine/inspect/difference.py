"""Explains prefix misses: where a prompt diverges from the cached prefixes, with the entries of both sides."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.types.entries import strip_labels
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
    entries, namespace, _ = engine.resolve_prompt(request.entries, request.salt, request.adapters)
    nearest, common_length = engine.prefix_cache.find_nearest(entries, namespace)
    following = engine.interner.to_portable_entries(nearest[common_length : common_length + MAX_SHOWN_ENTRIES])
    return PrefixMiss(
        explanation=engine.explain(request),
        common_length=common_length,
        cached_entries=tuple(map(int, strip_labels(following))),
        cached_length=len(nearest),
    )
