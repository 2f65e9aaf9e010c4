"""The prefix memory: which sequences and checkpoints there are, and how a prompt begins from them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from afterglow.engine.backend import Backend, State
from afterglow.engine.checkpoint import Checkpoint, cut_points
from afterglow.engine.costs import Costs
from afterglow.engine.entries import Ids, Ledger, common_prefix, last_edge
from afterglow.engine.explanation import Evicted, Explanation, cause_of
from afterglow.engine.marks import Marks
from afterglow.engine.prefix import PrefixTree
from afterglow.engine.reuse import Continue, Fork, Fresh, Recall, Restore, Reuse, Situation, Source, loss, plan
from afterglow.engine.segments import Cover
from afterglow.engine.sequence import Saved, Sequence
from afterglow.engine.settings import EngineSettings
from afterglow.engine.tiers import Tiers
from afterglow.errors import AfterglowError, MemoryFull

AT_HAND = 24  # entries that are sooner computed again, once in a while, than every prompt pays a decode for a stop
CANDIDATES = 16  # sequences that a plan looks at: those that share most, and those that were idle longest
CLOSING = 3.0  # seconds that an end waits for what is worth keeping


class PrefixMemory:
    """Owns the slots of the backend's memory, the tree over them, the checkpoints, and the tiers behind memory."""

    def __init__(self, backend: Backend, ledger: Ledger, settings: EngineSettings, grid: int = 0) -> None:
        self.costs = Costs()
        self._backend = backend
        self._settings = settings.checkpoints
        self._parked_limit = settings.parked_bytes
        self.parked_bytes = 0
        self._partial_bytes = 0  # of the last partial state
        self._grid = grid  # 0: any length can be reused
        self._idle: PrefixTree[Sequence] = PrefixTree()  # by what they hold
        self.marks = Marks(settings.checkpoints, self.costs, lambda nbytes: self.tiers.make_room(nbytes))
        self.slots = [Sequence(number, backend, ledger) for number in range(backend.capabilities.sequences)]
        self._unused = dict.fromkeys(self.slots)  # idle sequences, the longest idle first
        self._untidy: dict[Sequence, None] = {}  # idle sequences that are not on disk yet, the newest last
        self._losses = 0  # of sequences and stored segments, when checkpoints were last looked through
        self.evicted = Evicted()
        self.tiers = Tiers(
            backend,
            ledger,
            self.costs,
            settings,
            grid=grid,
            marks=self.marks,
            parked=lambda: self.parked_bytes,
        )

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return self.marks.checkpoints

    def plan(self, ids: Ids, *, reuse: bool = True, slot: int | None = None, salt: str = "") -> Reuse | None:
        """How to begin a prompt; None: every slot that it could use is busy."""
        wanted = None if slot is None else self.slots[slot]
        if wanted is not None and wanted.busy:
            return None
        target, target_loss = self._spare() if wanted is None else (wanted, 0.0)
        capabilities = self._backend.capabilities
        checkpoints = self.tiers.along(ids, salt) if reuse else []
        sources = list(self._sources(ids, salt)) if reuse else []
        if wanted is not None:  # only this slot may be used up; the others may be copied
            sources = [source for source in sources if source.slot is wanted or source.slot.busy]
        return plan(
            Situation(
                length=len(ids),
                sources=sources,
                checkpoints=checkpoints,
                target=target,
                target_loss=target_loss,
                resumable=lambda one, length: one.resumable(length),
                forks_anywhere=capabilities.forks_anywhere,
                needs_cells=capabilities.checkpoints_need_cells,
                copies_cost=not capabilities.shared,
                costs=self.costs,
                round_down=lambda length: self.round_down(length, ids),
                cover=self.tiers.cover(ids, salt) if reuse and target is not None else Cover(),
                cover_seconds=self.tiers.seconds,
                checkpoint_seconds=self.tiers.checkpoint_seconds,
                cells_suffice=not capabilities.partial_state,
                storing=self._storing if self._stores else None,
            )
        )

    @property
    def _stores(self) -> bool:
        return self.tiers.ram.limit > 0

    def _storing(self, length: int) -> float:
        """Expected seconds to store, or to load, a sequence of so many entries."""
        cells = length * self.costs.bytes_per_entry if self._backend.capabilities.has_cells else self._partial_bytes
        return cells * self.costs.per_byte

    def round_down(self, length: int, ids: Ids) -> int:
        """The longest prefix of `length` of these entries that may be reused: any, or whole chunks of the grid."""
        return last_edge(length, ids, self._grid) if self._grid else length

    def reading(self, reuse: Reuse) -> bool:
        """Whether a plan has to wait for the disk; it is read on another thread meanwhile."""
        if not isinstance(reuse, Recall | Restore):
            return False
        cover = reuse.cover if isinstance(reuse, Recall) else Cover()
        return self.tiers.reading(cover, reuse.keep, reuse.checkpoint)

    def begin(self, reuse: Reuse, salt: str = "") -> tuple[Sequence, int]:
        """Carry out a plan. The sequence, now busy, and how many entries of the prompt it holds."""
        target = reuse.slot if isinstance(reuse, Continue) else reuse.target
        if target in self._idle:
            self._idle.remove(target)
        del self._unused[target]
        target.busy = True
        self.tiers.keep(reuse.cover if isinstance(reuse, Recall) else Cover())
        self._give_up(target, reuse.keep if isinstance(reuse, Continue) else 0)
        target.salt = salt
        try:
            self._carry_out(reuse)
            if not self._grid:  # nobody guesses on the grid
                target.rewind()
        except AfterglowError:  # a state that does not load is a miss: begin at the beginning
            target.clear()
        self.tiers.release()
        self._drop_uncovered()
        return target, len(target)

    def _carry_out(self, reuse: Reuse) -> None:
        match reuse:
            case Continue(slot, keep, checkpoint):
                if checkpoint is None:
                    slot.truncate(keep)
                else:
                    self._restore(slot, checkpoint)
            case Fork(source, keep, target, checkpoint):
                self._copy(source, target, keep if checkpoint is None else len(source))
                if checkpoint is not None:
                    self._restore(target, checkpoint)
            case Restore(checkpoint, _, target):
                self._load(target, checkpoint)
            case Recall():
                self._recall(reuse)
            case Fresh(target):
                target.clear()
                self.tiers.count_miss()

    def _load(self, target: Sequence, checkpoint: Checkpoint) -> None:
        started = time.perf_counter()
        target.clear()
        target.load(checkpoint.ids, self.tiers.state(checkpoint), checkpoint.aligned)
        self.tiers.count_hit(checkpoint.depth, checkpoint.nbytes, time.perf_counter() - started, checkpoint)

    def _recall(self, reuse: Recall) -> None:
        """Load stored cells. Where sequences share memory, idle ones may have to make room."""
        target, ids = reuse.target, reuse.cover.ids[: reuse.keep]
        target.clear()
        while True:
            try:
                return self.tiers.load(target, ids, reuse.cover, reuse.checkpoint)
            except MemoryFull:
                target.clear()
                if not self._backend.capabilities.shared or not self.evict():
                    raise

    def _restore(self, slot: Sequence, checkpoint: Checkpoint) -> None:
        slot.restore(checkpoint.depth, self.tiers.state(checkpoint), checkpoint.aligned)

    def _copy(self, source: Sequence, target: Sequence, length: int) -> None:
        started = time.perf_counter()
        nbytes = target.copy_from(source, length)
        self.costs.moved(nbytes, time.perf_counter() - started, len(source))

    def release(self, sequence: Sequence) -> None:
        """The sequence is idle again; what it holds can be found."""
        sequence.busy = False
        sequence.last_used = time.monotonic()
        self._unused[sequence] = None
        if len(sequence):
            self._idle.insert(sequence.ids, sequence, sequence.salt)
            if self.tiers.shelf is not None:
                self._untidy[sequence] = None
        self._drop_uncovered()

    def evict(self) -> bool:
        """Take the idle sequence that can best be spared out of memory; False: there is none."""
        idle = [slot for slot in self._unused if len(slot)][:CANDIDATES]
        if not idle:
            return False
        slot = min(idle, key=self._loss)
        self._idle.remove(slot)
        self._give_up(slot, 0)
        slot.clear()
        self._drop_uncovered()
        return True

    def forget(self, slot: Sequence) -> None:
        """Empty an idle sequence; nothing of it is stored."""
        if slot in self._idle:
            self._idle.remove(slot)
        self.evicted.remember(slot.ids, slot.salt)
        slot.clear()
        self._drop_uncovered()

    def forget_stored(self) -> None:
        """Forget everything outside of memory, but for checkpoints over cells that are in it."""
        self.tiers.clear()
        self._drop_uncovered(complete=True)

    def tidy(self) -> bool:
        """Write one idle sequence towards the disk, so that it outlives a crash; False: there is nothing to do."""
        while self._untidy:
            slot, _ = self._untidy.popitem()
            if not slot.busy and len(slot):
                self._store(slot)
                self._drop_uncovered()
                return True
        return False

    def close(self, *, store: bool = True, seconds: float = CLOSING) -> None:
        """Store what memory holds and is worth it, the newest first, and wait for the disk; for so long at most."""
        deadline = time.monotonic() + seconds
        if self.tiers.shelf is not None and store:
            for slot in sorted(self.slots, key=lambda slot: -slot.last_used):
                if len(slot) and not slot.busy and time.monotonic() < deadline:
                    self._store(slot)
                    self.tiers.shelf.disk.flush(max(0.0, deadline - time.monotonic()))
        self.tiers.close(max(0.0, deadline - time.monotonic()))

    def park(self, sequence: Sequence) -> Saved | None:
        """What the sequence of a job holds, taken out of memory; None where there is no room for it."""
        if not len(sequence) or self.parked_bytes + sequence.nbytes > self._parked_limit:
            return None
        if not self.tiers.make_room(sequence.nbytes):
            return None
        saved = sequence.save()
        self.parked_bytes += saved.nbytes
        return saved

    def unparked(self, saved: Saved) -> None:
        """A parked sequence is needed no more."""
        self.parked_bytes -= saved.nbytes

    def cuts(self, sequence: Sequence, ids: Ids, boundaries: frozenset[int]) -> list[int]:
        """Where the rest of a prompt that this sequence has begun has to stand still for checkpoints."""
        start, salt = len(sequence), sequence.salt
        if not self._backend.capabilities.partial_state:
            return []
        taken = [checkpoint.depth for checkpoint in self.marks.along(ids, salt)]
        ubatch = self._backend.capabilities.ubatch_cells
        after_pictures = (int(place) + 1 for place in (ids < 0).nonzero()[0])
        wanted = boundaries.union(after_pictures, self.tiers.pinning.pins.depths(ids, salt))
        points = cut_points(len(ids), wanted, taken, ubatch, self._settings)
        edges = sorted({edge for point in points if (edge := self.round_down(point, ids)) > start} - set(taken))
        near = [edge for edge in edges if edge <= start + AT_HAND and (ids[start:edge] >= 0).all()]
        if start and near and not self._grid:
            self.take_checkpoint(sequence)  # here, where it stands still already: another stop is another decode
            edges = edges[len(near) :]
        return edges

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Keep the partial state of the sequence as it stands, within the limits."""
        if self.marks.taken(sequence.ids, sequence.salt):
            return
        if self.marks.fits(self._backend.size(sequence.number, "partial") + sequence.ids.nbytes):
            self._note(sequence, self._save_partial(sequence))
        self._drop_uncovered()  # the room that was made may have been their cells

    def _save_partial(self, sequence: Sequence) -> State:
        started = time.perf_counter()
        state = self._backend.save(sequence.number, "partial", keep=True)
        self.costs.moved(state.nbytes, time.perf_counter() - started, 0)
        self._partial_bytes = state.nbytes
        return state

    def _note(self, sequence: Sequence, state: State) -> None:
        """Keep a checkpoint of the sequence as it stands."""
        ids = sequence.ids.copy()
        checkpoint = self.tiers.checkpoint(ids, sequence.salt, state, sequence.aligned)
        if state.nbytes and self.marks.fits(checkpoint.nbytes):
            self.marks.add(checkpoint)
            self.tiers.pinning.note()

    # --- storing what has to go

    def _give_up(self, slot: Sequence, remaining: int) -> None:
        """All but the first `remaining` entries of a sequence are about to go: store them if that is worth it."""
        self._store(slot, remaining)
        if self._recoverable(slot) < len(slot) > remaining:
            self.evicted.remember(slot.ids, slot.salt)

    def _store(self, slot: Sequence, remaining: int = 0) -> None:
        """Keep a copy of a sequence outside of memory, if that is worth it."""
        with contextlib.suppress(AfterglowError):  # what cannot be saved is not stored
            if self._stores and self._worth_storing(slot, remaining):
                if self._backend.capabilities.partial_state:
                    self._store_with_state(slot)
                else:
                    self.tiers.store(slot, None)

    def _store_with_state(self, slot: Sequence) -> None:
        if not self._settings.max_checkpoints:
            return  # nothing of it could be used
        state = self._save_partial(slot)
        if self._backend.capabilities.has_cells and not self.tiers.store(slot, state):
            return
        resumable = not self._grid or slot.aligned == len(slot)
        if resumable and not self.marks.taken(slot.ids, slot.salt):
            self._note(slot, state)
        self.tiers.shelve(self.marks.along(slot.ids, slot.salt))

    def _worth_storing(self, slot: Sequence, remaining: int) -> bool:
        """Whether storing a sequence costs less than computing again what would be lost is expected to."""
        lost = len(slot) - max(self._recoverable(slot), remaining)
        if lost <= 0 or self.tiers.is_pinned(slot.ids, slot.salt, 0):
            return lost > 0
        idle_time = time.monotonic() - slot.last_used
        moving = self._backend.size(slot.number, "full") * self.costs.per_byte
        return loss(lost, idle_time, self.costs, moving) < loss(lost, idle_time, self.costs)

    def _recoverable(self, slot: Sequence) -> int:
        """How many of its first entries could be had again without memory."""
        capabilities = self._backend.capabilities
        covered = self.tiers.cover(slot.ids, slot.salt).length if capabilities.has_cells else len(slot)
        if not capabilities.partial_state:
            return covered
        return next((one.depth for one in self.tiers.along(slot.ids, slot.salt) if one.depth <= covered), 0)

    def explain(self, ids: Ids, reuse: Reuse | None, salt: str = "") -> Explanation:
        """What a plan found in memory and behind it, and why it does not use more of it."""
        best = max(self._sources(ids, salt), key=lambda source: source.shared, default=None)
        shared = best.shared if best else 0
        reused = reuse.keep if reuse else 0
        theirs = None if best is None or shared >= len(best.slot) else int(best.slot.ids[shared])
        cover = self.tiers.cover(ids, salt)
        if cover.length > shared:
            shared, theirs = cover.length, cover.next
        evicted = max((common_prefix(gone, ids) for gone in self.evicted.of(salt)), default=0)
        edge = self.round_down(min(shared, len(ids) - 1), ids) if self._grid else None
        window = self._backend.capabilities.memory == "window"
        return Explanation(
            prompt=len(ids),
            reused=reused,
            shared=shared,
            ours=int(ids[shared]) if shared < len(ids) else None,
            theirs=theirs,
            cause=cause_of(shared=shared, reused=reused, length=len(ids), evicted=evicted, edge=edge, window=window),
            evicted=evicted,
        )

    def _sources(self, ids: Ids, salt: str) -> Iterator[Source]:
        now = time.monotonic()
        found = self._idle.nearest(self._idle.match(ids, salt), CANDIDATES)
        found += [(slot, common_prefix(slot.ids, ids)) for slot in self.slots if slot.busy and slot.salt == salt]
        for slot, shared in found:
            usable = min(shared, slot.aligned) if self._grid else shared
            if usable and not slot.ahead:  # nobody copies half a picture
                yield Source(slot, usable, 0.0 if slot.busy else now - slot.last_used)

    def _spare(self) -> tuple[Sequence | None, float]:
        empty = next((slot for slot in self._unused if not len(slot)), None)
        if empty is not None:
            return empty, 0.0
        if not self._unused:
            return None, 0.0
        slot = min(itertools.islice(self._unused, CANDIDATES), key=self._loss)
        return slot, self._loss(slot)

    def _loss(self, slot: Sequence) -> float:
        """What it is expected to cost to lose this sequence: nothing where others hold the same."""
        idle_time = time.monotonic() - slot.last_used
        return loss(self._idle.unique(slot), idle_time, self.costs, self._storing(len(slot)) if self._stores else None)

    def _drop_uncovered(self, *, complete: bool = False) -> None:
        """Let go of checkpoints whose cells are gone: nothing can be made of them any more. With `complete`, also
        of those that need no cells."""
        losses = sum([slot.losses for slot in self.slots]) + self.tiers.tree.losses
        if complete or (losses != self._losses and self._backend.capabilities.checkpoints_need_cells):
            for checkpoint in self.checkpoints[:]:
                if not self._covered(checkpoint):
                    self.marks.drop(checkpoint)
        self._losses = losses

    def _covered(self, checkpoint: Checkpoint) -> bool:
        """Whether all cells before a checkpoint are in memory, or stored."""
        ids, salt = checkpoint.ids, checkpoint.salt
        if self._idle.match(ids, salt).length == checkpoint.depth:
            return True
        busy = [slot for slot in self.slots if slot.busy and slot.salt == salt]
        if any(common_prefix(slot.ids, ids) == checkpoint.depth for slot in busy):
            return True
        return self.tiers.covers(checkpoint)
