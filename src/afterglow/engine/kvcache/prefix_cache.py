"""Prefix cache: owns the sequences, checkpoints and tiers, and starts prompts from the longest reusable prefix."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from afterglow.engine.kvcache.blocks import StoredPrefix
from afterglow.engine.kvcache.checkpoints import Checkpoint, choose_checkpoint_positions
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import estimate_eviction_cost
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
    plan_prefix,
)
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.kvcache.sequence import SavedSequence, Sequence
from afterglow.engine.kvcache.store import TieredStore
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length, round_down_to_grid
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, KVCacheFull

# Recomputing this many entries once in a while is cheaper than an additional decode, for a checkpoint, in every prompt.
MAX_SKIPPED_STOP_ENTRIES = 24
MAX_CANDIDATE_SEQUENCES = 16  # sequences that a plan considers: those that share most, and the longest idle ones
CLOSE_TIMEOUT_SECONDS = 3.0  # for storing idle sequences on disk


class PrefixCache:
    """Owns the sequences of the backend's KV cache, the tree over them, the checkpoints, and the RAM and disk tiers.

    A request calls `plan`, `acquire`, then `take_checkpoint` at its checkpoint positions during prefill, and `release`.
    """

    def __init__(self, backend: Backend, interner: EntryInterner, settings: EngineSettings, grid: int = 0) -> None:
        self.cost_model = CostModel()
        self._backend = backend
        self._checkpoint_settings = settings.checkpoints
        self._swap_limit_bytes = settings.swap_bytes
        self._partial_state_bytes = 0  # size of the last saved partial state
        self.grid = grid  # entries per chunk in deterministic mode; 0: any length can be reused
        self._idle_tree: RadixTree[Sequence] = RadixTree()  # idle sequences by their entries
        self.slots = [Sequence(number, backend, interner) for number in range(backend.capabilities.sequences)]
        self._idle_slots = dict.fromkeys(self.slots)  # the longest idle first
        self._unwritten_slots: dict[Sequence, None] = {}  # idle and not on disk yet, the newest last
        self._last_loss_count = 0  # of sequences and blocks, at the last search for orphaned checkpoints
        self.eviction_history = EvictionHistory()
        self._adapter_key = backend.adapter_key
        self.store = TieredStore(backend, interner, self.cost_model, settings, grid=grid)
        self.checkpoints = self.store.checkpoints

    @property
    def all_checkpoints(self) -> list[Checkpoint]:
        return self.checkpoints.all_checkpoints

    def build_namespace(self, salt: str) -> str:
        """Return the salt together with the adapters that are applied now.

        The stores and trees find only what has the same one: state of other tenants or other weights is never reused.
        """
        return f"{salt}\0{self._backend.adapter_key}" if self._backend.adapter_key else salt

    def notice_adapters(self) -> None:
        """Notice whether the adapters have changed. Busy sequences are then computed with both sets, and not reused."""
        if self._adapter_key != self._backend.adapter_key:
            self._adapter_key = self._backend.adapter_key
            for slot in self.slots:
                slot.mixes_adapters = slot.busy and len(slot) > 0
                if slot.busy and not len(slot):  # nothing is computed yet
                    slot.namespace = self.build_namespace(slot.salt)

    def is_current(self, slot: Sequence) -> bool:
        """Return whether a sequence was computed with the adapters that are applied now. Only then it can be saved."""
        return slot.namespace == self.build_namespace(slot.salt) and not slot.mixes_adapters

    def plan(
        self, entries: Entries, *, use_prefix_cache: bool = True, slot: int | None = None, salt: str = ""
    ) -> PrefixPlan | None:
        """Return the plan for a prompt; None if every slot that it could use is busy."""
        namespace = self.build_namespace(salt)
        requested = None if slot is None else self.slots[slot]
        if requested is not None and requested.busy:
            return None
        target, target_eviction_cost = self._choose_target() if requested is None else (requested, 0.0)
        capabilities = self._backend.capabilities
        checkpoints = self.store.find_checkpoints(entries, namespace) if use_prefix_cache else []
        candidates = list(self._find_candidates(entries, namespace)) if use_prefix_cache else []
        if requested is not None:  # only this slot may be modified; busy ones may be copied
            candidates = [candidate for candidate in candidates if candidate.slot is requested or candidate.slot.busy]
        use_store = use_prefix_cache and target is not None
        return plan_prefix(
            PlanInputs(
                prompt=entries,
                candidates=candidates,
                checkpoints=checkpoints,
                target=target,
                target_eviction_cost=target_eviction_cost,
                can_fork_anywhere=capabilities.can_fork_anywhere,
                checkpoints_need_cells=capabilities.checkpoints_need_cells,
                has_copy_cost=not capabilities.kv_unified,
                cost_model=self.cost_model,
                grid=self.grid,
                stored_prefix=self.store.find_stored_prefix(entries, namespace) if use_store else StoredPrefix(),
                estimate_load_seconds=self.store.estimate_load_seconds,
                estimate_checkpoint_seconds=self.store.estimate_checkpoint_seconds,
                cells_suffice=not capabilities.has_partial_state,
                estimate_store_seconds=self._estimate_store_seconds if self._can_store else None,
            )
        )

    @property
    def _can_store(self) -> bool:
        return self.store.ram.budget.limit > 0

    def _estimate_store_seconds(self, length: int) -> float:
        """Return the expected seconds to store, or to load, a sequence of `length` entries."""
        nbytes = (
            length * self.cost_model.bytes_per_entry
            if self._backend.capabilities.has_attention_cells
            else self._partial_state_bytes
        )
        return nbytes * self.cost_model.seconds_per_byte

    def prefetch(self, plan: PrefixPlan) -> bool:
        """Start reading what a plan needs from disk, on another thread; return whether the plan has to wait for it."""
        if not isinstance(plan, LoadStored | Restore):
            return False
        stored_prefix = plan.stored_prefix if isinstance(plan, LoadStored) else StoredPrefix()
        is_waiting = self.store.prefetch(stored_prefix, plan.reuse_length, plan.checkpoint)
        self._drop_orphaned_checkpoints()  # evicting may have removed their cells
        return is_waiting

    def acquire(self, plan: PrefixPlan, salt: str = "") -> tuple[Sequence, int]:
        """Apply a plan; return its sequence, now busy, and the number of prompt entries that it holds."""
        self.store.pin_manager.expire()
        target = plan.slot if isinstance(plan, Continue) else plan.target
        if target in self._idle_tree:
            self._idle_tree.remove(target)
        del self._idle_slots[target]
        target.busy = True
        self.store.protect(plan.stored_prefix if isinstance(plan, LoadStored) else StoredPrefix())
        self._prepare_eviction(target, plan.reuse_length if isinstance(plan, Continue) else 0)
        target.salt, target.namespace, target.mixes_adapters = salt, self.build_namespace(salt), False
        try:
            self._apply_plan(plan)
            if not self.grid:  # deterministic mode does not speculate
                target.rewind_for_drafter()
        except AfterglowError:  # a state that does not load is a prefix miss
            target.clear()
        self.store.unprotect()
        self._drop_orphaned_checkpoints()
        return target, len(target)

    def _apply_plan(self, plan: PrefixPlan) -> None:
        match plan:
            case Continue(slot, reuse_length, checkpoint):
                if checkpoint is None:
                    slot.truncate(reuse_length)
                else:
                    self._restore_checkpoint(slot, checkpoint)
            case Fork(source, reuse_length, target, checkpoint):
                started = time.perf_counter()
                nbytes = target.copy_from(source, reuse_length if checkpoint is None else len(source))
                self.cost_model.record_transfer(nbytes, time.perf_counter() - started, len(source))
                if checkpoint is not None:
                    self._restore_checkpoint(target, checkpoint)
            case Restore(checkpoint, _, target):
                started = time.perf_counter()
                target.clear()
                target.load(checkpoint.entries, self.store.load_checkpoint_state(checkpoint))
                seconds = time.perf_counter() - started
                self.store.count_hit(checkpoint.position, checkpoint.nbytes, seconds, checkpoint)
            case LoadStored():
                self._load_stored(plan)
            case Fresh(target):
                target.clear()
                self.store.count_miss()

    def _load_stored(self, plan: LoadStored) -> None:
        """Load stored cells. If sequences share the cells, idle ones are evicted until they fit."""
        target, entries = plan.target, plan.stored_prefix.entries[: plan.reuse_length]
        target.clear()
        while True:
            try:
                return self.store.load(target, entries, plan.stored_prefix, plan.checkpoint)
            except KVCacheFull:
                target.clear()
                if not self._backend.capabilities.kv_unified or not self.evict():
                    raise

    def _restore_checkpoint(self, slot: Sequence, checkpoint: Checkpoint) -> None:
        slot.restore(checkpoint.position, self.store.load_checkpoint_state(checkpoint))

    def release(self, sequence: Sequence) -> None:
        """Make a sequence idle, so that later prompts can reuse it."""
        sequence.busy = False
        sequence.last_used = time.monotonic()
        self._idle_slots[sequence] = None
        if sequence.mixes_adapters:
            sequence.clear()
        if self.grid:
            self._truncate_to_grid(sequence)
        if len(sequence):
            self._idle_tree.insert(sequence.entries, sequence, sequence.namespace)
            if len(self.store.tiers) > 1:
                self._unwritten_slots[sequence] = None
        self._drop_orphaned_checkpoints()

    def _truncate_to_grid(self, sequence: Sequence) -> None:
        """Drop what another prompt would compute in other chunks: all after the last full chunk of the prompt.

        If the sequence cannot be truncated there, it returns to its deepest checkpoint.
        """
        length = round_down_to_grid(min(len(sequence), sequence.prompt_length), sequence.entries, self.grid)
        with contextlib.suppress(AfterglowError):  # a state that does not load is a prefix miss
            if sequence.can_resume_at(length):
                return sequence.truncate(length)
            path = self.checkpoints.find_on_path(sequence.entries[:length], sequence.namespace)
            if (checkpoint := next(path, None)) is not None:
                return self._restore_checkpoint(sequence, checkpoint)
        sequence.clear()

    def evict(self) -> bool:
        """Evict the idle sequence with the lowest eviction cost from the device; return False if there is none."""
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
        """Clear an idle sequence without storing it."""
        if slot in self._idle_tree:
            self._idle_tree.remove(slot)
        self.eviction_history.add(slot.entries, slot.namespace)
        slot.clear()
        self._drop_orphaned_checkpoints()

    def clear_store(self) -> None:
        """Clear the RAM and disk tiers. Only checkpoints over cells that are still on the device remain."""
        self.store.clear()
        self._drop_orphaned_checkpoints(include_standalone=True)

    def write_back(self) -> bool:
        """Store one idle sequence and queue it for the disk, to survive a crash; return False if none is left."""
        while self._unwritten_slots:
            slot, _ = self._unwritten_slots.popitem()
            if not slot.busy and len(slot):
                self._write_to_disk(slot)
                self._drop_orphaned_checkpoints()
                return True
        return False

    def close(self, *, store_idle: bool = True, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Store the valuable idle sequences, newest first, and wait at most `timeout` seconds for the disk."""
        deadline = time.monotonic() + timeout
        if len(self.store.tiers) > 1 and store_idle:
            for slot in sorted(self.slots, key=lambda slot: -slot.last_used):
                if len(slot) and not slot.busy and time.monotonic() < deadline:
                    self._write_to_disk(slot)
                    self.store.flush(max(0.0, deadline - time.monotonic()))
        self.store.close(max(0.0, deadline - time.monotonic()))

    def swap_out(self, sequence: Sequence) -> SavedSequence | None:
        """Save the sequence of a preempted job to RAM; return None if it must be computed again."""
        if not len(sequence) or not self.is_current(sequence):
            return None
        ram = self.store.ram
        if ram.budget.get("swapped") + sequence.nbytes > self._swap_limit_bytes:
            return None
        if not ram.evict_until_free(sequence.nbytes):
            return None
        saved = sequence.save()
        ram.budget.add("swapped", saved.nbytes)
        return saved

    def release_swapped(self, saved: SavedSequence) -> None:
        """Free the RAM of a swapped-out sequence."""
        self.store.ram.budget.remove("swapped", saved.nbytes)

    def checkpoint_positions(
        self,
        sequence: Sequence,
        entries: Entries,
        boundaries: frozenset[int],
        required: frozenset[int] = frozenset(),
    ) -> list[int]:
        """Return the positions at which the rest of the prefill of a prompt must pause for checkpoints.

        `required` are boundaries that the client declared: they are not replaced by a position close to them.
        """
        start, namespace = len(sequence), sequence.namespace
        if not self._backend.capabilities.has_partial_state:
            return []
        existing = [checkpoint.position for checkpoint in self.checkpoints.find_on_path(entries, namespace)]
        ubatch = self._backend.capabilities.ubatch_cells
        media_ends = (int(index) + 1 for index in (entries < 0).nonzero()[0])
        boundaries = boundaries.union(media_ends, self.store.pin_manager.pins.find_positions(entries, namespace))
        chosen = choose_checkpoint_positions(len(entries), boundaries, existing, ubatch, self._checkpoint_settings)
        rounded = {round_down_to_grid(position, entries, self.grid) for position in chosen}
        positions = sorted({position for position in rounded if position > start} - set(existing))
        near = [
            position
            for position in positions
            if position <= start + MAX_SKIPPED_STOP_ENTRIES
            and position not in required
            and (entries[start:position] >= 0).all()
        ]
        if start and near and not self.grid:
            # Take one checkpoint at the current end instead: a pause right after it costs another decode.
            self.take_checkpoint(sequence)
            positions = [position for position in positions if position not in near]
        return positions

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Add a checkpoint at the current end of a sequence, within the limits."""
        if sequence.mixes_adapters or self.checkpoints.has_checkpoint_at(sequence.entries, sequence.namespace):
            return
        state_bytes = self._backend.get_state_size(sequence.seq_id, "partial")
        if self.store.ram.can_add_checkpoint(sequence.entries, state_bytes):
            self._add_checkpoint(sequence, self._save_partial_state(sequence))
        self._drop_orphaned_checkpoints()  # evicting may have removed their cells

    def _save_partial_state(self, sequence: Sequence) -> BackendState:
        started = time.perf_counter()
        state = self._backend.save(sequence.seq_id, "partial", long_lived=True)
        self.cost_model.record_transfer(state.nbytes, time.perf_counter() - started, 0)
        self._partial_state_bytes = state.nbytes
        return state

    def _add_checkpoint(self, sequence: Sequence, state: BackendState) -> None:
        """Add a checkpoint with this state at the current end of a sequence."""
        entries = sequence.entries.copy()
        checkpoint = self.store.build_checkpoint(entries, sequence.namespace, state)
        if state.nbytes:
            self.store.add_checkpoint(checkpoint)

    # --- storing before eviction

    def _prepare_eviction(self, slot: Sequence, remaining: int) -> None:
        """Store a sequence, if it is worth it, before all but its first `remaining` entries are dropped."""
        self._store_if_valuable(slot, remaining)
        if self._count_recoverable(slot) < len(slot) > remaining:
            self.eviction_history.add(slot.entries, slot.namespace)

    def _store_if_valuable(self, slot: Sequence, remaining: int = 0) -> None:
        """Store a sequence in RAM, and on disk if there is one, if that is worth its cost."""
        with contextlib.suppress(AfterglowError):  # a sequence that cannot be saved is not stored
            if not (self._can_store and self.is_current(slot) and self._is_worth_storing(slot, remaining)):
                return
            capabilities = self._backend.capabilities
            if not capabilities.has_partial_state:
                self.store.store_sequence(slot, None)
                return
            if not self._checkpoint_settings.max_checkpoints:
                return  # without a checkpoint, the cells would be of no use
            state = self._save_partial_state(slot)
            if capabilities.has_attention_cells and not self.store.store_sequence(slot, state):
                return
            if not self.checkpoints.has_checkpoint_at(slot.entries, slot.namespace):
                self._add_checkpoint(slot, state)
            self.store.write_back(self.checkpoints.find_on_path(slot.entries, slot.namespace))

    def _write_to_disk(self, slot: Sequence) -> None:
        """Store a sequence if it is worth it, and queue everything of it that is stored but not on disk."""
        self._store_if_valuable(slot)
        self.store.write_back_prompt(slot.entries, slot.namespace)

    def _is_worth_storing(self, slot: Sequence, remaining: int) -> bool:
        """Return whether storing a sequence costs less than recomputing what would be lost is expected to cost."""
        lost = len(slot) - max(self._count_recoverable(slot), remaining)
        if lost <= 0 or self.store.is_pinned(slot.entries, slot.namespace, 0):
            return lost > 0
        idle_seconds = time.monotonic() - slot.last_used
        transfer = self._backend.get_state_size(slot.seq_id, "full") * self.cost_model.seconds_per_byte
        recompute = lost * self.cost_model.seconds_per_entry
        cost_if_stored = estimate_eviction_cost(recompute, idle_seconds, transfer)
        return cost_if_stored < estimate_eviction_cost(recompute, idle_seconds)

    def _count_recoverable(self, slot: Sequence) -> int:
        """Return how many leading entries of a sequence could be loaded again from the RAM and disk tiers."""
        capabilities = self._backend.capabilities
        stored_length = len(slot)
        if capabilities.has_attention_cells:
            stored_length = self.store.find_stored_prefix(slot.entries, slot.namespace).length
        if not capabilities.has_partial_state:
            return stored_length
        positions = (checkpoint.position for checkpoint in self.store.find_checkpoints(slot.entries, slot.namespace))
        return next((position for position in positions if position <= stored_length), 0)

    def explain(self, entries: Entries, plan: PrefixPlan | None, salt: str = "") -> Explanation:
        """Return how much of a prompt a plan reuses, and why not more."""
        namespace = self.build_namespace(salt)
        candidates = self._find_candidates(entries, namespace)
        best = max(candidates, key=lambda candidate: candidate.shared_entries, default=None)
        shared = best.shared_entries if best else 0
        reused = plan.reuse_length if plan else 0
        next_cached = None if best is None or shared >= len(best.slot) else int(best.slot.entries[shared])
        stored_prefix = self.store.find_stored_prefix(entries, namespace)
        if stored_prefix.length > shared:
            shared, next_cached = stored_prefix.length, stored_prefix.next_entry
        evicted = max(
            (common_prefix_length(prefix, entries) for prefix in self.eviction_history.find_by_salt(namespace)),
            default=0,
        )
        cause = find_miss_cause(
            shared=shared,
            reused=reused,
            length=len(entries),
            evicted=evicted,
            grid_position=round_down_to_grid(min(shared, len(entries) - 1), entries, self.grid),
            is_windowed=self._backend.capabilities.memory_kind == "window",
        )
        return Explanation(
            prompt_entries=len(entries),
            reused_entries=reused,
            shared_entries=shared,
            next_prompt_entry=int(entries[shared]) if shared < len(entries) else None,
            next_cached_entry=next_cached,
            cause=cause,
            evicted_entries=evicted,
        )

    # --- candidates and eviction cost

    def _find_candidates(self, entries: Entries, namespace: str) -> Iterator[ReuseCandidate]:
        """Yield the idle sequences with the longest common prefix, and all busy ones with a common prefix."""
        now = time.monotonic()
        matches = self._idle_tree.find_nearest(self._idle_tree.match(entries, namespace), MAX_CANDIDATE_SEQUENCES)
        matches += [
            (slot, common_prefix_length(slot.entries[: slot.prompt_length] if self.grid else slot.entries, entries))
            for slot in self.slots
            if slot.busy and slot.namespace == namespace and not slot.mixes_adapters
        ]
        for slot, shared in matches:
            if shared and not slot.partial_media_rows:  # a sequence with an incomplete media entry is not copied
                yield ReuseCandidate(slot, shared, 0.0 if slot.busy else now - slot.last_used)

    def _choose_target(self) -> tuple[Sequence | None, float]:
        """Return an empty slot or the idle one with the lowest eviction cost, and that cost."""
        empty = next((slot for slot in self._idle_slots if not len(slot)), None)
        if empty is not None:
            return empty, 0.0
        if not self._idle_slots:
            return None, 0.0
        slot = min(itertools.islice(self._idle_slots, MAX_CANDIDATE_SEQUENCES), key=self._estimate_eviction_cost)
        return slot, self._estimate_eviction_cost(slot)

    def _estimate_eviction_cost(self, slot: Sequence) -> float:
        """Return the expected seconds that evicting a sequence costs; 0 if other sequences hold the same entries."""
        return estimate_eviction_cost(
            self._idle_tree.count_unique_entries(slot) * self.cost_model.seconds_per_entry,
            time.monotonic() - slot.last_used,
            self._estimate_store_seconds(len(slot)) if self._can_store else None,
        )

    # --- orphaned checkpoints

    def _drop_orphaned_checkpoints(self, *, include_standalone: bool = False) -> None:
        """Drop the checkpoints whose cells are gone. `include_standalone`: also check those that need no cells."""
        loss_count = sum([slot.loss_count for slot in self.slots]) + self.store.tree.loss_count
        if include_standalone or (
            loss_count != self._last_loss_count and self._backend.capabilities.checkpoints_need_cells
        ):
            for checkpoint in self.all_checkpoints[:]:
                if not self._has_cells_for(checkpoint):
                    self.checkpoints.drop(checkpoint)
        self._last_loss_count = loss_count

    def _has_cells_for(self, checkpoint: Checkpoint) -> bool:
        """Return whether all cells before a checkpoint are on the device or stored."""
        entries, salt = checkpoint.entries, checkpoint.salt
        busy = [slot for slot in self.slots if slot.busy and slot.namespace == salt and not slot.mixes_adapters]
        return (
            self._idle_tree.match(entries, salt).length == checkpoint.position
            or any(common_prefix_length(slot.entries, entries) == checkpoint.position for slot in busy)
            or self.store.has_cells_for(checkpoint)
        )
