"""What is kept where, for people: plain values, and functions that `EngineThread.call` and `EngineProcess.call` take.

Those of an engine run between two of its steps and take no time. Those of a directory read and write files; they need
no engine, run wherever they are called, and other processes may use the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from afterglow.engine import disk_files
from afterglow.engine.counters import TierCounters
from afterglow.engine.disk_index import Row, open_index
from afterglow.engine.engine import Engine
from afterglow.engine.entries import Entry, Ids
from afterglow.engine.segments import Segment, SegmentTree
from afterglow.errors import InvalidState

Tier: TypeAlias = Literal["memory", "ram", "disk"]
FIRST = 32  # entries that show what something is


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One conversation or checkpoint that is kept. Bytes that several share are counted with the first of them."""

    tier: Tier
    what: Literal["conversation", "checkpoint"]
    entries: int
    nbytes: int
    age: float  # seconds since it was used
    hits: int
    seconds: float  # it would take to compute it again
    pinned: bool
    first: tuple[int, ...]  # entries that it begins with; negative ones are pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one tier holds, may hold, and did."""

    nbytes: int
    limit: int
    counters: TierCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an engine keeps things on disk."""

    directory: Path
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a directory holds of one model."""

    model: str  # a digest of everything that decides what its bytes mean
    name: str  # what people call it, where somebody said so
    files: int
    entries: int
    nbytes: int
    hits: int
    seconds: float
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a look at every byte found. What was broken is gone."""

    checked: int
    broken: int


# --- of an engine


def kept(engine: Engine) -> list[Kept]:
    """Everything that is kept, the last used first.

    >>> [(one.tier, one.entries) for one in cache.kept(engine)]
    [('memory', 1204), ('ram', 800)]
    """
    memory, now = engine.memory, time.monotonic()
    memory.tiers.refresh()
    found = [
        Kept(
            tier="memory", what="conversation", entries=len(slot), nbytes=slot.nbytes, age=now - slot.last_used, hits=0,
            seconds=len(slot) * memory.costs.per_entry, pinned=memory.tiers.is_pinned(slot.ids, slot.salt, 0),
            first=_first(engine.ledger.stable(slot.ids)),
        )
        for slot in memory.slots if len(slot)
    ]  # fmt: skip
    found += _conversations(memory.tiers.tree, now, memory.costs.per_entry)
    for checkpoint in memory.checkpoints:
        found.append(
            Kept(
                tier="ram", what="checkpoint", entries=checkpoint.depth, nbytes=checkpoint.nbytes, hits=0,
                age=now - checkpoint.last_used, seconds=memory.marks.seconds(checkpoint), pinned=checkpoint.pinned,
                first=_first(engine.ledger.stable(checkpoint.ids)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: one.age)


def _conversations(tree: SegmentTree, now: float, per_entry: float) -> list[Kept]:
    """Every path of stored segments to its end; one that is partly on disk only counts as on disk."""
    found: list[Kept] = []
    counted: set[bytes] = set()
    ends = [segment for segment in tree if not tree.children(segment.key)]
    for end in sorted(ends, key=lambda segment: -segment.last_used):
        path = [end]
        while path[0].start and (before := tree.get(path[0].parent)) is not None:
            path.insert(0, before)
        own = [segment for segment in path if segment.key not in counted]
        counted.update(segment.key for segment in own)
        found.append(_conversation(path, own, now, per_entry))
    return found


def _conversation(path: list[Segment], own: list[Segment], now: float, per_entry: float) -> Kept:
    return Kept(
        tier="ram" if all(segment.rows is not None for segment in path) else "disk",
        what="conversation",
        entries=path[-1].end,
        nbytes=sum(segment.nbytes for segment in own),
        age=now - path[-1].last_used,
        hits=max(segment.hits for segment in path),
        seconds=path[-1].end * per_entry,
        pinned=any(segment.pinned for segment in path),
        first=_first(np.concatenate([segment.ids for segment in path])),
    )


def _first(ids: Ids) -> tuple[int, ...]:
    return tuple(int(one) for one in ids[:FIRST])


def usage(engine: Engine) -> dict[str, Usage]:
    """What the tiers hold and did: `ram`, and `disk` where there is one."""
    tiers = engine.memory.tiers
    found = {"ram": Usage(nbytes=tiers.ram.used, limit=tiers.ram.limit, counters=tiers.ram_counters)}
    if tiers.shelf is not None:
        disk = tiers.shelf.disk
        nbytes = sum(segment.file_bytes for segment in tiers.tree)
        nbytes += sum(shelved.nbytes for shelved in tiers.shelf.states())
        counters = tiers.disk_counters
        counters.saves, counters.saved_bytes = disk.counters.written, disk.counters.written_bytes
        counters.evictions, counters.refused = disk.counters.evictions, disk.counters.dropped
        found["disk"] = Usage(nbytes=nbytes, limit=disk.limit, counters=counters)
    return found


def pin(engine: Engine, entries: Sequence[Entry], salt: str = "") -> None:
    """Never let go of this beginning, wherever it is kept, now or later; `InvalidArgument` where pins would take more
    than half of the budget."""
    engine.memory.tiers.pinning.pin(engine.ledger.ids(entries), salt)


def unpin(engine: Engine, entries: Sequence[Entry], salt: str = "") -> bool:
    """Take a pin back; False: there was none on exactly these entries."""
    return engine.memory.tiers.pinning.unpin(engine.ledger.ids(entries), salt)


def clear(engine: Engine) -> None:
    """Forget everything: idle sequences, RAM, what is on disk of this model, and what was encoded."""
    for slot in engine.memory.slots:
        if not slot.busy:
            engine.memory.forget(slot)
    engine.memory.forget_stored()
    engine.looking.pictures.clear()


def place(engine: Engine) -> Place | None:
    """Where this engine keeps things on disk, for the functions below; None: nowhere."""
    shelf = engine.memory.tiers.shelf
    if shelf is None:
        return None
    return Place(directory=shelf.disk.directory, model=engine.memory.tiers.chain.model.hex())


# --- of a directory


def stored(directory: Path) -> list[Stored]:
    """What a directory holds, by model."""
    by_model: dict[str, list[Row]] = {}
    with open_index(directory) as index:
        for row in index.rows():
            by_model.setdefault(row.model, []).append(row)
    now = time.time()
    return [
        Stored(
            model=model,
            name=disk_files.read_label(directory / model),
            files=len(rows),
            entries=sum(len(row.ids) for row in rows if row.kind == "cells"),
            nbytes=sum(row.nbytes for row in rows),
            hits=sum(row.hits for row in rows),
            seconds=sum(row.seconds for row in rows if row.kind == "cells"),
            age=now - max(row.used for row in rows),
        )
        for model, rows in by_model.items()
    ]


def verify(directory: Path) -> Verified:
    """Check every byte of every file; what is broken is removed, and table and files agree afterwards."""
    checked = broken = 0
    with open_index(directory) as index:
        index.collect()
        for row in index.rows():
            path = directory / row.model / row.name
            try:
                intact = disk_files.load(path).item.model.hex() == row.model
            except FileNotFoundError:
                continue  # another process let go of it
            except (InvalidState, OSError):
                intact = False
            checked += 1
            if not intact:
                broken += 1
                with contextlib.suppress(OSError):
                    path.unlink()
                index.remove([row.name])
    return Verified(checked=checked, broken=broken)
