"""Prefix cache: owns the sequences, checkpoints and tiers, and starts prompts from the longest reusable prefix."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import StoredPrefix
from afterglow.engine.kvcache.checkpoints import Checkpoint, choose_checkpoint_positions
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import choose_positions_to_drop, estimate_eviction_cost
from afterglow.engine.kvcache.explain import EvictionHistory, Explanation, find_miss_cause
from afterglow.engine.kvcache.placement import (
    DEVICE_COPY_DECODES,
    PAYBACK_DECODES,
    compute_copy_cost,
    count_runs,
    plan_moves,
)
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
from afterglow.engine.kvcache.sequence import ADAPTER_SEPARATOR, SavedSequence, Sequence
from afterglow.engine.kvcache.store import StoreOutcome, TieredStore
from afterglow.engine.types.adapters import AdapterSet, build_adapter_key
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.entries import (
    Entries,
    EntryInterner,
    common_prefix_length,
    round_down_to_grid,
    strip_label,
    strip_labels,
)
from afterglow.engine.types.request import PlanKind, PlannedPrefix
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, KVCacheFull

# Recomputing this many entries once in a while is cheaper than an additional decode, for a checkpoint, in every prompt.
MAX_SKIPPED_CHECKPOINT_ENTRIES = 24
MAX_CANDIDATE_SEQUENCES = 16  # sequences that a plan considers: those that share most, and the longest idle ones
CLOSE_TIMEOUT_SECONDS = 3.0  # for storing idle sequences on disk
# An idle engine stores a sequence that is larger than the RAM tier in pieces, to see new requests between them: seconds
# of waiting for the disk in each, before each but the first, and the largest number of pieces.
IDLE_WRITE_SECONDS = 1.0
IDLE_FLUSH_SECONDS = 0.5
MAX_IDLE_WRITES = 40
MAX_FOLLOWING_ENTRIES = 4096  # of a stored prefix after the entries that a prompt shares with it
MAX_DESCRIBED_ENTRIES = 400  # the same in the description of a plan
PLAN_KINDS: dict[type[PrefixPlan], PlanKind] = {
    Continue: "continue",
    Fork: "fork",
    Restore: "restore",
    LoadStored: "load",
    Fresh: "fresh",
}


@dataclass(slots=True, kw_only=True)
class ForgetReport:
    """What `PrefixCache.forget` removed."""

    sequences: int = 0  # idle ones, truncated or cleared
    busy_sequences: int = 0  # of running requests, which stay
    blocks: int = 0
    checkpoints: int = 0
    pins: int = 0


class PrefixCache:
    """Owns the sequences of the backend's KV cache, the tree over them, the checkpoints, and the slower tiers.

    A request calls `plan`, `acquire`, then `take_checkpoint` at its checkpoint positions during prefill, and `release`.
    """

    def __init__(self, backend: Backend, interner: EntryInterner, settings: EngineSettings, grid: int = 0) -> None:
        self.cost_model = CostModel(backend.capabilities.row_tile)
        self._backend = backend
        self._interner = interner
        self._checkpoint_settings = settings.checkpoints
        self._swap_limit_bytes = settings.swap_bytes
        self._partial_state_bytes = 0  # size of the last saved partial state
        self.grid = grid  # entries per chunk in deterministic mode; 0: any length can be reused
        self._idle_tree: RadixTree[Sequence] = RadixTree()  # idle sequences by their entries
        self.slots = [Sequence(number, backend, interner) for number in range(backend.capabilities.sequences)]
        self._idle_slots = dict.fromkeys(self.slots)  # the longest idle first
        # Idle and not on disk yet, the newest last, each with the number of attempts to store it.
        self._unwritten_slots: dict[Sequence, int] = {}
        self._last_loss_count = 0  # of sequences and blocks, at the last search for orphaned checkpoints
        self.eviction_history = EvictionHistory()
        self.store = TieredStore(backend, interner, self.cost_model, settings, grid=grid)
        self.checkpoints = self.store.checkpoints

    @property
    def all_checkpoints(self) -> list[Checkpoint]:
        return self.checkpoints.all_checkpoints

    def build_namespace(self, salt: str, adapters: AdapterSet = ()) -> str:
        """Return the salt together with the content and the scales of adapters.

        The stores and trees find only what has the same one: state of other tenants or other weights is never reused.
        """
        key = build_adapter_key(adapters, self._backend.adapters)
        return f"{salt}{ADAPTER_SEPARATOR}{key}" if key else salt

    def plan(
        self, entries: Entries, *, use_prefix_cache: bool = True, slot: int | None = None, namespace: str = ""
    ) -> PrefixPlan | None:
        """Return the plan for a prompt; None if every slot that it could use is busy."""
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
        has_last_logits = use_prefix_cache and self._can_store_logits and self.store.has_logits(entries, namespace)
        stored_prefix = self.store.find_stored_prefix(entries, namespace) if use_store else StoredPrefix()
        if self.store.sample_disk_reads(stored_prefix):
            stored_prefix = self.store.find_stored_prefix(entries, namespace)
        return plan_prefix(
            PlanInputs(
                prompt=entries,
                candidates=candidates,
                checkpoints=checkpoints,
                target=target,
                target_eviction_cost=target_eviction_cost,
                can_fork_anywhere=capabilities.can_fork_anywhere,
                checkpoints_need_cells=capabilities.checkpoints_need_cells,
                has_copy_cost=not (capabilities.kv_unified or capabilities.copies_on_device),
                cost_model=self.cost_model,
                grid=self.grid,
                stored_prefix=stored_prefix,
                fast_prefix=self.store.cut_to_fast_tiers(stored_prefix),
                estimate_load_seconds=self.store.estimate_load_seconds,
                estimate_checkpoint_seconds=self.store.estimate_checkpoint_seconds,
                cells_suffice=not capabilities.has_partial_state,
                estimate_store_seconds=self._estimate_store_seconds if self._can_store else None,
                has_last_logits=has_last_logits,
            )
        )

    @property
    def _can_store_logits(self) -> bool:
        return self._backend.capabilities.starts_from_logits and self._can_store

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

    def search_shared_store(self, entries: Entries, namespace: str, *, is_blocking: bool) -> bool:
        """Search the shared store for a longer prefix of a prompt; return whether the search is still running.

        `is_blocking`: return when it has ended or timed out.
        """
        if self.store.object_tier is None:
            return False
        shared = (candidate.shared_entries for candidate in self._find_candidates(entries, namespace))
        known_length = max(shared, default=0)
        return self.store.search_shared_store(entries, namespace, known_length, is_blocking=is_blocking)

    def prefetch(self, plan: PrefixPlan) -> bool:
        """Start reading what a plan needs from disk, on another thread; return whether the plan has to wait for it."""
        if not isinstance(plan, LoadStored | Restore):
            return False
        stored_prefix = plan.stored_prefix if isinstance(plan, LoadStored) else StoredPrefix()
        is_waiting = self.store.prefetch(stored_prefix, plan.reuse_length, plan.checkpoint)
        self._drop_orphaned_checkpoints()  # evicting may have removed their cells
        return is_waiting

    def acquire(self, plan: PrefixPlan, namespace: str = "", *, is_transient: bool = False) -> tuple[Sequence, int]:
        """Apply a plan; return its sequence, now busy, and the number of prompt entries that it holds.

        `is_transient`: no later prompt will continue it. It is evicted first, and not stored for another transient one.
        """
        self.store.pin_manager.expire()
        target = plan.slot if isinstance(plan, Continue) else plan.target
        if target in self._idle_tree:
            self._idle_tree.remove(target)
        del self._idle_slots[target]
        target.busy = True
        self.store.set_busy(True)
        self.store.protect(plan.stored_prefix if isinstance(plan, LoadStored) else StoredPrefix())
        if not (is_transient and target.is_transient):
            self._prepare_eviction(target, plan.reuse_length if isinstance(plan, Continue) else 0)
        target.is_transient = is_transient
        target.namespace = namespace
        try:
            self._apply_plan(plan)
            if isinstance(plan, Continue | Fork):
                (plan.slot if isinstance(plan, Continue) else plan.source).reuse_lengths.append(len(target))
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

    def _load_stored(self, plan: LoadStored) -> None:
        target, entries = plan.target, plan.stored_prefix.entries[: plan.reuse_length]
        self.load_evicting(target, lambda: self.store.load(target, entries, plan.stored_prefix, plan.checkpoint))

    def load_evicting(self, target: Sequence, load: Callable[[], None]) -> None:
        """Call `load`, which fills a sequence. If sequences share the cells, idle ones are evicted until it fits."""
        capabilities = self._backend.capabilities
        target.clear()
        while True:
            try:
                return load()
            except KVCacheFull as error:
                target.clear()
                can_fit = capabilities.kv_unified and error.rows <= capabilities.cells_per_sequence
                if not can_fit or not self.evict():
                    raise

    def _restore_checkpoint(self, slot: Sequence, checkpoint: Checkpoint) -> None:
        slot.restore(checkpoint.position, self.store.load_checkpoint_state(checkpoint))

    def release(self, sequence: Sequence) -> None:
        """Make a sequence idle, so that later prompts can reuse it."""
        sequence.busy = False
        sequence.last_used = time.monotonic()
        self._idle_slots[sequence] = None
        self.store.set_busy(len(self._idle_slots) < len(self.slots))
        if self.grid:
            self._truncate_to_grid(sequence)
        if len(sequence):
            self._idle_tree.insert(sequence.entries, sequence, sequence.namespace)
            if len(self.store.tiers) > 1 and not sequence.is_transient:
                self._unwritten_slots[sequence] = 0
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
        slot = min(idle, key=self._compute_eviction_order)
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
        """Clear the RAM, disk and shared tiers. Only checkpoints over cells that are still on the device remain."""
        self.store.clear()
        self._drop_orphaned_checkpoints(include_standalone=True)

    def forget(self, entries: Entries, start: int, namespace: str) -> ForgetReport:
        """Remove everything that continues the first `start` entries as these do, from all tiers, and its pins.

        Sequences are truncated there if they can be continued, else cleared. Those of running requests stay.
        """
        report = ForgetReport()
        for slot in self.slots:
            if slot.namespace != namespace or common_prefix_length(slot.entries, entries) <= start:
                continue
            if slot.busy:
                report.busy_sequences += 1
                continue
            report.sequences += 1
            self._idle_tree.remove(slot)
            if start and slot.can_resume_at(start):
                slot.truncate(start)
                self._idle_tree.insert(slot.entries, slot, slot.namespace)
            else:
                slot.clear()
        report.pins = self.store.pin_manager.forget(entries, start, namespace)
        report.blocks, report.checkpoints = self.store.forget(entries, start, namespace)
        self._drop_orphaned_checkpoints()
        return report

    def write_prefix(self, entries: Entries, namespace: str) -> None:
        """Queue everything of a prefix for the disk: of idle sequences that hold it, and what is stored."""
        for slot in self.slots:
            if slot.namespace == namespace and not slot.busy and common_prefix_length(slot.entries, entries):
                self._write_to_disk(slot, keep_all=True, wait_seconds=IDLE_WRITE_SECONDS)
        self._drop_orphaned_checkpoints()
        self.store.write_back_prompt(entries, namespace)

    def write_back(self, *, keep_all: bool = False) -> bool:
        """Store one idle sequence and queue it for the disk, to survive a crash; return False if none is left.

        `keep_all`: even if computing it again would cost less.
        """
        while self._unwritten_slots:
            slot, attempts = self._unwritten_slots.popitem()
            if not slot.busy and len(slot):
                if attempts:  # a part of it is stored, and may still be queued
                    self.store.flush(IDLE_FLUSH_SECONDS)
                keep_rest = keep_all or attempts > 0
                outcome = self._write_to_disk(slot, keep_all=keep_rest, wait_seconds=IDLE_WRITE_SECONDS)
                if outcome == "waiting" and attempts < MAX_IDLE_WRITES:
                    self._unwritten_slots[slot] = attempts + 1
                self._drop_orphaned_checkpoints()
                return True
        return False

    def close(self, *, store_idle: bool = True, timeout: float = CLOSE_TIMEOUT_SECONDS) -> StoreReport:
        """Store all idle sequences and what only RAM holds, newest first, within `timeout` seconds; close the tiers.

        Nothing is stored without a slower tier, or without `store_idle`.
        """
        started = time.monotonic()
        deadline = started + timeout
        idle = [slot for slot in self.slots if len(slot) and not slot.busy and not slot.is_transient]
        report = StoreReport(sequences=len(idle))
        slower = self.store.tiers[1:]
        if slower and store_idle:
            before = [replace(tier.counters) for tier in slower]
            self.store.flush(timeout)
            self.store.refresh()  # what other processes removed is stored again
            for slot in sorted(idle, key=lambda slot: -slot.last_used):
                if time.monotonic() < deadline:
                    self._write_to_disk(slot, keep_all=True, wait_seconds=deadline - time.monotonic())
                    self.store.flush(max(0.0, deadline - time.monotonic()))
            self.store.write_back_all()
            report.is_complete = self.store.flush(max(0.0, deadline - time.monotonic()))
            for tier, old in zip(slower, before, strict=True):
                report.files += tier.counters.saves - old.saves
                report.nbytes += tier.counters.saved_bytes - old.saved_bytes
                report.dropped_files += tier.counters.rejected_saves - old.rejected_saves
        self.store.close(max(0.0, deadline - time.monotonic()))
        report.seconds = time.monotonic() - started
        return report

    def swap_out(self, sequence: Sequence) -> SavedSequence | None:
        """Save the sequence of a preempted job to RAM; return None if it must be computed again."""
        if not len(sequence):
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

    def plan_checkpoints(
        self,
        sequence: Sequence,
        entries: Entries,
        boundaries: frozenset[int],
        required: frozenset[int] = frozenset(),
    ) -> list[int]:
        """Return the positions at which the rest of the prefill of a prompt must pause for checkpoints.

        Positions right after the current end of the sequence are replaced by a checkpoint that is taken at once.
        `required` are boundaries that the client declared: they are not replaced.
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
            if position <= start + MAX_SKIPPED_CHECKPOINT_ENTRIES
            and position not in required
            and (entries[start:position] >= 0).all()
        ]
        if start and near and not self.grid:
            # A pause right after the current end would cost another decode.
            self.take_checkpoint(sequence)
            positions = [position for position in positions if position not in near]
        return positions

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Add a checkpoint at the current end of a sequence, within the limits."""
        if self.checkpoints.has_checkpoint_at(sequence.entries, sequence.namespace):
            return
        state_bytes = self._backend.get_state_size(sequence.seq_id, "partial")
        if self.store.ram.can_add_checkpoint(sequence.entries, state_bytes):
            self._add_checkpoint(sequence, self._save_partial_state(sequence))
        self._drop_orphaned_checkpoints()  # evicting may have removed their cells

    def store_last_logits(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Store the logits after the prompt in a sequence, so that a repeat of the prompt computes nothing.

        Models whose state cannot be truncated also need a checkpoint there: it is taken if that pays.
        """
        entries = sequence.entries
        is_on_grid = round_down_to_grid(len(entries), entries, self.grid) == len(entries)
        if sequence.is_transient or not self._can_store_logits or not is_on_grid:
            return
        if self._backend.capabilities.has_partial_state and self._is_worth_checkpoint(sequence):
            self.take_checkpoint(sequence)
        self.store.store_logits(entries, sequence.namespace, logits)
        self._drop_orphaned_checkpoints()  # evicting may have removed their cells

    def load_last_logits(self, entries: Entries, namespace: str) -> NDArray[np.float32] | None:
        """Return the logits after a prompt; None if they are not stored."""
        return self.store.load_logits(entries, namespace)

    def _is_worth_checkpoint(self, sequence: Sequence) -> bool:
        """Return whether a checkpoint at the end of a sequence costs less than what it is expected to save.

        Without it, a repeat computes the entries after the checkpoint before it. It does not take the place of that
        one, at which an edited prompt resumes.
        """
        path = self.checkpoints.find_on_path(sequence.entries, sequence.namespace)
        positions = sorted(checkpoint.position for checkpoint in path)
        start = positions[-1] if positions else 0
        if start in choose_positions_to_drop([*positions, len(sequence)], self._checkpoint_settings.max_checkpoints):
            return False
        recompute = self.cost_model.estimate_prefill_seconds(len(sequence) - start, after=start)
        recompute = max(recompute, self.cost_model.seconds_per_row)
        transfer = self._backend.get_state_size(sequence.seq_id, "partial") * self.cost_model.seconds_per_byte
        return estimate_eviction_cost(recompute, 0.0, transfer) < estimate_eviction_cost(recompute, 0.0)

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

    # --- placement

    def pack(self, busy: Iterable[Sequence], max_decodes: int) -> int:
        """Make busy sequences adjacent in the backend if their decodes gain more than the copies cost.

        There are at most `max_decodes` more. Returns the number of moves. An idle sequence that is in the way moves to
        a free place; if there is none, the idle one with the lowest eviction cost is evicted, as the next new prompt
        would do.
        """
        by_id = {slot.seq_id: slot for slot in self.slots}
        busy_ids = sorted(slot.seq_id for slot in busy)
        runs = count_runs(busy_ids)
        if runs < 2 or self._backend.capabilities.kv_unified:
            return 0
        on_device = self._backend.capabilities.copies_on_device
        lengths = [len(by_id[seq_id]) for seq_id in range(len(self.slots))]
        # A copy within a device takes as long for a short sequence as for a long one.
        costs = [min(length, 1) for length in lengths] if on_device else lengths
        moves = plan_moves(busy_ids, costs)
        cost, seconds_per_run = compute_copy_cost(moves, costs), self.cost_model.seconds_per_row
        device_seconds = DEVICE_COPY_DECODES * cost * seconds_per_run
        seconds = device_seconds if on_device else self.cost_model.estimate_copy_seconds(cost)
        if seconds > (runs - 1) * seconds_per_run * min(max_decodes, PAYBACK_DECODES):
            return 0
        try:
            for source, target in moves:
                self._move(by_id[source], target)
        except AfterglowError:  # a copy failed, and changed nothing
            return 0
        return len(moves)

    def _move(self, slot: Sequence, seq_id: int) -> None:
        """Give `slot` the backend's sequence `seq_id`, which is idle."""
        target = next(other for other in self.slots if other.seq_id == seq_id)
        if len(target) and not any(not len(other) for other in self._idle_slots):
            self.evict()
        if len(target):
            spare = next(other for other in self._idle_slots if not len(other))
            target.move_to(spare)  # `spare` has the place of `target` now, and is empty
            target = spare
        slot.move_to(target)

    # --- storing before eviction

    def _prepare_eviction(self, slot: Sequence, remaining: int) -> None:
        """Store a sequence, if it is worth it, before all but its first `remaining` entries are dropped."""
        self._store_if_valuable(slot, remaining)
        dropped = len(slot) - remaining
        nbytes = dropped * self.cost_model.bytes_per_entry
        self.store.ram.events.record("evicted", "device", entries=dropped, nbytes=nbytes if dropped > 0 else 0)
        if self._count_recoverable(slot) < len(slot) > remaining:
            self.eviction_history.add(slot.entries, slot.namespace)

    def _store_if_valuable(
        self,
        slot: Sequence,
        remaining: int = 0,
        *,
        keep_all: bool = False,
        is_idle: bool = False,
        wait_seconds: float = 0.0,
    ) -> StoreOutcome:
        """Store a sequence in RAM, and on disk if there is one, if that is worth its cost or everything is kept.

        `is_idle`: no request waits for it. `wait_seconds`: for the disk, if the sequence is larger than the RAM tier.
        """
        with contextlib.suppress(AfterglowError):  # a sequence that cannot be saved is not stored
            if not self._can_store:
                return "not stored"
            if self._count_recoverable(slot) == len(slot):
                return "stored"
            if not (keep_all or self._is_worth_storing(slot, remaining, is_idle=is_idle)):
                return "not stored"
            capabilities = self._backend.capabilities
            last_logits = self.store.ram.logits.find_on_path(slot.entries, slot.namespace)
            if not capabilities.has_partial_state:
                outcome = self.store.store_sequence(slot, None, wait_seconds)
                if outcome == "stored":
                    self.store.write_back_logits(last_logits)
                return outcome
            if not self._checkpoint_settings.max_checkpoints:
                return "not stored"  # without a checkpoint, the cells would be of no use
            state = self._save_partial_state(slot)
            if capabilities.has_attention_cells:
                outcome = self.store.store_sequence(slot, state, wait_seconds)
                if outcome != "stored":
                    return outcome
            if not self.checkpoints.has_checkpoint_at(slot.entries, slot.namespace):
                self._add_checkpoint(slot, state)
            self.store.write_back(self.checkpoints.find_on_path(slot.entries, slot.namespace))
            self.store.write_back_logits(last_logits)
            return "stored"
        return "not stored"

    def _write_to_disk(self, slot: Sequence, *, keep_all: bool = False, wait_seconds: float) -> StoreOutcome:
        """Store a sequence if it is worth it, and queue everything of it that is stored but not on disk."""
        outcome = self._store_if_valuable(slot, keep_all=keep_all, is_idle=True, wait_seconds=wait_seconds)
        self.store.write_back_prompt(slot.entries, slot.namespace)
        return outcome

    def _is_worth_storing(self, slot: Sequence, remaining: int, *, is_idle: bool) -> bool:
        """Return whether storing a sequence costs less than recomputing what would be lost is expected to cost.

        For an idle engine, storing costs nothing, and loading counts alone.
        """
        kept = max(self._count_recoverable(slot), remaining)
        if kept >= len(slot):
            return False
        if self.store.is_pinned(slot.entries, slot.namespace, 0):
            return True
        idle_seconds = time.monotonic() - slot.last_used
        transfer = self._backend.get_state_size(slot.seq_id, "full") * self.cost_model.seconds_per_byte
        recompute = self.cost_model.estimate_prefill_seconds(len(slot) - kept, after=kept)
        if is_idle:
            return transfer < recompute
        cost_if_stored = estimate_eviction_cost(recompute, idle_seconds, transfer)
        return cost_if_stored < estimate_eviction_cost(recompute, idle_seconds)

    def _count_recoverable(self, slot: Sequence) -> int:
        """Return how many leading entries of a sequence could be loaded again from RAM, disk or the shared store."""
        capabilities = self._backend.capabilities
        stored_length = len(slot)
        if capabilities.has_attention_cells:
            stored_length = self.store.find_stored_prefix(slot.entries, slot.namespace).length
        if not capabilities.has_partial_state:
            return stored_length
        positions = (checkpoint.position for checkpoint in self.store.find_checkpoints(slot.entries, slot.namespace))
        return next((position for position in positions if position <= stored_length), 0)

    # --- explanation

    def explain(self, entries: Entries, plan: PrefixPlan | None, namespace: str = "") -> Explanation:
        """Return how much of a prompt a plan reuses, and why not more."""
        candidates = self._find_candidates(entries, namespace)
        best = max(candidates, key=lambda candidate: candidate.shared_entries, default=None)
        shared = best.shared_entries if best else 0
        reused = plan.reuse_length if plan else 0
        next_cached = None if best is None or shared >= len(best.slot) else int(best.slot.entries[shared])
        stored_prefix = self.store.find_stored_prefix(entries, namespace)
        if stored_prefix.length > shared:
            shared, next_cached = stored_prefix.length, stored_prefix.next_entry
        evicted = max(
            (common_prefix_length(prefix, entries) for prefix in self.eviction_history.find_by_namespace(namespace)),
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
            next_prompt_entry=strip_label(int(entries[shared])) if shared < len(entries) else None,
            next_cached_entry=None if next_cached is None else strip_label(next_cached),
            cause=cause,
            evicted_entries=evicted,
        )

    def describe_plan(self, entries: Entries, plan: PrefixPlan, namespace: str = "") -> PlannedPrefix:
        """Return how a plan starts a prompt, and what differs from the nearest cached prefix."""
        explanation = self.explain(entries, plan, namespace)
        nearest, common_length = self.find_nearest(entries, namespace, MAX_DESCRIBED_ENTRIES)
        following = nearest[common_length : common_length + MAX_DESCRIBED_ENTRIES]
        return PlannedPrefix(
            kind=PLAN_KINDS[type(plan)],
            tier=self._find_source_tier(plan),
            reused_entries=plan.reuse_length,
            seconds_saved=plan.reuse_length * self.cost_model.seconds_per_entry - self._estimate_plan_seconds(plan),
            shared_entries=explanation.shared_entries,
            evicted_entries=explanation.evicted_entries,
            cause=explanation.cause,
            common_length=common_length,
            cached_entries=tuple(strip_labels(self._interner.to_portable_entries(following)).tolist()),
        )

    def _estimate_plan_seconds(self, plan: PrefixPlan) -> float:
        """Return the expected seconds to load what a plan reuses."""
        match plan:
            case LoadStored(stored_prefix, reuse_length, _, checkpoint):
                seconds = self.store.estimate_load_seconds(stored_prefix, reuse_length)
                return seconds + (self.store.estimate_checkpoint_seconds(checkpoint) if checkpoint else 0.0)
            case Restore(checkpoint):
                return self.store.estimate_checkpoint_seconds(checkpoint)
            case Continue() | Fork() | Fresh():
                return 0.0

    def _find_source_tier(self, plan: PrefixPlan) -> str:
        """Return the slowest tier that a plan reads: "device", "ram", "disk" or "shared"; "none" for a miss."""
        if isinstance(plan, Fresh):
            return "none"
        if isinstance(plan, Continue | Fork):
            return "device"
        blocks = plan.stored_prefix.blocks if isinstance(plan, LoadStored) else ()
        return self.store.find_slowest_tier(
            [block for block in blocks if block.start < plan.reuse_length], plan.checkpoint
        )

    def find_nearest(self, entries: Entries, namespace: str, limit: int = MAX_FOLLOWING_ENTRIES) -> tuple[Entries, int]:
        """Return the cached or recently evicted prefix that shares most with a prompt, and how many entries it shares.

        Of a stored prefix, about `limit` entries after those are returned.
        """
        nearest, common_length = np.zeros(0, dtype=np.int64), 0
        for cached in self._iter_nearest(entries, namespace, limit):
            shared = common_prefix_length(cached, entries)
            if shared > common_length or not len(nearest):
                nearest, common_length = cached, shared
        return nearest, common_length

    def _iter_nearest(self, entries: Entries, namespace: str, limit: int) -> Iterator[Entries]:
        """Yield the candidates: sequences (most recently used first), stored blocks, checkpoints, evicted sequences."""
        idle = self._idle_tree.find_nearest(self._idle_tree.match(entries, namespace), MAX_CANDIDATE_SEQUENCES)
        busy = [slot for slot in self.slots if slot.busy and slot.namespace == namespace and len(slot)]
        for slot in sorted([*busy, *(slot for slot, _ in idle)], key=lambda slot: -slot.last_used):
            yield slot.entries
        yield self.store.find_nearest(entries, namespace, limit)
        tree = self.checkpoints.tree
        for checkpoint, _ in tree.find_nearest(tree.match(entries, namespace), 1):
            yield checkpoint.entries
        yield from self.eviction_history.find_by_namespace(namespace)

    # --- candidates and eviction cost

    def _find_candidates(self, entries: Entries, namespace: str) -> Iterator[ReuseCandidate]:
        """Yield the idle sequences with the longest common prefix, and all busy ones with a common prefix."""
        now = time.monotonic()
        matches = self._idle_tree.find_nearest(self._idle_tree.match(entries, namespace), MAX_CANDIDATE_SEQUENCES)
        matches += [
            (slot, common_prefix_length(slot.entries[: slot.prompt_length] if self.grid else slot.entries, entries))
            for slot in self.slots
            if slot.busy and slot.namespace == namespace
        ]
        for slot, shared in matches:
            if shared and not slot.partial_media_rows:  # a sequence with an incomplete media entry is not copied
                yield ReuseCandidate(slot, shared, 0.0 if slot.busy else now - slot.last_used)

    def _choose_target(self) -> tuple[Sequence | None, float]:
        """Return an empty slot or the idle one with the lowest eviction cost, and that cost."""
        empty = [slot for slot in self._idle_slots if not len(slot)]
        if empty:
            return min(empty, key=lambda slot: slot.seq_id), 0.0
        if not self._idle_slots:
            return None, 0.0
        slot = min(itertools.islice(self._idle_slots, MAX_CANDIDATE_SEQUENCES), key=self._compute_eviction_order)
        return slot, self._estimate_eviction_cost(slot)

    def _compute_eviction_order(self, slot: Sequence) -> tuple[bool, float]:
        """Return the place of an idle sequence in the order of eviction: transient ones first, then by cost."""
        return not slot.is_transient, self._estimate_eviction_cost(slot)

    def _estimate_eviction_cost(self, slot: Sequence) -> float:
        """Return the expected seconds that evicting a sequence costs; 0 if other sequences hold the same entries."""
        unique = self._idle_tree.count_unique_entries(slot)
        return estimate_eviction_cost(
            self.cost_model.estimate_prefill_seconds(unique, after=len(slot) - unique),
            time.monotonic() - slot.last_used,
            self._estimate_store_seconds(len(slot)) if self._can_store else None,
        )

    # --- orphaned checkpoints

    def _drop_orphaned_checkpoints(self, *, include_standalone: bool = False) -> None:
        """Drop the checkpoints whose cells are gone. `include_standalone`: also check those that need no cells."""
        loss_count = sum([slot.loss_count for slot in self.slots]) + self.store.tree.path_loss_count
        if include_standalone or (
            loss_count != self._last_loss_count and self._backend.capabilities.checkpoints_need_cells
        ):
            for checkpoint in self.all_checkpoints[:]:
                if not self._has_cells_for(checkpoint):
                    self.checkpoints.drop(checkpoint)
        self._last_loss_count = loss_count

    def _has_cells_for(self, checkpoint: Checkpoint) -> bool:
        """Return whether all cells before a checkpoint are on the device or stored."""
        block_losses = self.store.tree.path_loss_count
        if checkpoint.stored_cells_seen_at == block_losses:
            return True
        if self.store.has_cells_for(checkpoint):
            checkpoint.stored_cells_seen_at = block_losses
            return True
        entries, namespace = checkpoint.entries, checkpoint.namespace
        busy = [slot for slot in self.slots if slot.busy and slot.namespace == namespace]
        return self._idle_tree.match(entries, namespace).length == checkpoint.position or any(
            common_prefix_length(slot.entries, entries) == checkpoint.position for slot in busy
        )
