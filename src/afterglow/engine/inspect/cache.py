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

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.index import IndexRow, open_index
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries, Entry
from afterglow.errors import InvalidState

CacheTier: TypeAlias = Literal["memory", "ram", "disk"]
PREVIEW_ENTRIES = 32  # entries that show what something is


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """One conversation or checkpoint that is kept. Bytes that several share are counted with the first of them."""

    tier: CacheTier
    kind: Literal["conversation", "checkpoint"]
    entries: int
    nbytes: int
    idle_seconds: float  # seconds since it was used
    hits: int
    compute_seconds: float  # it would take to compute it again
    pinned: bool
    first_entries: tuple[int, ...]  # entries that it begins with; negative ones are pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """What one tier holds, may hold, and did."""

    nbytes: int
    limit_bytes: int
    counters: TierCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLocation:
    """Where an engine keeps things on disk."""

    directory: Path
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """What a directory holds of one model."""

    model: str  # a digest of everything that decides what its bytes mean
    name: str  # what people call it, where somebody said so
    files: int
    entries: int
    nbytes: int
    hits: int
    compute_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What a look at every byte found. What was broken is gone."""

    checked: int
    broken: int


# --- of an engine


def list_cached(engine: Engine) -> list[CachedPrefix]:
    """Everything that is kept, the last used first.

    >>> [(one.tier, one.entries) for one in cache.kept(engine)]
    [('memory', 1204), ('ram', 800)]
    """
    memory, now = engine.prefix_cache, time.monotonic()
    memory.store.refresh()
    found = [
        CachedPrefix(
            tier="memory", kind="conversation", entries=len(slot), nbytes=slot.nbytes, idle_seconds=now - slot.last_used, hits=0,
            compute_seconds=len(slot) * memory.cost_model.seconds_per_entry, pinned=memory.store.is_pinned(slot.entries, slot.salt, 0),
            first_entries=_get_first_entries(engine.interner.to_portable_entries(slot.entries)),
        )
        for slot in memory.slots if len(slot)
    ]  # fmt: skip
    found += _list_conversations(memory.store.tree, now, memory.cost_model.seconds_per_entry)
    for checkpoint in memory.all_checkpoints:
        found.append(
            CachedPrefix(
                tier="ram", kind="checkpoint", entries=checkpoint.position, nbytes=checkpoint.nbytes, hits=0,
                idle_seconds=now - checkpoint.last_used, compute_seconds=memory.checkpoints.estimate_seconds_saved(checkpoint), pinned=checkpoint.pinned,
                first_entries=_get_first_entries(engine.interner.to_portable_entries(checkpoint.entries)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: one.idle_seconds)


def _list_conversations(tree: BlockTree, now: float, seconds_per_entry: float) -> list[CachedPrefix]:
    """Every path of stored segments to its end; one that is partly on disk only counts as on disk."""
    found: list[CachedPrefix] = []
    counted: set[bytes] = set()
    ends = [segment for segment in tree if not tree.get_children(segment.key)]
    for end in sorted(ends, key=lambda segment: -segment.last_used):
        path = [end]
        while path[0].start and (before := tree.get(path[0].parent)) is not None:
            path.insert(0, before)
        own = [segment for segment in path if segment.key not in counted]
        counted.update(segment.key for segment in own)
        found.append(_build_conversation(path, own, now, seconds_per_entry))
    return found


def _build_conversation(
    blocks: list[Block], uncounted_blocks: list[Block], now: float, seconds_per_entry: float
) -> CachedPrefix:
    return CachedPrefix(
        tier="ram" if all(segment.rows is not None for segment in blocks) else "disk",
        kind="conversation",
        entries=blocks[-1].end,
        nbytes=sum(segment.nbytes for segment in uncounted_blocks),
        idle_seconds=now - blocks[-1].last_used,
        hits=max(segment.hits for segment in blocks),
        compute_seconds=blocks[-1].end * seconds_per_entry,
        pinned=any(segment.pinned for segment in blocks),
        first_entries=_get_first_entries(np.concatenate([segment.entries for segment in blocks])),
    )


def _get_first_entries(entries: Entries) -> tuple[int, ...]:
    return tuple(int(one) for one in entries[:PREVIEW_ENTRIES])


def get_tier_usage(engine: Engine) -> dict[str, TierUsage]:
    """What the tiers hold and did: `ram`, and `disk` where there is one."""
    tiers = engine.prefix_cache.store
    found = {"ram": TierUsage(nbytes=tiers.ram.used_bytes, limit_bytes=tiers.ram.limit, counters=tiers.ram_counters)}
    if tiers.disk_tier is not None:
        disk = tiers.disk_tier.writer
        nbytes = sum(segment.file_bytes for segment in tiers.tree)
        nbytes += sum(shelved.nbytes for shelved in tiers.disk_tier.list_checkpoints())
        counters = tiers.disk_counters
        counters.saves, counters.saved_bytes = disk.counters.written_files, disk.counters.written_bytes
        counters.evictions, counters.rejected_saves = disk.counters.evictions, disk.counters.dropped_writes
        found["disk"] = TierUsage(nbytes=nbytes, limit_bytes=disk.limit, counters=counters)
    return found


def pin(engine: Engine, entries: Sequence[Entry], salt: str = "") -> None:
    """Never let go of this beginning, wherever it is kept, now or later; `InvalidArgument` where pins would take more
    than half of the budget."""
    engine.prefix_cache.store.pin_manager.pin(engine.interner.intern(entries), salt)


def unpin(engine: Engine, entries: Sequence[Entry], salt: str = "") -> bool:
    """Take a pin back; False: there was none on exactly these entries."""
    return engine.prefix_cache.store.pin_manager.unpin(engine.interner.intern(entries), salt)


def clear(engine: Engine) -> None:
    """Forget everything: idle sequences, RAM, what is on disk of this model, and what was encoded."""
    for slot in engine.prefix_cache.slots:
        if not slot.busy:
            engine.prefix_cache.discard(slot)
    engine.prefix_cache.clear_store()
    engine.media_scheduler.encoder_cache.clear()


def get_disk_location(engine: Engine) -> DiskLocation | None:
    """Where this engine keeps things on disk, for the functions below; None: nowhere."""
    shelf = engine.prefix_cache.store.disk_tier
    if shelf is None:
        return None
    return DiskLocation(directory=shelf.writer.directory, model=engine.prefix_cache.store.hasher.model.hex())


# --- of a directory


def list_stored_models(directory: Path) -> list[StoredModel]:
    """What a directory holds, by model."""
    by_model: dict[str, list[IndexRow]] = {}
    with open_index(directory) as index:
        for row in index.list_rows():
            by_model.setdefault(row.model, []).append(row)
    now = time.time()
    return [
        StoredModel(
            model=model,
            name=disk_files.read_label(directory / model),
            files=len(rows),
            entries=sum(len(row.entries) for row in rows if row.kind == "cells"),
            nbytes=sum(row.nbytes for row in rows),
            hits=sum(row.hits for row in rows),
            compute_seconds=sum(row.seconds for row in rows if row.kind == "cells"),
            idle_seconds=now - max(row.last_used for row in rows),
        )
        for model, rows in by_model.items()
    ]


def verify_files(directory: Path) -> VerifyResult:
    """Check every byte of every file; what is broken is removed, and table and files agree afterwards."""
    checked = broken = 0
    with open_index(directory) as index:
        index.reconcile()
        for row in index.list_rows():
            path = directory / row.model / row.name
            try:
                intact = disk_files.load_file(path).file.model.hex() == row.model
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
    return VerifyResult(checked=checked, broken=broken)
