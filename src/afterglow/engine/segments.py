"""Computed cells outside of memory, in stretches of a few entries, each found by all that comes before it. Pure.

Stretches begin at multiples of a fixed length, so conversations that begin alike have the same ones, in this process
and in any other. Only the last of a conversation may be shorter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.entries import Ids, Ledger, common_prefix

REMEMBERED = 1024  # names of stretches, about a megabyte with what they are the names of


@dataclass(eq=False, slots=True, kw_only=True)
class Segment:
    """The cells of a few entries. `rows` is None while they are on disk only."""

    key: bytes  # names these entries after all those before them
    parent: bytes  # the key of what comes before; of the first, the seed
    start: int  # entries before it
    ids: Ids  # as every process writes them
    aligned: int  # leading entries that were computed on the deterministic grid
    cells: int
    nbytes: int  # in RAM; of one that never was there, of its file
    layout: bytes = b""
    rows: NDArray[np.uint8] | None = None
    file_bytes: int = 0  # 0: it is not on disk
    pinned: bool = False
    hits: int = 0
    last_used: float = field(default_factory=time.monotonic)

    @property
    def on_disk(self) -> bool:
        return self.file_bytes > 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Cover:
    """What of a prompt is stored, from its beginning on: `length` entries, the last segment perhaps only in part."""

    segments: tuple[Segment, ...] = ()
    length: int = 0
    ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the prompt, so far

    @property
    def next(self) -> int | None:
        """The stored entry that comes after, where there is one."""
        rest = self.length - self.segments[-1].start if self.segments else 0
        return int(self.segments[-1].ids[rest]) if self.segments and rest < len(self.segments[-1].ids) else None


class Chain:
    """Names stretches of entries by everything before them: the model and build, the salt, every entry."""

    def __init__(self, model: bytes, ledger: Ledger, block: int) -> None:
        self.block = block  # entries in a whole segment
        self.model = model  # names everything that decides what stored bytes mean
        self._ledger = ledger
        self._known = functools.lru_cache(REMEMBERED)(self._link)  # a plan asks for the same names several times

    def seed(self, salt: str) -> bytes:
        """Where the chain of a salt begins."""
        return blake3(self.model + salt.encode(), derive_key_context="afterglow prefix seed").digest()

    def link(self, parent: bytes, ids: Ids) -> bytes:
        """The name of these entries after `parent`."""
        return self._known(parent, ids.tobytes())

    def _link(self, parent: bytes, written: bytes) -> bytes:
        return blake3(parent + self._ledger.spelled(np.frombuffer(written, dtype=np.int64))).digest()

    def names(self, ids: Ids, salt: str) -> list[bytes]:
        """The names of all beginnings of `ids` in whole segments, the empty one first."""
        names = [self.seed(salt)]
        for start in range(0, len(ids) - len(ids) % self.block, self.block):
            names.append(self.link(names[-1], ids[start : start + self.block]))
        return names

    def mark(self, before: bytes, rest: Ids) -> bytes:
        """The name of a checkpoint `rest` entries after `before`."""
        return blake3(self.link(before, rest), derive_key_context="afterglow prefix checkpoint").digest()


class SegmentTree:
    """Which segments there are. One that is here has everything before it here, too."""

    def __init__(self, chain: Chain, ledger: Ledger) -> None:
        self.chain = chain
        self._ledger = ledger
        self._by_key: dict[bytes, Segment] = {}
        self._children: dict[bytes, list[Segment]] = {}  # by the name of their parent
        self.losses = 0  # segments that went

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._by_key.values()))

    def get(self, key: bytes) -> Segment | None:
        return self._by_key.get(key)

    def children(self, key: bytes) -> list[Segment]:
        return self._children.get(key, [])

    def cover(self, ids: Ids, salt: str, *, aligned: bool) -> Cover:
        """How far a prompt is stored; with `aligned`, as far as it was computed on the deterministic grid."""
        block, name, found, length = self.chain.block, self.chain.seed(salt), [], 0
        while length < len(ids):
            stretch = ids[length : length + block]
            segment, shared = self._best(name, stretch)
            if segment is None or not shared:
                break
            found.append(segment)
            usable = min(shared, segment.aligned) if aligned else shared
            length += usable
            if usable < block:
                break
            name = segment.key
        return Cover(tuple(found), length, ids[:length])

    def _best(self, parent: bytes, ids: Ids) -> tuple[Segment | None, int]:
        """The segment after `parent` that has most in common with `ids`, and how much."""
        written = self._ledger.stable(ids)
        if len(ids) == self.chain.block:
            whole = self._by_key.get(self.chain.link(parent, ids))
            if whole is not None and np.array_equal(whole.ids, written):
                return whole, len(ids)
        best, most = None, 0
        for segment in self.children(parent):
            shared = common_prefix(segment.ids, written)
            if shared > most:
                best, most = segment, shared
        return best, most

    def covers(self, parent: bytes, rest: Ids) -> bool:
        """Whether everything up to `rest` entries after `parent` is stored."""
        if parent not in self._by_key and not self._is_seed(parent):
            return False
        return not len(rest) or self._best(parent, rest)[1] == len(rest)

    def _is_seed(self, parent: bytes) -> bool:
        return any(segment.start == 0 for segment in self.children(parent))

    def add(self, segment: Segment) -> list[Segment]:
        """Take a segment in; the shorter ones that it makes superfluous, which are gone now."""
        assert segment.start == 0 or segment.parent in self._by_key, "something before it is missing"
        gone = [
            other
            for other in self.children(segment.parent)
            if other.key != segment.key
            and len(other.ids) < len(segment.ids)
            and other.aligned <= segment.aligned
            and common_prefix(other.ids, segment.ids) == len(other.ids)
        ]
        if segment.key in self._by_key:
            gone.append(self._by_key[segment.key])
        for other in gone:
            self._forget(other)
        self._by_key[segment.key] = segment
        self._children.setdefault(segment.parent, []).append(segment)
        return gone

    def remove(self, segment: Segment) -> list[Segment]:
        """Take a segment out, and everything that builds on it; all of these."""
        gone, waiting = [], [segment]
        while waiting:
            one = waiting.pop()
            gone.append(one)
            waiting += self.children(one.key)
            self._forget(one)
        return gone

    def _forget(self, segment: Segment) -> None:
        self.losses += 1
        del self._by_key[segment.key]
        siblings = self._children[segment.parent]
        siblings.remove(segment)
        if not siblings:
            del self._children[segment.parent]
