"""Where computed cells live outside of memory: in RAM, and on disk behind it. Ties the two to sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.backend import Backend, Cells, State
from afterglow.engine.checkpoint import Checkpoint
from afterglow.engine.costs import Costs
from afterglow.engine.counters import TierCounters
from afterglow.engine.entries import Ids, Ledger
from afterglow.engine.marks import Marks
from afterglow.engine.pinning import Pinning
from afterglow.engine.ram import Ram, worth
from afterglow.engine.segments import Chain, Cover, Segment, SegmentTree
from afterglow.engine.sequence import Sequence
from afterglow.engine.settings import EngineSettings
from afterglow.engine.shelf import Shelved, open_shelf
from afterglow.errors import InvalidState
from afterglow.llama import pages


class Tiers:
    """Stores what sequences hold when they have to go, each beginning once, and makes states of it again."""

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        costs: Costs,
        settings: EngineSettings,
        *,
        grid: int,
        marks: Marks,
        parked: Callable[[], int],
    ) -> None:
        self.ram = Ram(settings.ram_limit, lambda: marks.nbytes + parked())
        self.ram_counters = TierCounters()
        self.disk_counters = TierCounters()
        model = blake3(backend.key + f" grid {grid} segment {settings.segment}".encode()).digest()
        self.chain = Chain(model, ledger, settings.segment)
        self.tree = SegmentTree(self.chain, ledger)
        self._backend = backend
        self._key = backend.key
        self._ledger = ledger
        self._costs = costs
        self._aligned = bool(grid)
        self._marks = marks
        self.shelf = open_shelf(settings, model, backend, ledger, costs, self.ram.get, marks.find)
        self._width = 0.0  # bytes of an entry, once one was stored
        self.pinning = Pinning(self.ram, marks, self.tree, self.shelf, lambda: self._width)
        self._kept: set[bytes] = set()

    # --- what there is

    def cover(self, ids: Ids, salt: str) -> Cover:
        """How far this prompt is stored."""
        self.refresh()
        if self._backend.key != self._key:  # another adapter: what is stored is of another model
            return Cover()
        return self.tree.cover(ids, salt, aligned=self._aligned)

    def refresh(self) -> None:
        """Hear what came to the disk, and what went."""
        if self.shelf is not None:
            for lost in self.shelf.sync(self.tree):
                if lost in self.ram:
                    self.ram.drop(lost)

    def along(self, ids: Ids, salt: str) -> list[Checkpoint]:
        """The checkpoints that a prompt runs through, in RAM and on disk, deepest first."""
        found = list(self._marks.along(ids, salt))
        if self.shelf is None:
            return found
        self.refresh()
        depths = {checkpoint.depth for checkpoint in found}
        for shelved in self.shelf.along(self.chain.names(ids, salt), ids, self.chain.block):
            if shelved.depth not in depths:
                found.append(self.checkpoint(ids[: shelved.depth], salt, shelved, shelved.aligned))
        return sorted(found, key=lambda checkpoint: -checkpoint.depth)

    def checkpoint(self, ids: Ids, salt: str, state: State, aligned: int) -> Checkpoint:
        """A checkpoint after these entries, with its names."""
        before = self.chain.names(ids, salt)[-1]
        start = len(ids) - len(ids) % self.chain.block
        key = self.chain.mark(before, ids[start:])
        return Checkpoint(ids=ids, state=state, aligned=aligned, salt=salt, before=before, start=start, key=key)

    def covers(self, checkpoint: Checkpoint) -> bool:
        """Whether all cells before a checkpoint are stored."""
        return self.tree.covers(checkpoint.before, checkpoint.ids[checkpoint.start :])

    def seconds(self, cover: Cover, keep: int) -> float:
        """Expected seconds to bring the first entries of a cover back into memory."""
        moved = keep * (self._width or self._costs.bytes_per_entry)
        read = sum(segment.nbytes for segment in cover.segments if segment.rows is None)
        return moved * self._costs.per_byte + read * self._costs.per_disk_byte

    def checkpoint_seconds(self, checkpoint: Checkpoint) -> float:
        """Expected seconds to load a checkpoint."""
        read = isinstance(checkpoint.state, Shelved)
        return checkpoint.nbytes * (self._costs.per_byte + read * self._costs.per_disk_byte)

    # --- into RAM

    def store(self, sequence: Sequence, partial: State | None) -> bool:
        """Keep the cells of a sequence; `partial` is its partial state. False: there is no room, or no way to."""
        if self._backend.key != self._key:
            return False
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
        stretches = [ids[first : first + block] for first in range(start, len(ids), block)]
        counts = [self._ledger.cells(stretch) for stretch in stretches]
        needed = sum(pages.size(count * cells.width) for count in counts) + (len(ids) - start) * ids.itemsize
        self._width = needed / max(len(ids) - start, 1)
        if not self.make_room(needed, {segment.key for segment in whole}):
            self.ram_counters.refused += 1
            return False
        parent = whole[-1].key if whole else self.chain.seed(sequence.salt)
        path = whole
        for first, stretch, count in zip(range(start, len(ids), block), stretches, counts, strict=True):
            rows = cells.rows(at, at + count)
            segment = self._segment(parent, first, stretch, rows, cells.layout, sequence)
            self._add(segment)
            path.append(segment)
            parent, at = segment.key, at + count
        self.ram.touch(path, time.monotonic())
        self.ram_counters.saves += 1
        self.ram_counters.saved_bytes += needed
        self.pinning.bound()
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
            nbytes=pages.size(rows.nbytes) + written.nbytes,
            layout=layout,
            rows=rows,
            pinned=self.is_pinned(sequence.ids, sequence.salt, start),
        )

    def _add(self, segment: Segment) -> None:
        for gone in self.tree.add(segment):
            if gone in self.ram:
                self.ram.drop(gone)
            if self.shelf is not None and gone.on_disk and gone.key != segment.key:
                self.shelf.disk.remove("cells", gone.key)
        self.ram.put(segment)
        if self.shelf is not None:
            self.shelf.offer(segment)

    def shelve(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Write these checkpoints to the disk, some time."""
        if self.shelf is not None:
            for checkpoint in checkpoints:
                self.shelf.offer(checkpoint)

    def make_room(self, nbytes: int, kept: set[bytes] | None = None) -> bool:
        """Let go of what is worth least until so many bytes are free. False: they cannot be."""
        if nbytes > self.ram.limit - self.pinning.nbytes:
            return False
        while self.ram.free < nbytes:
            if not self._evict((kept or set()) | self._kept):
                return False
        return True

    def _evict(self, kept: set[bytes]) -> bool:
        segment, other = self.ram.oldest(kept), self._marks.victim()
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
        """What a segment saves. Where cells alone are not enough, that is what the checkpoints over it save."""
        seconds, nbytes = len(segment.ids) * self._costs.per_entry, segment.nbytes
        if self._backend.capabilities.partial_state:
            over = self._over(segment)
            seconds = sum(self._marks.seconds(checkpoint) for checkpoint in over)
            nbytes += sum(checkpoint.nbytes for checkpoint in over)
        return worth(seconds, nbytes, time.monotonic() - segment.last_used)

    def _over(self, segment: Segment) -> list[Checkpoint]:
        """The checkpoints that end in a segment."""
        found = [one for one in self._marks.checkpoints if one.before in (segment.key, segment.parent)]
        return [one for one in found if one.before == segment.key or one.depth > segment.start]

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

    def reading(self, cover: Cover, keep: int, checkpoint: Checkpoint | None) -> bool:
        """Whether what a plan needs from the disk is still being read, on another thread."""
        if self.shelf is None:
            return False
        shelved = checkpoint.state if checkpoint is not None and isinstance(checkpoint.state, Shelved) else None
        return self.shelf.reading([segment for segment in cover.segments if segment.start < keep], shelved)

    def load(self, sequence: Sequence, ids: Ids, cover: Cover, checkpoint: Checkpoint | None) -> None:
        """Make the sequence hold `ids`, out of a cover that is at least as long. A broken one is `InvalidState`."""
        started = time.perf_counter()
        from_disk = checkpoint is not None and isinstance(checkpoint.state, Shelved)
        from_disk = from_disk or any(segment.rows is None for segment in cover.segments)
        partial = None if checkpoint is None else self.state(checkpoint)
        blocks, at, used = [], 0, []
        for segment in cover.segments:
            if at >= len(ids):
                break
            rows = self._rows(segment)
            count = min(len(segment.ids), len(ids) - at)
            blocks.append(rows[: self._ledger.cells(ids[at : at + count])])
            used.append(segment)
            at += count
        if at != len(ids) or len({segment.layout for segment in used}) != 1:
            raise InvalidState(f"only {at} of {len(ids)} entries are stored")
        state = self._backend.join(used[0].layout, blocks, partial, self._ledger.positions(ids))
        sequence.load(ids, state, len(ids) if self._aligned else 0)
        seconds, nbytes = time.perf_counter() - started, sum(block.nbytes for block in blocks)
        self._costs.moved(nbytes, seconds, 0)
        self.ram.touch(used, time.monotonic())
        self.count_hit(len(ids), nbytes, seconds, checkpoint, used, from_disk=from_disk)

    def _rows(self, segment: Segment) -> NDArray[np.uint8]:
        if segment.rows is not None:
            return segment.rows
        if self.shelf is None:
            raise InvalidState("a segment is gone")
        try:
            rows = self.shelf.rows(segment)
            self._promote(segment, rows)
            return rows
        except InvalidState:
            for gone in self.tree.remove(segment):
                if gone in self.ram:
                    self.ram.drop(gone)
            raise

    def _promote(self, segment: Segment, rows: NDArray[np.uint8]) -> None:
        """Keep what was read in RAM, too, where nothing has to go for it."""
        nbytes = pages.size(rows.nbytes) + segment.ids.nbytes
        if nbytes <= self.ram.free:
            segment.rows, segment.nbytes = pages.copied(rows), nbytes
            self.ram.put(segment)

    def state(self, checkpoint: Checkpoint) -> State:
        """The partial state of a checkpoint, from wherever it is; one that was on disk is in RAM from now on."""
        checkpoint.last_used = time.monotonic()
        shelved = checkpoint.state
        if not isinstance(shelved, Shelved):
            return shelved
        assert self.shelf is not None
        state = self.shelf.state(shelved, checkpoint.ids)
        kept = replace(checkpoint, ids=checkpoint.ids.copy(), state=state)
        if not self._marks.taken(kept.ids, kept.salt) and self._marks.fits(kept.nbytes):
            self._marks.add(kept)
            self.pinning.note()
        return state

    def count_hit(
        self,
        entries: int,
        nbytes: int,
        seconds: float,
        checkpoint: Checkpoint | None = None,
        segments: SequenceOf[Segment] = (),
        *,
        from_disk: bool = False,
    ) -> None:
        """A prompt began from here: so much was brought back, and it took so long."""
        shelved = checkpoint.state if checkpoint and isinstance(checkpoint.state, Shelved) else None
        counters = self.disk_counters if from_disk or shelved is not None else self.ram_counters
        counters.hit(entries, nbytes, entries * self._costs.per_entry - seconds)
        for segment in segments:
            segment.hits += 1
        if self.shelf is not None:
            self.shelf.touch(segments, shelved)

    def count_miss(self) -> None:
        """A prompt found nothing, neither in memory nor here."""
        self.ram_counters.misses += 1
        self.disk_counters.misses += self.shelf is not None

    # --- what people want

    def is_pinned(self, ids: Ids, salt: str, start: int) -> bool:
        """Whether the entry with this index belongs to a pinned beginning."""
        return self.pinning.pins.hold(ids, salt, start)

    def clear(self) -> None:
        """Forget every segment, pinned ones too."""
        self.refresh()
        if self.shelf is not None:
            self.shelf.clear()
        for segment in self.ram:
            self.ram.drop(segment)
        for segment in self.tree:
            if self.tree.get(segment.key) is segment:
                self.tree.remove(segment)

    def close(self, seconds: float = 0.0) -> None:
        """Wait so long for what is still to be written."""
        if self.shelf is not None:
            self.shelf.close(seconds)
