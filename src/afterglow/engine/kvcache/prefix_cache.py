"""The prefix memory: which sequences and checkpoints there are, and how a prompt begins from them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from afterglow.engine.kvcache.blocks import StoredPrefix
from afterglow.engine.kvcache.checkpoint_store import CheckpointStore
from afterglow.engine.kvcache.checkpoints import Checkpoint, choose_checkpoint_positions
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.explain import EvictionHistory, Explanation, find_miss_cause
from afterglow.engine.kvcache.planner import (
    Continue,
    Fork,
    Fresh,
    LoadStored,
    PlanInputs,
    PrefixPlan,
    Restore,
    ReuseCandidate,
    estimate_eviction_cost,
    plan_prefix,
)
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.kvcache.sequence import SavedSequence, Sequence
from afterglow.engine.kvcache.store import TieredStore
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length, round_down_to_grid
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, KVCacheFull

MAX_SKIPPED_STOP_ENTRIES = (
    24  # entries that are sooner computed again, once in a while, than every prompt pays a decode for a stop
)
MAX_CANDIDATE_SEQUENCES = 16  # sequences that a plan looks at: those that share most, and those that were idle longest
CLOSE_TIMEOUT_SECONDS = 3.0  # seconds that an end waits for what is worth keeping


class PrefixCache:
    """Owns the slots of the backend's memory, the tree over them, the checkpoints, and the tiers behind memory."""

    def __init__(self, backend: Backend, interner: EntryInterner, settings: EngineSettings, grid: int = 0) -> None:
        self.cost_model = CostModel()
        self._backend = backend
        self._checkpoint_settings = settings.checkpoints
        self._swap_limit_bytes = settings.swap_bytes
        self.swapped_bytes = 0
        self._partial_state_bytes = 0  # of the last partial state
        self._grid = grid  # 0: any length can be reused
        self._idle_tree: RadixTree[Sequence] = RadixTree()  # by what they hold
        self.checkpoints = CheckpointStore(
            settings.checkpoints, self.cost_model, lambda nbytes: self.store.evict_until_free(nbytes)
        )
        self.slots = [Sequence(number, backend, interner) for number in range(backend.capabilities.sequences)]
        self._idle_slots = dict.fromkeys(self.slots)  # idle sequences, the longest idle first
        self._unwritten_slots: dict[Sequence, None] = {}  # idle sequences that are not on disk yet, the newest last
        self._last_loss_count = 0  # of sequences and stored segments, when checkpoints were last looked through
        self.eviction_history = EvictionHistory()
        self.store = TieredStore(
            backend,
            interner,
            self.cost_model,
            settings,
            grid=grid,
            checkpoints=self.checkpoints,
            swapped_bytes=lambda: self.swapped_bytes,
        )

    @property
    def all_checkpoints(self) -> list[Checkpoint]:
        return self.checkpoints.all_checkpoints

    def plan(
        self, entries: Entries, *, use_prefix_cache: bool = True, slot: int | None = None, salt: str = ""
    ) -> PrefixPlan | None:
        """How to begin a prompt; None: every slot that it could use is busy."""
        wanted = None if slot is None else self.slots[slot]
        if wanted is not None and wanted.busy:
            return None
        target, target_loss = self._choose_target() if wanted is None else (wanted, 0.0)
        capabilities = self._backend.capabilities
        checkpoints = self.store.find_checkpoints(entries, salt) if use_prefix_cache else []
        sources = list(self._find_candidates(entries, salt)) if use_prefix_cache else []
        if wanted is not None:  # only this slot may be used up; the others may be copied
            sources = [source for source in sources if source.slot is wanted or source.slot.busy]
        return plan_prefix(
            PlanInputs(
                prompt_length=len(entries),
                candidates=sources,
                checkpoints=checkpoints,
                target=target,
                target_eviction_cost=target_loss,
                can_resume_at=lambda one, length: one.can_resume_at(length),
                can_fork_anywhere=capabilities.can_fork_anywhere,
                checkpoints_need_cells=capabilities.checkpoints_need_cells,
                has_copy_cost=not capabilities.kv_unified,
                cost_model=self.cost_model,
                round_down=lambda length: self.round_down(length, entries),
                stored_prefix=self.store.find_stored_prefix(entries, salt)
                if use_prefix_cache and target is not None
                else StoredPrefix(),
                estimate_load_seconds=self.store.estimate_load_seconds,
                estimate_checkpoint_seconds=self.store.estimate_checkpoint_seconds,
                cells_suffice=not capabilities.has_partial_state,
                estimate_store_seconds=self._estimate_store_seconds if self._can_store else None,
            )
        )

    @property
    def _can_store(self) -> bool:
        return self.store.ram.limit > 0

    def _estimate_store_seconds(self, length: int) -> float:
        """Expected seconds to store, or to load, a sequence of so many entries."""
        cells = (
            length * self.cost_model.bytes_per_entry
            if self._backend.capabilities.has_attention_cells
            else self._partial_state_bytes
        )
        return cells * self.cost_model.seconds_per_byte

    def round_down(self, length: int, entries: Entries) -> int:
        """The longest prefix of `length` of these entries that may be reused: any, or whole chunks of the grid."""
        return round_down_to_grid(length, entries, self._grid) if self._grid else length

    def prefetch(self, plan: PrefixPlan) -> bool:
        """Whether a plan has to wait for the disk; it is read on another thread meanwhile."""
        if not isinstance(plan, LoadStored | Restore):
            return False
        cover = plan.stored_prefix if isinstance(plan, LoadStored) else StoredPrefix()
        return self.store.prefetch(cover, plan.reuse_length, plan.checkpoint)

    def acquire(self, plan: PrefixPlan, salt: str = "") -> tuple[Sequence, int]:
        """Carry out a plan. The sequence, now busy, and how many entries of the prompt it holds."""
        target = plan.slot if isinstance(plan, Continue) else plan.target
        if target in self._idle_tree:
            self._idle_tree.remove(target)
        del self._idle_slots[target]
        target.busy = True
        self.store.protect(plan.stored_prefix if isinstance(plan, LoadStored) else StoredPrefix())
        self._prepare_eviction(target, plan.reuse_length if isinstance(plan, Continue) else 0)
        target.salt = salt
        try:
            self._apply_plan(plan)
            if not self._grid:  # nobody guesses on the grid
                target.rewind_for_drafter()
        except AfterglowError:  # a state that does not load is a miss: begin at the beginning
            target.clear()
        self.store.unprotect()
        self._drop_orphaned_checkpoints()
        return target, len(target)

    def _apply_plan(self, plan: PrefixPlan) -> None:
        match plan:
            case Continue(slot, keep, checkpoint):
                if checkpoint is None:
                    slot.truncate(keep)
                else:
                    self._restore_checkpoint(slot, checkpoint)
            case Fork(source, keep, target, checkpoint):
                self._copy_prefix(source, target, keep if checkpoint is None else len(source))
                if checkpoint is not None:
                    self._restore_checkpoint(target, checkpoint)
            case Restore(checkpoint, _, target):
                self._load_checkpoint(target, checkpoint)
            case LoadStored():
                self._load_stored(plan)
            case Fresh(target):
                target.clear()
                self.store.count_miss()

    def _load_checkpoint(self, target: Sequence, checkpoint: Checkpoint) -> None:
        started = time.perf_counter()
        target.clear()
        target.load(checkpoint.entries, self.store.load_checkpoint_state(checkpoint), checkpoint.aligned)
        self.store.count_hit(checkpoint.position, checkpoint.nbytes, time.perf_counter() - started, checkpoint)

    def _load_stored(self, plan: LoadStored) -> None:
        """Load stored cells. Where sequences share memory, idle ones may have to make room."""
        target, ids = plan.target, plan.stored_prefix.entries[: plan.reuse_length]
        target.clear()
        while True:
            try:
                return self.store.load(target, ids, plan.stored_prefix, plan.checkpoint)
            except KVCacheFull:
                target.clear()
                if not self._backend.capabilities.kv_unified or not self.evict():
                    raise

    def _restore_checkpoint(self, slot: Sequence, checkpoint: Checkpoint) -> None:
        slot.restore(checkpoint.position, self.store.load_checkpoint_state(checkpoint), checkpoint.aligned)

    def _copy_prefix(self, source: Sequence, target: Sequence, length: int) -> None:
        started = time.perf_counter()
        nbytes = target.copy_from(source, length)
        self.cost_model.record_transfer(nbytes, time.perf_counter() - started, len(source))

    def release(self, sequence: Sequence) -> None:
        """The sequence is idle again; what it holds can be found."""
        sequence.busy = False
        sequence.last_used = time.monotonic()
        self._idle_slots[sequence] = None
        if len(sequence):
            self._idle_tree.insert(sequence.entries, sequence, sequence.salt)
            if self.store.disk_tier is not None:
                self._unwritten_slots[sequence] = None
        self._drop_orphaned_checkpoints()

    def evict(self) -> bool:
        """Take the idle sequence that can best be spared out of memory; False: there is none."""
        idle = [slot for slot in self._idle_slots if len(slot)][:MAX_CANDIDATE_SEQUENCES]
        if not idle:
            return False
        slot = min(idle, key=self._estimate_eviction_cost)
        self._idle_tree.remove(slot)
        self._prepare_eviction(slot, 0)
        slot.clear()
        self._drop_orphaned_checkpoints()
        return True

    def discard(self, slot: Sequence) -> None:
        """Empty an idle sequence; nothing of it is stored."""
        if slot in self._idle_tree:
            self._idle_tree.remove(slot)
        self.eviction_history.add(slot.entries, slot.salt)
        slot.clear()
        self._drop_orphaned_checkpoints()

    def clear_store(self) -> None:
        """Forget everything outside of memory, but for checkpoints over cells that are in it."""
        self.store.clear()
        self._drop_orphaned_checkpoints(include_standalone=True)

    def write_back(self) -> bool:
        """Write one idle sequence towards the disk, so that it outlives a crash; False: there is nothing to do."""
        while self._unwritten_slots:
            slot, _ = self._unwritten_slots.popitem()
            if not slot.busy and len(slot):
                self._store_if_valuable(slot)
                self._drop_orphaned_checkpoints()
                return True
        return False

    def close(self, *, store_idle: bool = True, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Store what memory holds and is worth it, the newest first, and wait for the disk; for so long at most."""
        deadline = time.monotonic() + timeout
        if self.store.disk_tier is not None and store_idle:
            for slot in sorted(self.slots, key=lambda slot: -slot.last_used):
                if len(slot) and not slot.busy and time.monotonic() < deadline:
                    self._store_if_valuable(slot)
                    self.store.disk_tier.writer.flush(max(0.0, deadline - time.monotonic()))
        self.store.close(max(0.0, deadline - time.monotonic()))

    def swap_out(self, sequence: Sequence) -> SavedSequence | None:
        """What the sequence of a job holds, taken out of memory; None where there is no room for it."""
        if not len(sequence) or self.swapped_bytes + sequence.nbytes > self._swap_limit_bytes:
            return None
        if not self.store.evict_until_free(sequence.nbytes):
            return None
        saved = sequence.save()
        self.swapped_bytes += saved.nbytes
        return saved

    def release_swapped(self, saved: SavedSequence) -> None:
        """A parked sequence is needed no more."""
        self.swapped_bytes -= saved.nbytes

    def checkpoint_positions(self, sequence: Sequence, entries: Entries, boundaries: frozenset[int]) -> list[int]:
        """Where the rest of a prompt that this sequence has begun has to stand still for checkpoints."""
        start, salt = len(sequence), sequence.salt
        if not self._backend.capabilities.has_partial_state:
            return []
        taken = [checkpoint.position for checkpoint in self.checkpoints.find_on_path(entries, salt)]
        ubatch = self._backend.capabilities.ubatch_cells
        after_pictures = (int(place) + 1 for place in (entries < 0).nonzero()[0])
        wanted = boundaries.union(after_pictures, self.store.pin_manager.pins.find_positions(entries, salt))
        points = choose_checkpoint_positions(len(entries), wanted, taken, ubatch, self._checkpoint_settings)
        edges = sorted({edge for point in points if (edge := self.round_down(point, entries)) > start} - set(taken))
        near = [edge for edge in edges if edge <= start + MAX_SKIPPED_STOP_ENTRIES and (entries[start:edge] >= 0).all()]
        if start and near and not self._grid:
            self.take_checkpoint(sequence)  # here, where it stands still already: another stop is another decode
            edges = edges[len(near) :]
        return edges

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Keep the partial state of the sequence as it stands, within the limits."""
        if self.checkpoints.has_checkpoint_at(sequence.entries, sequence.salt):
            return
        if self.checkpoints.evict_until_fits(
            self._backend.get_state_size(sequence.seq_id, "partial") + sequence.entries.nbytes
        ):
            self._add_checkpoint(sequence, self._save_partial_state(sequence))
        self._drop_orphaned_checkpoints()  # the room that was made may have been their cells

    def _save_partial_state(self, sequence: Sequence) -> BackendState:
        started = time.perf_counter()
        state = self._backend.save(sequence.seq_id, "partial", long_lived=True)
        self.cost_model.record_transfer(state.nbytes, time.perf_counter() - started, 0)
        self._partial_state_bytes = state.nbytes
        return state

    def _add_checkpoint(self, sequence: Sequence, state: BackendState) -> None:
        """Keep a checkpoint of the sequence as it stands."""
        ids = sequence.entries.copy()
        checkpoint = self.store.build_checkpoint(ids, sequence.salt, state, sequence.aligned)
        if state.nbytes and self.checkpoints.evict_until_fits(checkpoint.nbytes):
            self.checkpoints.add(checkpoint)
            self.store.pin_manager.on_checkpoint_added()

    # --- storing what has to go

    def _prepare_eviction(self, slot: Sequence, remaining: int) -> None:
        """All but the first `remaining` entries of a sequence are about to go: store them if that is worth it."""
        self._store_if_valuable(slot, remaining)
        if self._count_recoverable(slot) < len(slot) > remaining:
            self.eviction_history.add(slot.entries, slot.salt)

    def _store_if_valuable(self, slot: Sequence, remaining: int = 0) -> None:
        """Keep a copy of a sequence outside of memory, if that is worth it."""
        with contextlib.suppress(AfterglowError):  # what cannot be saved is not stored
            if self._can_store and self._is_worth_storing(slot, remaining):
                if self._backend.capabilities.has_partial_state:
                    self._store_with_checkpoint(slot)
                else:
                    self.store.store_sequence(slot, None)

    def _store_with_checkpoint(self, slot: Sequence) -> None:
        if not self._checkpoint_settings.max_checkpoints:
            return  # nothing of it could be used
        state = self._save_partial_state(slot)
        if self._backend.capabilities.has_attention_cells and not self.store.store_sequence(slot, state):
            return
        resumable = not self._grid or slot.aligned == len(slot)
        if resumable and not self.checkpoints.has_checkpoint_at(slot.entries, slot.salt):
            self._add_checkpoint(slot, state)
        self.store.write_checkpoints(self.checkpoints.find_on_path(slot.entries, slot.salt))

    def _is_worth_storing(self, slot: Sequence, remaining: int) -> bool:
        """Whether storing a sequence costs less than computing again what would be lost is expected to."""
        lost = len(slot) - max(self._count_recoverable(slot), remaining)
        if lost <= 0 or self.store.is_pinned(slot.entries, slot.salt, 0):
            return lost > 0
        idle_time = time.monotonic() - slot.last_used
        moving = self._backend.get_state_size(slot.seq_id, "full") * self.cost_model.seconds_per_byte
        return estimate_eviction_cost(lost, idle_time, self.cost_model, moving) < estimate_eviction_cost(
            lost, idle_time, self.cost_model
        )

    def _count_recoverable(self, slot: Sequence) -> int:
        """How many of its first entries could be had again without memory."""
        capabilities = self._backend.capabilities
        covered = (
            self.store.find_stored_prefix(slot.entries, slot.salt).length
            if capabilities.has_attention_cells
            else len(slot)
        )
        if not capabilities.has_partial_state:
            return covered
        return next(
            (one.position for one in self.store.find_checkpoints(slot.entries, slot.salt) if one.position <= covered), 0
        )

    def explain(self, entries: Entries, plan: PrefixPlan | None, salt: str = "") -> Explanation:
        """What a plan found in memory and behind it, and why it does not use more of it."""
        best = max(self._find_candidates(entries, salt), key=lambda source: source.shared_entries, default=None)
        shared = best.shared_entries if best else 0
        reused = plan.reuse_length if plan else 0
        theirs = None if best is None or shared >= len(best.slot) else int(best.slot.entries[shared])
        cover = self.store.find_stored_prefix(entries, salt)
        if cover.length > shared:
            shared, theirs = cover.length, cover.next_entry
        evicted = max(
            (common_prefix_length(gone, entries) for gone in self.eviction_history.find_by_salt(salt)), default=0
        )
        edge = self.round_down(min(shared, len(entries) - 1), entries) if self._grid else None
        window = self._backend.capabilities.memory_kind == "window"
        return Explanation(
            prompt_entries=len(entries),
            reused_entries=reused,
            shared_entries=shared,
            next_prompt_entry=int(entries[shared]) if shared < len(entries) else None,
            next_cached_entry=theirs,
            cause=find_miss_cause(
                shared=shared,
                reused=reused,
                length=len(entries),
                evicted=evicted,
                grid_position=edge,
                is_windowed=window,
            ),
            evicted_entries=evicted,
        )

    def _find_candidates(self, entries: Entries, salt: str) -> Iterator[ReuseCandidate]:
        now = time.monotonic()
        found = self._idle_tree.find_nearest(self._idle_tree.match(entries, salt), MAX_CANDIDATE_SEQUENCES)
        found += [
            (slot, common_prefix_length(slot.entries, entries))
            for slot in self.slots
            if slot.busy and slot.salt == salt
        ]
        for slot, shared in found:
            usable = min(shared, slot.aligned) if self._grid else shared
            if usable and not slot.partial_media_rows:  # nobody copies half a picture
                yield ReuseCandidate(slot, usable, 0.0 if slot.busy else now - slot.last_used)

    def _choose_target(self) -> tuple[Sequence | None, float]:
        empty = next((slot for slot in self._idle_slots if not len(slot)), None)
        if empty is not None:
            return empty, 0.0
        if not self._idle_slots:
            return None, 0.0
        slot = min(itertools.islice(self._idle_slots, MAX_CANDIDATE_SEQUENCES), key=self._estimate_eviction_cost)
        return slot, self._estimate_eviction_cost(slot)

    def _estimate_eviction_cost(self, slot: Sequence) -> float:
        """What it is expected to cost to lose this sequence: nothing where others hold the same."""
        idle_time = time.monotonic() - slot.last_used
        return estimate_eviction_cost(
            self._idle_tree.count_unique_entries(slot),
            idle_time,
            self.cost_model,
            self._estimate_store_seconds(len(slot)) if self._can_store else None,
        )

    def _drop_orphaned_checkpoints(self, *, include_standalone: bool = False) -> None:
        """Let go of checkpoints whose cells are gone: nothing can be made of them any more. With `complete`, also
        of those that need no cells."""
        losses = sum([slot.loss_count for slot in self.slots]) + self.store.tree.loss_count
        if include_standalone or (
            losses != self._last_loss_count and self._backend.capabilities.checkpoints_need_cells
        ):
            for checkpoint in self.all_checkpoints[:]:
                if not self._has_cells_for(checkpoint):
                    self.checkpoints.drop(checkpoint)
        self._last_loss_count = losses

    def _has_cells_for(self, checkpoint: Checkpoint) -> bool:
        """Whether all cells before a checkpoint are in memory, or stored."""
        ids, salt = checkpoint.entries, checkpoint.salt
        if self._idle_tree.match(ids, salt).length == checkpoint.position:
            return True
        busy = [slot for slot in self.slots if slot.busy and slot.salt == salt]
        if any(common_prefix_length(slot.entries, ids) == checkpoint.position for slot in busy):
            return True
        return self.store.has_cells_for(checkpoint)
