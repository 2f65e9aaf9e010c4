"""The prefix memory: which sequences and checkpoints there are, and how a prompt begins from them."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.engine.backend import Backend
from afterglow.engine.checkpoint import Checkpoint, CheckpointSettings, cut_points, thinned
from afterglow.engine.costs import Costs
from afterglow.engine.entries import Ids, Ledger, common_prefix
from afterglow.engine.prefix import PrefixTree
from afterglow.engine.reuse import Continue, Fork, Fresh, Restore, Reuse, Situation, Source, loss, plan
from afterglow.engine.sequence import Sequence
from afterglow.errors import AfterglowError

CANDIDATES = 16  # sequences that a plan looks at: those that share most, and those that were idle longest
REMEMBERED = 64  # evicted sequences whose entries are kept, so that `explain` can tell what is missing
Cause: TypeAlias = Literal["nothing in common", "all of it", "no checkpoint", "window passed", "on the grid", "evicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt was, or would be, computed as far as it was."""

    prompt: int
    reused: int  # entries that need not be computed
    shared: int  # entries that the best match in memory has in common with the prompt
    ours: int | None  # the first differing entry of the prompt
    theirs: int | None  # and of what is in memory
    cause: Cause  # why not more of what is shared, or was, is reused
    evicted: int = 0  # entries of the prompt that memory held once

    @property
    def computed(self) -> int:
        """Entries that have to be computed."""
        return self.prompt - self.reused

    @property
    def lost(self) -> int:
        """Entries that have to be computed again for that cause."""
        return max(0, min(max(self.shared, self.evicted), self.prompt - 1) - self.reused)


