"""Where computed cells live outside of memory: in RAM, and on disk behind it. Ties the two to sequences."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Backend, Cells, State
from afterglow.engine.costs import Costs
from afterglow.engine.entries import Ids, Ledger, common_prefix
from afterglow.engine.ram import Ram, Victim, worth
from afterglow.engine.segments import Chain, Cover, Segment, SegmentTree
from afterglow.engine.sequence import Sequence
from afterglow.errors import InvalidState


@dataclass(slots=True)
class Counters:
    """What one tier did so far."""

    saves: int = 0  # sequences of which something was stored
    saved_bytes: int = 0
    hits: int = 0  # prompts that began from here
    misses: int = 0  # prompts that found nothing here, nor in memory
    entries: int = 0  # that need not be computed because of it
    loaded_bytes: int = 0
    evictions: int = 0  # segments and checkpoints that had to make room
    refused: int = 0  # sequences for which there was no room
    seconds_saved: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A beginning that is never let go."""

    salt: str
    ids: Ids


class Tiers:
    """Stores what sequences hold when they have to go, each beginning once, and makes states of it again."""

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        costs: Costs,
        *,
        ram_bytes: int,
        block: int,
        grid: int,
        spare: Callable[[], Victim | None],
        others: Callable[[], int],
    ) -> None:
        self.ram = Ram(ram_bytes, others)
        self.ram_counters = Counters()
        self.chain = Chain(backend.key + f" grid {grid}".encode(), ledger, block)
        self.tree = SegmentTree(self.chain, ledger)
        self.pins: list[Pin] = []
        self._backend = backend
        self._ledger = ledger
        self._costs = costs
        self._aligned = bool(grid)
        self._spare = spare
        self._width = 0.0  # bytes of an entry, once one was stored
        self._kept: set[bytes] = set()

    # --- what there is

    def cover(self, ids: Ids, salt: str) -> Cover:
        """How far this prompt is stored."""
        return self.tree.cover(ids, salt, aligned=self._aligned)

    def covers(self, parent: bytes, rest: Ids) -> bool:
        """Whether all cells before a checkpoint are stored; see `Chain.before`."""
        return self.tree.covers(parent, rest)

    def seconds(self, cover: Cover, keep: int) -> float:
        """Expected seconds to bring the first entries of a cover back into memory."""
        return keep * (self._width or self._costs.bytes_per_entry) * self._costs.per_byte

    # --- into RAM

    def store(self, sequence: Sequence, partial: State | None) -> bool:
        """Keep the cells of a sequence; `partial` is its partial state. False: there is no room, or no way to."""
        length = sequence.aligned if self._aligned else len(sequence)
        ids = sequence.ids[:length].copy()
        cover = self.cover(ids, sequence.salt)
        self.ram.touch(cover.segments, time.monotonic())
        if cover.length == length:
            return True
        with_partial = cover.length - cover.length % self.chain.block
        width = self._width or self._backend.size(sequence.number, "full") / len(sequence)
        needed = (length - with_partial) * width
        with_kept = {segment.key for segment in cover.segments}
        if not self.make_room(int(needed), with_kept):
            self.ram_counters.refused += 1
            return False
        cells = self._take(sequence, partial)
        if cells is None or len(cells) != self._ledger.cells(sequence.ids):
            return False
        return self._store(cells, ids, sequence, cover)

    def _take(self, sequence: Sequence, partial: State | None) -> Cells | None:
        started = time.perf_counter()
        state = self._backend.save(sequence.number, "full")
        cells = self._backend.cells(state, partial)
        self._costs.moved(state.nbytes, time.perf_counter() - started, len(sequence))
        return cells

    def _store(self, cells: Cells, ids: Ids, sequence: Sequence, cover: Cover) -> bool:
        block = self.chain.block
        whole = [segment for segment in cover.segments if len(segment.ids) == block and segment.end <= cover.length]
        start = len(whole) * block
        at = self._ledger.cells(ids[:start])
        needed = (len(cells) - at) * cells.width + (len(ids) - start) * ids.itemsize
        self._width = needed / max(len(ids) - start, 1)
        if not self.make_room(needed, {segment.key for segment in whole}):
            self.ram_counters.refused += 1
            return False
        parent = whole[-1].key if whole else self.chain.seed(sequence.salt)
        path = whole
        for first in range(start, len(ids), block):
            stretch = ids[first : first + block]
            count = self._ledger.cells(stretch)
            rows = cells.rows(at, at + count)
            segment = self._segment(parent, first, stretch, rows, cells.layout, sequence)
            self._add(segment)
            path.append(segment)
            parent, at = segment.key, at + count
        self.ram.touch(path, time.monotonic())
        self.ram_counters.saves += 1
        self.ram_counters.saved_bytes += needed
        return True

    def _segment(
        self, parent: bytes, start: int, ids: Ids, rows: NDArray[np.uint8], layout: bytes, sequence: Sequence
    ) -> Segment:
        written = self._ledger.stable(ids).copy()
        return Segment(
            key=self.chain.link(parent, ids),
            parent=parent,
            start=start,
            ids=written,
            aligned=min(max(sequence.aligned - start, 0), len(ids)),
            cells=len(rows),
            nbytes=rows.nbytes + written.nbytes,
            layout=layout,
            rows=rows,
            pinned=self.is_pinned(sequence.ids, sequence.salt, start),
        )

    def _add(self, segment: Segment) -> None:
        for gone in self.tree.add(segment):
            if gone in self.ram:
                self.ram.drop(gone)
        self.ram.put(segment)

    def make_room(self, nbytes: int, kept: set[bytes] | None = None) -> bool:
        """Let go of what is worth least until so many bytes are free. False: they cannot be."""
        if nbytes > self.ram.limit - self.ram.pinned_bytes():
            return False
        while self.ram.free < nbytes:
            if not self._evict((kept or set()) | self._kept):
                return False
        return True

    def _evict(self, kept: set[bytes]) -> bool:
        segment, other = self.ram.oldest(kept), self._spare()
        if segment is None and other is None:
            return False
        self.ram_counters.evictions += 1
        if other is None or (segment is not None and self._worth(segment) <= other.worth):
            assert segment is not None
            self._let_go(segment)
        else:
            other.drop()
        return True

    def _worth(self, segment: Segment) -> float:
        seconds = len(segment.ids) * self._costs.per_entry
        return worth(seconds, segment.nbytes, time.monotonic() - segment.last_used)

    def _let_go(self, segment: Segment) -> None:
        """The segment leaves RAM; where it is on disk it can still be found."""
        self.ram.drop(segment)
        if segment.on_disk:
            return
        for gone in self.tree.remove(segment):
            if gone in self.ram:
                self.ram.drop(gone)

    # --- back into memory

    def keep(self, cover: Cover) -> None:
        """From here to `release` the segments of this cover do not make room for others."""
        self.ram.touch(cover.segments, time.monotonic())
        self._kept = {segment.key for segment in cover.segments}

    def release(self) -> None:
        self._kept = set()

    def load(self, sequence: Sequence, ids: Ids, cover: Cover, partial: State | None) -> None:
        """Make the sequence hold `ids`, out of a cover that is at least as long. A broken one is `InvalidState`."""
        started = time.perf_counter()
        blocks, at, nbytes = [], 0, 0
        for segment in cover.segments:
            if at >= len(ids):
                break
            rows = self._rows(segment)
            count = min(len(segment.ids), len(ids) - at)
            cells = self._ledger.cells(ids[at : at + count])
            blocks.append(rows[:cells])
            nbytes += cells * rows.shape[1]
            at += count
        if at != len(ids) or not blocks:
            raise InvalidState(f"only {at} of {len(ids)} entries are stored")
        layout = cover.segments[0].layout
        state = self._backend.join(layout, blocks, partial, self._ledger.positions(ids))
        sequence.load(ids, state, len(ids) if self._aligned else 0)
        seconds = time.perf_counter() - started
        self._costs.moved(nbytes, seconds, 0)
        for segment in cover.segments:
            segment.hits += 1
        self.count_hit(len(ids), nbytes, seconds)

    def _rows(self, segment: Segment) -> NDArray[np.uint8]:
        if segment.rows is None:
            raise InvalidState("a segment is gone")
        return segment.rows

    def count_hit(self, entries: int, nbytes: int, seconds: float) -> None:
        """A prompt began from here: so much was brought back, and it took so long."""
        counters = self.ram_counters
        counters.hits += 1
        counters.entries += entries
        counters.loaded_bytes += nbytes
        counters.seconds_saved += max(0.0, entries * self._costs.per_entry - seconds)

    # --- what people want

    def is_pinned(self, ids: Ids, salt: str, start: int) -> bool:
        """Whether the entry with this index belongs to a pinned beginning."""
        return any(pin.salt == salt and common_prefix(pin.ids, ids) > start for pin in self.pins)

    def pin(self, ids: Ids, salt: str) -> None:
        """Never let go of these entries again, once they are stored."""
        self.pins.append(Pin(salt, ids))
        self._pin_stored()

    def unpin(self, ids: Ids, salt: str) -> bool:
        """Take a pin back; False: there was none on exactly these entries."""
        found = [pin for pin in self.pins if pin.salt == salt and np.array_equal(pin.ids, ids)]
        self.pins = [pin for pin in self.pins if pin not in found]
        self._pin_stored()
        return bool(found)

    def _pin_stored(self) -> None:
        """Make the marks on segments say what the pins say."""
        wanted = {one.key for pin in self.pins for one in self.tree.cover(pin.ids, pin.salt, aligned=False).segments}
        for segment in self.tree:
            segment.pinned = segment.key in wanted

    def clear(self) -> None:
        """Forget every segment, pinned ones too."""
        for segment in self.ram:
            self.ram.drop(segment)
        for segment in self.tree:
            if self.tree.get(segment.key) is segment:
                self.tree.remove(segment)
