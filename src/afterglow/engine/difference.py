"""Where a prompt parts from what is kept: the entries on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.entries import Ids, common_prefix
from afterglow.engine.explanation import Explanation
from afterglow.engine.memory import PrefixMemory
from afterglow.engine.request import Request

AFTER = 4096  # entries of what is kept that are looked at behind the difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Why a prompt would be computed as far as it would, and what is kept where the two part."""

    explanation: Explanation
    at: int  # entries that the prompt has in common with what is nearest to it
    theirs: tuple[int, ...]  # what is kept after those; empty: nothing, so the prompt only goes on


def difference(engine: Engine, request: Request) -> Difference:
    """Compare a prompt with everything of its salt that is kept, or was until it had to go."""
    ids = engine.ledger.ids(request.entries)
    best, at = np.zeros(0, dtype=np.int64), 0
    for kept in _kept(engine.memory, ids, request.salt):
        shared = common_prefix(kept, ids)
        if shared > at or not len(best):
            best, at = kept, shared
    theirs = engine.ledger.stable(best[at : at + AFTER])
    return Difference(explanation=engine.explain(request), at=at, theirs=tuple(map(int, theirs)))


def _kept(memory: PrefixMemory, ids: Ids, salt: str) -> Iterator[Ids]:
    """What could be nearest, what was used last first."""
    for slot in sorted(memory.slots, key=lambda slot: -slot.last_used):
        if slot.salt == salt and len(slot):
            yield slot.ids
    yield _stored(memory, ids, salt)
    for checkpoint in memory.checkpoints:
        if checkpoint.salt == salt:
            yield checkpoint.ids
    yield from memory.evicted.of(salt)


def _stored(memory: PrefixMemory, ids: Ids, salt: str) -> Ids:
    """The stored conversation that is nearest: as far as it is covered, and then what was used last."""
    tree, cover = memory.tiers.tree, memory.tiers.cover(ids, salt)
    name = cover.segments[-1].key if cover.segments else tree.chain.seed(salt)
    found = [ids[: cover.length]]
    if cover.next is not None:
        found.append(cover.segments[-1].ids[cover.length - cover.segments[-1].start :])
    while (following := tree.children(name)) and sum(map(len, found)) < cover.length + AFTER:
        last = max(following, key=lambda segment: segment.last_used)
        found.append(last.ids)
        name = last.key
    return np.concatenate(found)