class PrefixMemory:
    """Owns the slots of the backend's memory, the tree over them, and the checkpoints."""

    def __init__(self, backend: Backend, ledger: Ledger, settings: CheckpointSettings, grid: int = 0) -> None:
        self.costs = Costs()
        self.checkpoints: list[Checkpoint] = []
        self._backend = backend
        self._settings = settings
        self._grid = grid  # 0: any length can be reused
        self._idle: PrefixTree[Sequence] = PrefixTree()  # by what they hold
        self._marks: PrefixTree[Checkpoint] = PrefixTree()
        self.slots = [Sequence(number, backend, ledger) for number in range(backend.capabilities.sequences)]
        self._unused = dict.fromkeys(self.slots)  # idle sequences, the longest idle first
        self._evicted: deque[Ids] = deque(maxlen=REMEMBERED)

    @property
    def checkpoint_bytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints)

    def plan(self, ids: Ids, *, reuse: bool = True, slot: int | None = None) -> Reuse | None:
        """How to begin a prompt; None: every slot that it could use is busy."""
        wanted = None if slot is None else self.slots[slot]
        if wanted is not None and wanted.busy:
            return None
        target, target_loss = self._spare() if wanted is None else (wanted, 0.0)
        capabilities = self._backend.capabilities
        checkpoints = list(self._marks.along(self._marks.match(ids)))
        sources = list(self._sources(ids)) if reuse else []
        if wanted is not None:  # only this slot may be used up; the others may be copied
            sources = [source for source in sources if source.slot is wanted or source.slot.busy]
        return plan(
            Situation(
                length=len(ids),
                sources=sources,
                checkpoints=checkpoints if reuse else [],
                target=target,
                target_loss=target_loss,
                resumable=lambda one, length: one.resumable(length),
                forks_anywhere=capabilities.forks_anywhere,
                needs_cells=capabilities.checkpoints_need_cells,
                copies_cost=not capabilities.shared,
                costs=self.costs,
                round_down=self.round_down,
            )
        )

    def round_down(self, length: int) -> int:
        """The longest prefix of `length` entries that may be reused: any, or whole chunks of the grid."""
        return length - length % self._grid if self._grid else length

    def begin(self, reuse: Reuse) -> tuple[Sequence, int]:
        """Carry out a plan. The sequence, now busy, and how many entries of the prompt it holds."""
        target = reuse.slot if isinstance(reuse, Continue) else reuse.target
        if target in self._idle:
            self._idle.remove(target)
        if not isinstance(reuse, Continue):
            self._remember(target)
        del self._unused[target]
        target.busy = True
        try:
            self._carry_out(reuse)
        except AfterglowError:  # a state that does not load is a miss: begin at the beginning
            target.clear()
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
                target.clear()
                target.load(checkpoint.ids, checkpoint.state, checkpoint.aligned)
                checkpoint.last_used = time.monotonic()
            case Fresh(target):
                target.clear()

    def _restore(self, slot: Sequence, checkpoint: Checkpoint) -> None:
        slot.restore(checkpoint.depth, checkpoint.state, checkpoint.aligned)
        checkpoint.last_used = time.monotonic()

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
            self._idle.insert(sequence.ids, sequence)
        self._drop_uncovered()

    def evict(self) -> bool:
        """Empty the idle sequence that can best be spared; False: there is none."""
        idle = [slot for slot in self._unused if len(slot)][:CANDIDATES]
        if not idle:
            return False
        self.forget(min(idle, key=self._loss))
        return True

    def forget(self, slot: Sequence) -> None:
        """Empty an idle sequence."""
        if slot in self._idle:
            self._idle.remove(slot)
        self._remember(slot)
        slot.clear()
        self._drop_uncovered()

    def cuts(self, ids: Ids, boundaries: frozenset[int], start: int) -> list[int]:
        """Where the prefill of this prompt from `start` on has to stand still for checkpoints."""
        if not self._backend.capabilities.partial_state:
            return []
        taken = [checkpoint.depth for checkpoint in self._marks.along(self._marks.match(ids))]
        ubatch = self._backend.capabilities.ubatch_cells
        points = cut_points(len(ids), boundaries, taken, ubatch, self._settings)
        return sorted({self.round_down(point) for point in points if self.round_down(point) > start} - set(taken))

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Keep the partial state of the sequence as it stands, within the limits."""
        if any(known.depth == len(sequence) for known in self._marks.along(self._marks.match(sequence.ids))):
            return
        started = time.perf_counter()
        state = self._backend.save(sequence.number, "partial")
        self.costs.moved(state.nbytes, time.perf_counter() - started, 0)
        checkpoint = Checkpoint(ids=sequence.ids.copy(), state=state, aligned=sequence.aligned)
        if not state.nbytes or checkpoint.nbytes > self._settings.max_bytes:
            return
        while self.checkpoint_bytes + checkpoint.nbytes > self._settings.max_bytes:
            self._drop(min(self.checkpoints, key=lambda one: one.last_used))
        self.checkpoints.append(checkpoint)
        self._marks.insert(checkpoint.ids, checkpoint)
        self._thin(checkpoint)

    def explain(self, ids: Ids, reuse: Reuse | None) -> Explanation:
        """What a plan found in memory, and why it does not use more of it."""
        best = max(self._sources(ids), key=lambda source: source.shared, default=None)
        shared = best.shared if best else 0
        reused = reuse.keep if reuse else 0
        theirs = None if best is None or shared >= len(best.slot) else int(best.slot.ids[shared])
        evicted = max((common_prefix(gone, ids) for gone in self._evicted), default=0)
        return Explanation(
            prompt=len(ids),
            reused=reused,
            shared=shared,
            ours=int(ids[shared]) if shared < len(ids) else None,
            theirs=theirs,
            cause=self._cause(shared, reused, len(ids), evicted),
            evicted=evicted,
        )

    def _remember(self, slot: Sequence) -> None:
        if len(slot):
            self._evicted.append(slot.ids.copy())

    def _cause(self, shared: int, reused: int, length: int, evicted: int) -> Cause:
        usable = min(shared, length - 1)
        if min(evicted, length - 1) > max(usable, reused):
            return "evicted"
        if not shared:
            return "nothing in common"
        if reused >= usable:
            return "all of it"
        if self._grid and reused == self.round_down(usable):
            return "on the grid"
        return "window passed" if self._backend.capabilities.memory == "window" else "no checkpoint"

    def _sources(self, ids: Ids) -> Iterator[Source]:
        now = time.monotonic()
        found = self._idle.nearest(self._idle.match(ids), CANDIDATES)
        found += [(slot, common_prefix(slot.ids, ids)) for slot in self.slots if slot.busy]
        for slot, shared in found:
            usable = min(shared, slot.aligned) if self._grid else shared
            if usable:
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
        return loss(self._idle.unique(slot), time.monotonic() - slot.last_used, self.costs)

    def _thin(self, newest: Checkpoint) -> None:
        """Let go of what is too much along every path that runs through the newest checkpoint."""
        for end in self._marks.below(newest):
            if end not in self._marks:
                continue  # gone with another path
            by_depth = {checkpoint.depth: checkpoint for checkpoint in self._marks.above(end)}
            for depth in thinned(sorted(by_depth), self._settings.max_checkpoints):
                self._drop(by_depth[depth])

    def _drop_uncovered(self) -> None:
        """Let go of checkpoints whose cells are gone: nothing can be made of them any more."""
        if not self._backend.capabilities.checkpoints_need_cells:
            return
        busy = [slot for slot in self.slots if slot.busy]
        for checkpoint in self.checkpoints[:]:
            idle = self._idle.match(checkpoint.ids).length == checkpoint.depth
            if not idle and not any(common_prefix(slot.ids, checkpoint.ids) == checkpoint.depth for slot in busy):
                self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.remove(checkpoint)
        self._marks.remove(checkpoint)
