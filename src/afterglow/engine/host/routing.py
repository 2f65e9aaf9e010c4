"""Routing of requests to replicas: the replica that is expected to give the first token soonest. Pure, no I/O.

A replica reports the names of the blocks that it holds in RAM, and its measured speeds. Names are those of
`BlockHasher`: each covers all entries before it, so that the leading names of a prompt in a report are the prefix that
the replica holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import BlockHasher
from afterglow.engine.kvcache.cost_model import INITIAL_SECONDS_PER_ENTRY
from afterglow.engine.types.entries import Entry, EntryInterner

NAME_BYTES = 8  # of a block key in reports: a collision costs time, never a wrong token
MAX_ROUTED_NAMES = 16_384  # about a million entries
INITIAL_LOAD_SECONDS_PER_ENTRY = 2e-5  # until a read was measured: 20 kB at 1 GB/s
INITIAL_SECONDS_PER_STEP = 1e-3

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpeeds:
    """Costs that the engine of a replica has measured."""

    seconds_per_entry: float = INITIAL_SECONDS_PER_ENTRY  # prefill
    seconds_per_step: float = INITIAL_SECONDS_PER_STEP  # decode
    load_seconds_per_entry: float = INITIAL_LOAD_SECONDS_PER_ENTRY  # from the slowest tier, which the replicas share


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica holds and how fast it is."""

    model: bytes = b""  # as of `BlockHasher`: replicas with another value share no names
    block_size: int = 64
    names: frozenset[bytes] = frozenset()  # of the blocks in RAM, shortened to `NAME_BYTES`
    speeds: ReplicaSpeeds | None = None  # None: it has not computed a prompt yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a new request would find at a replica."""

    cached_entries: int = 0  # leading entries of its prompt that the replica holds
    queued_entries: int = 0  # to compute for other requests before their first token
    running: int = 0  # requests, with those that wait
    sequences: int = 1  # requests that can run at the same time
    stored_blocks: int = 0  # blocks that it holds, of all prompts
    speeds: ReplicaSpeeds = ReplicaSpeeds()


def estimate_first_token_seconds(load: ReplicaLoad, prompt_entries: int, shared_entries: int = 0) -> float:
    """Return the expected seconds until a replica gives the first token of a prompt.

    `shared_entries` are the leading entries that every replica can load from a shared tier. They are loaded if that is
    faster than computing them. A request beyond the number of sequences waits about as long as a prompt of its size.

    >>> idle, holder = ReplicaLoad(), ReplicaLoad(cached_entries=900, queued_entries=300)
    >>> estimate_first_token_seconds(idle, 1000) > estimate_first_token_seconds(holder, 1000)
    True
    >>> estimate_first_token_seconds(idle, 1000, 900) < estimate_first_token_seconds(holder, 1000, 900)
    True
    """
    speeds = load.speeds
    missing = max(0, prompt_entries - load.cached_entries)
    loadable = min(missing, max(0, shared_entries - load.cached_entries))
    # An infinite time per entry, without a shared tier, is never multiplied by 0.
    seconds_per_loadable = min(speeds.load_seconds_per_entry, speeds.seconds_per_entry)
    own = (missing - loadable) * speeds.seconds_per_entry + loadable * seconds_per_loadable
    queued = load.queued_entries * speeds.seconds_per_entry + load.running * speeds.seconds_per_step
    waiting = max(0, load.running + 1 - load.sequences) / max(load.sequences, 1)
    return own + queued + waiting * prompt_entries * speeds.seconds_per_entry


def choose_replica(loads: Mapping[ReplicaT, ReplicaLoad], prompt_entries: int) -> ReplicaT:
    """Return the replica with the earliest expected first token; of equal ones, that with the fewest blocks.

    What one replica holds, the others can load, if they share a tier.

    >>> choose_replica({"a": ReplicaLoad(), "b": ReplicaLoad(cached_entries=64)}, 100)
    'b'
    """
    return rank_replicas(loads, prompt_entries)[0]


def rank_replicas(loads: Mapping[ReplicaT, ReplicaLoad], prompt_entries: int) -> list[ReplicaT]:
    """Return the replicas in the order of `choose_replica`."""
    shared = max((load.cached_entries for load in loads.values()), default=0)

    def compute_rank(replica: ReplicaT) -> tuple[float, int]:
        load = loads[replica]
        return estimate_first_token_seconds(load, prompt_entries, shared), load.stored_blocks

    return sorted(loads, key=compute_rank)


def choose_speeds(reports: Iterable[ReplicaReport]) -> ReplicaSpeeds:
    """Return the speeds of replicas on the same hardware: the fastest, because other load only ever slows one down.

    A replica that has computed nothing yet is expected to be as fast.
    """
    measured = [report.speeds for report in reports if report.speeds is not None]
    return min(measured, key=lambda speeds: speeds.seconds_per_entry, default=ReplicaSpeeds())


def list_names(
    entries: Sequence[Entry] | NDArray[np.int64], salt: str, *, model: bytes, block_size: int
) -> list[bytes]:
    """Return the names of the full blocks of a prompt, as they are in the reports of replicas of this model."""
    interner = EntryInterner()
    keys = BlockHasher(model, interner, block_size).hash_prefixes(interner.intern(entries), salt)
    return [shorten_key(key) for key in keys[1:]]


def shorten_key(key: bytes) -> bytes:
    """Return a block key as it is in reports."""
    return key[:NAME_BYTES]


def count_leading(names: Sequence[bytes], cached: Container[bytes]) -> int:
    """Return how many of the first names are cached, without a gap.

    >>> count_leading([b"a", b"b", b"c"], {b"a", b"c"})
    1
    """
    return next((index for index, name in enumerate(names) if name not in cached), len(names))


class RoutedNames:
    """Names of the blocks of the prompts that a replica got lately, of which the newest are kept.

    They bridge the time until the next report of the replica.

    >>> routed = RoutedNames(limit=2)
    >>> routed.add([b"a", b"b", b"c"])
    >>> count_leading([b"a", b"b", b"c"], routed)
    2
    """

    def __init__(self, limit: int = MAX_ROUTED_NAMES) -> None:
        self._limit = limit
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, names: Sequence[bytes]) -> None:
        """Record the names of a prompt. The last of them are dropped first, because they need those before them."""
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._limit:
            self._names.popitem(last=False)

    def clear(self) -> None:
        self._names.clear()
