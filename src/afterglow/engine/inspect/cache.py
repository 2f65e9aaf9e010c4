"""Usage, pins and files of the prefix cache: plain values, and functions for `call` of a host.

Functions of an engine run between two of its steps and are fast. Functions of a directory read and write files of the
disk tier; they need no engine and may run while other processes use the directory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.index import IndexRow, open_index
from afterglow.engine.types.adapters import AdapterSet
from afterglow.engine.types.cache_events import CacheEventPage
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entry
from afterglow.errors import InvalidState, PromptTooLong


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """Size, limit and counters of one tier. Its bytes `by_kind` are blocks, checkpoints, tables and others."""

    nbytes: int
    by_kind: dict[str, int]
    limit_bytes: int
    counters: TierCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Files of one model in a disk tier directory."""

    model: str  # digest of everything that determines the meaning of the stored bytes
    name: str  # label of the model; may be empty
    files: int
    entries: int
    nbytes: int
    hits: int
    compute_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Result of `verify_files`. Damaged files have been removed."""

    checked: int
    broken: int


# --- functions of an engine


def get_tier_usage(engine: Engine) -> dict[str, TierUsage]:
    """Return the usage of the tiers by name: `ram` and, as far as there are such tiers, `disk` and `shared`."""
    engine.prefix_cache.store.refresh()
    return {
        tier.name: TierUsage(
            nbytes=tier.budget.used_bytes,
            by_kind=tier.budget.by_kind,
            limit_bytes=tier.budget.limit,
            counters=tier.counters,
        )
        for tier in engine.prefix_cache.store.tiers
    }


def get_cache_events(engine: Engine, after: int) -> CacheEventPage:
    """Return what was stored, loaded and evicted after the event with this number."""
    engine.prefix_cache.store.refresh()
    return engine.prefix_cache.store.ram.events.get_page(after)


def pin(
    engine: Engine,
    entries: Sequence[Entry] | NDArray[np.int64],
    salt: str = "",
    retention_seconds: float = math.inf,
    adapters: AdapterSet = (),
) -> None:
    """Pin a prefix: it is not evicted from any tier, whether it is cached now or later, until the pin expires.

    Raises `InvalidArgument` if pins would take more than half of the budget, and `PromptTooLong` if the prefix does not
    fit into the context.
    """
    interned, namespace, _ = engine.resolve_prompt(entries, salt, adapters)
    cells, limit = engine.interner.count_cells(interned), engine.backend.capabilities.cells_per_sequence
    if cells > limit:
        raise PromptTooLong(cells, limit)
    engine.prefix_cache.store.pin_manager.pin(interned, namespace, retention_seconds=retention_seconds)


def unpin(
    engine: Engine, entries: Sequence[Entry] | NDArray[np.int64], salt: str = "", adapters: AdapterSet = ()
) -> bool:
    """Remove a pin; return False if there is none on exactly these entries."""
    interned, namespace, _ = engine.resolve_prompt(entries, salt, adapters)
    return engine.prefix_cache.store.pin_manager.unpin(interned, namespace)


def clear(engine: Engine) -> None:
    """Clear idle sequences, the RAM tier, the files of this model in the disk tier, and the encoder cache.

    Pins stay: a pinned prefix is pinned again when it is computed again. Files are deleted in the background.
    """
    for slot in engine.prefix_cache.slots:
        if not slot.busy:
            engine.prefix_cache.discard(slot)
    engine.prefix_cache.clear_store()
    engine.media_scheduler.encoder_cache.clear()


# --- functions of a directory


def list_stored_models(directory: Path) -> list[StoredModel]:
    """Return the stored files of a directory, grouped by model."""
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
            idle_seconds=max(0.0, now - max(row.last_used for row in rows)),
        )
        for model, rows in by_model.items()
    ]


def verify_files(directory: Path) -> VerifyResult:
    """Verify every byte of every file. Removes damaged files and reconciles the index with the files."""
    checked = broken = 0
    with open_index(directory) as index:
        index.reconcile()
        for row in index.list_rows():
            path = directory / row.model / row.name
            try:
                intact = disk_files.load_file(path).file.model.hex() == row.model
            except FileNotFoundError:
                continue  # evicted by another process
            except (InvalidState, OSError):
                intact = False
            checked += 1
            if not intact:
                broken += 1
                with contextlib.suppress(OSError):
                    path.unlink()
                index.remove([row.name])
    return VerifyResult(checked=checked, broken=broken)
