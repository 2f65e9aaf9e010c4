"""Mutants: plausible bugs in the engine and in the fake backend. At least one law must fail for each.

A mutant is a function that plants the bug; it is listed with the laws that detect it. A mutant that no law detects is a
gap in the laws: add a law, not an exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from afterglow.engine import engine as engine_module
from afterglow.engine import verify
from afterglow.engine.engine import Engine
from afterglow.engine.inspect import snapshots
from afterglow.engine.kvcache import checkpoints as checkpoints_module
from afterglow.engine.kvcache import planner, prefix_cache
from afterglow.engine.kvcache import store as store_module
from afterglow.engine.kvcache.blocks import BlockHasher, BlockTree
from afterglow.engine.kvcache.checkpoints import Checkpoint, CheckpointStore
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk import tier
from afterglow.engine.kvcache.last_logits import LogitsStore
from afterglow.engine.kvcache.pins import PinManager, Pins
from afterglow.engine.kvcache.planner import ReuseCandidate
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.kvcache.store import TieredStore
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.scheduling import scheduler
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.types.backend import Capabilities
from afterglow.engine.types.entries import EntryInterner, strip_labels
from afterglow.engine.types.request import Failed, PrefillProgress
from afterglow.errors import KVCacheFull
from afterglow.llama import kv_memory
from afterglow.testing import FakeBackend, FakeCells, FakeKVCache
from laws import test_adapters as adapter_laws
from laws import test_checkpoints_on_fake as checkpoint_laws
from laws import test_deterministic_on_fake as deterministic_laws
from laws import test_engine_on_fake as engine_laws
from laws import test_engine_on_llama as llama_laws
from laws import test_last_logits as logits_laws
from laws import test_media_entries_on_fake as media_laws
from laws import test_pins as pin_laws
from laws import test_placement as placement_laws
from laws import test_preemption_on_fake as preemption_laws
from laws import test_regressions as regressions
from laws import test_sequences_on_fake as sequence_laws
from laws import test_tiers as tier_laws

Plant = Callable[[object, str, object], None]  # signature of `monkeypatch.setattr`


@dataclass(frozen=True)
class Mutant:
    name: str
    plant: Callable[[Plant], None]
    laws: tuple[Callable[..., None], ...]


MUTANTS: list[Mutant] = []


def mutant(name: str, *laws: Callable[..., None]) -> Callable[[Callable[[Plant], None]], None]:
    """Register the decorated function as a mutant."""
    return lambda plant: MUTANTS.append(Mutant(name, plant, laws))


def wrap(owner: object, name: str, around: Callable[..., object]) -> Callable[[Plant], None]:
    """Plant `around(original, self, *arguments)` in place of a method."""

    def plant(put: Plant) -> None:
        original = getattr(owner, name)
        put(owner, name, lambda self, *args, **kwargs: around(original, self, *args, **kwargs))

    return plant


# --- prefix reuse


@mutant(
    "one entry more than the common prefix is reused",
    engine_laws.test_c3_an_edited_last_message_computes_from_the_last_shared_boundary,
)
def _(put):
    def find_candidates(original, self, *args):
        for found in original(self, *args):
            length = min(found.shared_entries + 1, len(found.slot))
            yield ReuseCandidate(found.slot, length, found.idle_seconds)

    wrap(PrefixCache, "_find_candidates", find_candidates)(put)


@mutant(
    "the KV cache is truncated one entry too late",
    engine_laws.test_c3_an_edited_last_message_computes_from_the_last_shared_boundary,
)
def _(put):
    wrap(
        FakeBackend,
        "truncate",
        lambda original, self, seq_id, position: original(self, seq_id, position + (position > 0)),
    )(put)


@mutant(
    "the last entry of a cached prompt is not computed again",
    engine_laws.test_c8_a_repeated_prompt_without_stored_logits_computes_at_least_its_last_entry,
)
def _(put):
    put(planner.PlanInputs, "max_reuse_length", property(lambda self: len(self.prompt)))


@mutant(
    "a repeat gets the logits of another prompt", logits_laws.test_prompts_with_a_common_prefix_have_logits_of_their_own
)
def _(put):
    def find(original, self, entries, salt):
        return original(self, entries, salt) and list(self)[-1]

    wrap(LogitsStore, "find", find)(put)


@mutant(
    "a prompt gets the logits after a prefix of it",
    logits_laws.test_prompts_with_a_common_prefix_have_logits_of_their_own,
)
def _(put):
    put(LogitsStore, "find", lambda self, entries, namespace: next(iter(self.find_on_path(entries, namespace)), None))


@mutant("logits are kept without a copy", logits_laws.test_a_repeat_computes_nothing)
def _(put):
    buffers: dict[int, np.ndarray] = {}  # as llama.cpp: the next decode overwrites the logits of the last one

    def get_logits(original, self, span, row):
        buffer = buffers.setdefault(id(self), np.zeros(self.vocabulary_size, dtype=np.float32))
        buffer[:] = original(self, span, row)
        return buffer

    wrap(FakeBackend, "get_logits", get_logits)(put)
    put(store_module, "copy_logits", lambda logits: logits)


@mutant("logits are found by the other salt, too", logits_laws.test_logits_are_not_shared_between_salts)
def _(put):
    wrap(RadixTree, "match", lambda original, self, entries, namespace="": original(self, entries, ""))(put)
    wrap(
        RadixTree, "insert", lambda original, self, entries, anchor, namespace="": original(self, entries, anchor, "")
    )(put)


@mutant("the checkpoint at the end of a prompt is not taken", logits_laws.test_a_repeat_computes_nothing)
def _(put):
    put(PrefixCache, "_is_worth_checkpoint", lambda self, sequence: False)


@mutant(
    "logits on disk are used without comparing the entries", logits_laws.test_damaged_logits_on_disk_are_computed_again
)
def _(put):
    put(tier.np, "array_equal", lambda one, other: True)


@mutant(
    "off the grid, deterministic mode stores last logits",
    logits_laws.test_in_deterministic_mode_repeats_are_equal_to_the_last_bit,
)
def _(put):
    def store_last_logits(original, self, sequence, logits):
        with patch.object(self, "grid", 0):
            original(self, sequence, logits)

    wrap(PrefixCache, "store_last_logits", store_last_logits)(put)


@mutant(
    "a sequence is truncated although it cannot resume there",
    checkpoint_laws.test_a_checkpoint_after_an_edit_is_not_used,
)
def _(put):
    put(Sequence, "can_resume_at", lambda self, length: True)


@mutant("cells before the sliding window count as present", checkpoint_laws.test_a_checkpoint_after_an_edit_is_not_used)
def _(put):
    def can_resume_at(original, self, seq_id, position):
        return self.capabilities.memory_kind == "window" or original(self, seq_id, position)

    wrap(FakeBackend, "can_resume_at", can_resume_at)(put)


@mutant(
    "a recurrent state is rolled back beyond the rows of the last decode",
    checkpoint_laws.test_recurrent_rollback_is_limited_to_the_last_decode,
)
def _(put):
    def can_resume_at(original, self, seq_id, position):
        dropped = self._kv_caches[seq_id].position - position
        return 0 <= dropped <= self.recurrent_snapshots or original(self, seq_id, position)

    wrap(FakeBackend, "can_resume_at", can_resume_at)(put)


@mutant(
    "a recurrent state is rolled back beyond the rows of the last decode in llama.cpp",
    llama_laws.test_recurrent_rollback_changes_no_token,
)
def _(put):
    def can_resume(original, self, sequence, position):
        positions = self.get_position_range(sequence)
        dropped = positions[1] + 1 - position if positions else 0
        return 0 <= dropped <= self._context.max_rollback or original(self, sequence, position)

    wrap(kv_memory.KVMemory, "can_resume", can_resume)(put)


@mutant(
    "a recurrent state is rolled back twice after one decode",
    checkpoint_laws.test_recurrent_rollback_works_once_per_decode,
)
def _(put):
    def truncate(original, self, seq_id, position):
        rows = self._kv_caches[seq_id].last_decode_rows
        original(self, seq_id, position)
        self._kv_caches[seq_id].last_decode_rows = rows

    wrap(FakeBackend, "truncate", truncate)(put)


# --- forks


@mutant(
    "copies between streams are applied with the next decode",
    sequence_laws.test_a_busy_sequence_is_forked_at_a_checkpoint,
)
def _(put):
    def copy(original, self, source, target, stop):
        self.__dict__.setdefault("late_copies", []).append((source, target, stop))
        self._kv_caches[target].position = stop
        return 0

    def decode(original, self, spans):
        for source, target, stop in self.__dict__.pop("late_copies", []):
            self._kv_caches[target] = FakeKVCache()
            original_copy(self, source, target, stop)
        original(self, spans)

    original_copy = FakeBackend.copy
    wrap(FakeBackend, "copy", copy)(put)
    wrap(FakeBackend, "decode", decode)(put)


@mutant("a prefix of any memory kind can be forked", sequence_laws.test_a_prompt_is_repeated_while_its_completion_runs)
def _(put):
    put(Capabilities, "can_fork_anywhere", property(lambda self: True))


@mutant(
    "a fork of a busy sequence is longer than its computed entries",
    engine_laws.test_concurrent_requests_prefill_a_common_prefix_once,
)
def _(put):
    def copy_from(original, self, source, length):
        nbytes = original(self, source, length)
        if source.busy:
            self.entry_buffer.append(self.entries[-1])
        return nbytes

    wrap(Sequence, "copy_from", copy_from)(put)


@mutant("a follower does not wait for its leader", engine_laws.test_concurrent_requests_prefill_a_common_prefix_once)
def _(put):
    put(Engine, "_follow_leader", lambda self, waiting, reuse_length: False)


@mutant(
    "a follower forks before its leader has computed the prefix",
    sequence_laws.test_a_common_prefix_is_prefilled_once_in_chunks,
)
def _(put):
    def is_following(waiting, running):
        waiting.leader_position -= 20
        follows = original(waiting, running)
        waiting.leader_position += 20
        return follows

    original = engine_module.is_following
    put(engine_module, "is_following", is_following)


# --- checkpoints


def replace_checkpoint_entries(choose: Callable[[Sequence], np.ndarray]) -> Callable[[Plant], None]:
    """Plant a checkpoint whose state belongs to other entries."""

    def take_checkpoint(original, self, sequence):
        original(self, sequence)
        checkpoints = self.checkpoints.all_checkpoints
        if checkpoints and checkpoints[-1].position == len(sequence):
            taken = checkpoints[-1]
            self.checkpoints.drop(taken)
            moved = Checkpoint(entries=choose(sequence).copy(), state=taken.state)
            checkpoints.append(moved)
            self.checkpoints.tree.insert(moved.entries, moved)

    return wrap(PrefixCache, "take_checkpoint", take_checkpoint)


@mutant("a checkpoint is taken one entry late", engine_laws.test_c3_a_new_conversation_reuses_the_system_prompt)
def _(put):
    replace_checkpoint_entries(lambda sequence: sequence.entries[:-1])(put)


@mutant("checkpoints of another branch are used", checkpoint_laws.test_a_checkpoint_after_an_edit_is_not_used)
def _(put):
    put(
        RadixTree,
        "iter_anchors_on_path",
        lambda self, match: (anchor for node in match.path[::-1] for anchor in node.anchors),
    )


@mutant("a checkpoint outlives its cells", checkpoint_laws.test_a_checkpoint_is_dropped_with_its_cells)
def _(put):
    put(PrefixCache, "_drop_orphaned_checkpoints", lambda self, **options: None)


@mutant(
    "a checkpoint is restored over other cells", checkpoint_laws.test_a_checkpoint_is_restored_over_its_own_cells_only
)
def _(put):
    def find_reusable_length(inputs, candidate, *, is_copy):
        deepest = next((found for found in inputs.checkpoints if found.position < len(inputs.prompt)), None)
        if deepest and len(candidate.slot) >= deepest.position:
            return deepest.position, deepest
        return original(inputs, candidate, is_copy=is_copy)

    original = planner._find_reusable_length
    put(planner, "_find_reusable_length", find_reusable_length)


@mutant(
    "cells after a restored checkpoint are not removed", engine_laws.test_c3_a_new_conversation_reuses_the_system_prompt
)
def _(put):
    def load(original, self, seq_id, state):
        cells = list(self._kv_caches[seq_id].cells)
        original(self, seq_id, state)
        if state.scope == "partial":
            self._kv_caches[seq_id].cells = cells

    wrap(FakeBackend, "load", load)(put)


@mutant("boundaries are ignored", engine_laws.test_c3_an_edited_last_message_computes_from_the_last_shared_boundary)
def _(put):
    original = prefix_cache.choose_checkpoint_positions
    put(prefix_cache, "choose_checkpoint_positions", lambda length, boundaries, *rest: original(length, (), *rest))


@mutant(
    "prefill does not pause at checkpoint positions",
    engine_laws.test_c3_a_new_conversation_reuses_the_system_prompt,
)
def _(put):
    def get_chunk_limit(self):
        return self.backlog if self.job.generated else len(self.job.prompt) - len(self.sequence)

    put(RunningJob, "get_chunk_limit", get_chunk_limit)


@mutant("thinning drops the newest checkpoint", checkpoint_laws.test_thinning_keeps_the_first_and_the_newest_checkpoint)
def _(put):
    put(checkpoints_module, "choose_positions_to_drop", lambda positions, limit: list(positions[limit:]))


@mutant("thinning drops the first checkpoint", checkpoint_laws.test_thinning_keeps_the_first_and_the_newest_checkpoint)
def _(put):
    put(
        checkpoints_module,
        "choose_positions_to_drop",
        lambda positions, limit: list(positions[: max(0, len(positions) - limit)]),
    )


@mutant("checkpoints are never thinned", checkpoint_laws.test_checkpoints_stay_within_their_number_and_bytes)
def _(put):
    put(checkpoints_module, "choose_positions_to_drop", lambda positions, limit: [])


@mutant(
    "only checkpoints before the newest are counted",
    regressions.test_a_checkpoint_counts_on_every_path_through_it,
)
def _(put):
    put(RadixTree, "find_descendants", lambda self, anchor: iter([anchor]))


@mutant("two checkpoints are taken at one position", regressions.test_equal_entries_have_one_checkpoint)
def _(put):
    def take_checkpoint(original, self, sequence):
        with patch.object(self.checkpoints, "has_checkpoint_at", lambda entries, salt: False):
            original(self, sequence)

    wrap(PrefixCache, "take_checkpoint", take_checkpoint)(put)


@mutant("the bytes of checkpoints are not counted", checkpoint_laws.test_checkpoints_stay_within_their_number_and_bytes)
def _(put):
    put(CheckpointStore, "evict_until_fits", lambda self, nbytes: True)


@mutant(
    "a checkpoint that does not load ends the engine", engine_laws.test_a_checkpoint_that_does_not_load_is_a_prefix_miss
)
def _(put):
    put(prefix_cache, "AfterglowError", KVCacheFull)


# --- slots


@mutant("a busy slot is evicted", preemption_laws.test_a_full_kv_cache_evicts_then_preempts_and_changes_no_token)
def _(put):
    def evict(original, self):
        if original(self):
            return True
        self.discard(next(slot for slot in self.slots if len(slot)))
        return True

    wrap(PrefixCache, "evict", evict)(put)


@mutant(
    "an evicted sequence stays in the tree",
    preemption_laws.test_a_full_kv_cache_evicts_then_preempts_and_changes_no_token,
)
def _(put):
    def evict(original, self):
        before = {slot: slot.entries.copy() for slot in self._idle_slots if len(slot)}
        evicted = original(self)
        for slot, entries in before.items():
            self._idle_tree.insert(entries, slot)
        return evicted

    wrap(PrefixCache, "evict", evict)(put)


@mutant(
    "a busy sequence stays in the tree of idle sequences",
    sequence_laws.test_a_sequence_is_restored_from_a_snapshot_and_from_a_fork,
)
def _(put):
    def acquire(original, self, plan, *salt, **options):
        entries = getattr(plan, "slot", None) and plan.slot.entries.copy()
        target, reused = original(self, plan, *salt, **options)
        if entries is not None:
            self._idle_tree.insert(entries, target)
        return target, reused

    wrap(PrefixCache, "acquire", acquire)(put)


@mutant("two jobs share a slot", engine_laws.test_concurrency_changes_no_token)
def _(put):
    def acquire(original, self, plan, *salt, **options):
        target, reused = original(self, plan, *salt, **options)
        target.busy = False
        self._idle_slots[target] = None
        return target, reused

    wrap(PrefixCache, "acquire", acquire)(put)


@mutant(
    "the named slot of a request is ignored", sequence_laws.test_a_named_slot_is_used_although_another_holds_the_prompt
)
def _(put):
    def plan(original, self, entries, *, slot=None, **options):
        return original(self, entries, **options)

    wrap(PrefixCache, "plan", plan)(put)


@mutant(
    "a preempted job is swapped into another slot than recorded",
    preemption_laws.test_a_full_kv_cache_evicts_then_preempts_and_changes_no_token,
)
def _(put):
    def load(original, self, entries, state):
        seq_id = self.seq_id
        self.seq_id = (seq_id + 1) % self._backend.capabilities.sequences
        original(self, entries, state)
        self.seq_id = seq_id

    wrap(Sequence, "load", load)(put)


@mutant(
    "a preempted job resumes while others run and preempts them",
    preemption_laws.test_a_full_kv_cache_evicts_then_preempts_and_changes_no_token,
)
def _(put):
    def swap_out(original, self, running):
        original(self, running)
        self._waiting[0].is_preempted = False

    wrap(Engine, "_swap_out", swap_out)(put)


@mutant("swapped bytes are the estimate", regressions.test_swapped_bytes_are_the_saved_size_and_not_the_estimate)
def _(put):
    put(Sequence, "nbytes", property(lambda self: 20 * len(self)))


@mutant("swapped bytes have no limit", preemption_laws.test_swapped_out_sequences_stay_within_swap_bytes)
def _(put):
    def swap_out(original, self, sequence):
        self._swap_limit_bytes = 10**9
        return original(self, sequence)

    wrap(PrefixCache, "swap_out", swap_out)(put)


@mutant(
    "the entries of a snapshot that does not load stay recorded",
    sequence_laws.test_a_damaged_snapshot_is_rejected_and_leaves_the_entries_correct,
)
def _(put):
    def load(original, self, entries, state):
        self.entry_buffer.truncate(0)
        self.append_decoded(entries)
        self._backend.load(self.seq_id, state)

    wrap(Sequence, "load", load)(put)
    put(snapshots, "InvalidState", KVCacheFull)


# --- failed decodes, cancels, ends of requests


@mutant(
    "the recorded entries are not repaired after a failed decode", engine_laws.test_a_failed_decode_changes_no_token
)
def _(put):
    def recover(self, jobs, error):
        for running in jobs:
            running.job.failed_decodes += 1

    put(Engine, "_recover", recover)


@mutant("recurrent states are assumed to survive an aborted decode", engine_laws.test_a_failed_decode_changes_no_token)
def _(put):
    put(Capabilities, "survives_abort", property(lambda self: True))


@mutant(
    "sequences outside of a failed decode are assumed to be intact",
    preemption_laws.test_a_failed_decode_changes_no_token_of_idle_sequences,
)
def _(put):
    put(Engine, "_clear_bystanders", lambda self, jobs: None)


@mutant("a restarted job samples its token again", preemption_laws.test_a_failed_decode_samples_no_token_twice)
def _(put):
    def start_job(original, self, waiting, **options):
        if waiting.job.generated:
            waiting.job.sampler.sample(np.zeros(self.backend.vocabulary_size, dtype=np.float32))
        return original(self, waiting, **options)

    wrap(Engine, "_start_job", start_job)(put)


@mutant("a restarted job loses its generated tokens", preemption_laws.test_a_failed_decode_samples_no_token_twice)
def _(put):
    def start_job(original, self, waiting, **options):
        waiting.job.generated.clear()
        return original(self, waiting, **options)

    wrap(Engine, "_start_job", start_job)(put)


@mutant(
    "a failed decode is retried without limit",
    engine_laws.test_repeated_decode_failures_end_the_request_and_not_the_engine,
)
def _(put):
    put(engine_module, "MAX_DECODE_ATTEMPTS", 10**9)


@mutant(
    "a cancel interrupts any decode",
    preemption_laws.test_a_cancel_interrupts_a_decode_only_if_no_other_request_loses_its_state,
)
def _(put):
    def cancel(original, self, request_id):
        original(self, request_id)
        if self._decoding_jobs:
            self.backend.interrupt()

    wrap(Engine, "cancel", cancel)(put)


@mutant("a late interrupt stops the next decode", preemption_laws.test_a_late_interrupt_stops_no_later_decode)
def _(put):
    put(FakeBackend, "clear_interrupt", lambda self: None)


@mutant("a cancelled waiting job stays in the queue", preemption_laws.test_a_cancelled_request_is_removed)
def _(put):
    def remove_job(original, self, job):
        waiting = [waiting for waiting in self._waiting if waiting.job is job]
        original(self, job)
        self._waiting.extend(waiting)

    wrap(Engine, "_remove_job", remove_job)(put)


@mutant("an invalid token reaches a decode", regressions.test_an_invalid_token_fails_only_its_own_request)
def _(put):
    def check_servable(request, entries, interner, backend):
        original(request, entries % backend.vocabulary_size, interner, backend)

    original = engine_module.check_servable
    put(engine_module, "check_servable", check_servable)


@mutant(
    "a late cancel affects the next request with that id",
    regressions.test_a_late_cancel_does_not_affect_the_next_request_with_that_id,
)
def _(put):
    def cancel(original, self, request_id):
        original(self, request_id)
        self._cancelled_ids.add(request_id)

    wrap(Engine, "cancel", cancel)(put)


@mutant("the deadline is ignored", engine_laws.test_a_deadline_ends_the_completion_with_the_tokens_so_far)
def _(put):
    put(Job, "has_deadline_passed", property(lambda self: False))


@mutant("a request ends twice", engine_laws.test_a_cancelled_request_leaves_its_entries_cached)
def _(put):
    def fail(original, self, job, error):
        original(self, job, error)
        self._events.append(Failed(job.request.id, error, job.build_usage()))

    wrap(Engine, "_fail", fail)(put)


@mutant("progress is reported after the end", engine_laws.test_concurrency_changes_no_token)
def _(put):
    def finish(original, self, job, *rest):
        original(self, job, *rest)
        self._events.append(PrefillProgress(job.request.id, 1, 1))

    wrap(Engine, "_finish", finish)(put)


@mutant(
    "a completion may use one cell too many",
    preemption_laws.test_a_completion_ends_when_its_sequence_is_full_and_evicts_nothing,
)
def _(put):
    def mark_running(original, self, waiting, sequence):
        original(self, waiting, sequence)
        self._running[-1].max_cells += 1

    wrap(Engine, "_mark_running", mark_running)(put)


@mutant(
    "a stop text is matched within one token only", engine_laws.test_stop_texts_and_stop_tokens_end_a_completion_exactly
)
def _(put):
    def feed(original, self, piece):
        self._tail = b""
        return original(self, piece)

    wrap(StopMatcher, "feed", feed)(put)


@mutant("concurrent requests share a sampler", engine_laws.test_several_completions_of_one_prompt_prefill_it_once)
def _(put):
    def create_sampler(original, self, sampling):
        return self.__dict__.setdefault("shared_sampler", original(self, sampling))

    wrap(FakeBackend, "create_sampler", create_sampler)(put)


@mutant("concurrent requests read each other's logits", engine_laws.test_concurrency_changes_no_token)
def _(put):
    wrap(FakeBackend, "get_logits", lambda original, self, span, row: original(self, 0, -1))(put)


# --- media entries


@mutant("cells are counted as positions", media_laws.test_reuse_and_concurrency_change_no_token_with_media)
def _(put):
    put(EntryInterner, "count_positions", EntryInterner.count_cells)


@mutant("a completion is limited by positions", regressions.test_a_completion_is_limited_by_cells_and_not_by_positions)
def _(put):
    def find_finish_cause(running, backend, token):
        running.sequence.cell_count = running.sequence.position
        return original(running, backend, token)

    original = verify._find_finish_cause
    put(verify, "_find_finish_cause", find_finish_cause)


@mutant("positions are counted as cells", media_laws.test_prompt_length_is_measured_in_cells)
def _(put):
    put(EntryInterner, "count_cells", EntryInterner.count_positions)


@mutant("entries are counted as positions", media_laws.test_reuse_and_concurrency_change_no_token_with_media)
def _(put):
    put(Sequence, "position_at", lambda self, length: length)


@mutant("media of one size are identical", media_laws.test_media_of_the_same_size_are_distinct)
def _(put):
    def intern_media(original, self, media):
        return original(self, dataclasses.replace(media, digest=b""))

    wrap(EntryInterner, "_intern_media", intern_media)(put)


# --- deterministic mode


deterministic = deterministic_laws.test_cold_warm_restored_forked_and_concurrent_runs_give_the_same_tokens


@mutant("reuse is not rounded down to the grid", deterministic)
def _(put):
    for module in (prefix_cache, planner, scheduler):
        put(module, "round_down_to_grid", lambda length, entries, grid: length)


@mutant("generated tokens count as computed on the grid", deterministic)
def _(put):
    def mark_running(original, self, waiting, sequence):
        original(self, waiting, sequence)
        sequence.prompt_length = self.backend.capabilities.cells_per_sequence

    wrap(Engine, "_mark_running", mark_running)(put)


@mutant(
    "a released sequence is not truncated to the grid",
    deterministic,
    deterministic_laws.test_an_idle_sequence_and_all_checkpoints_end_on_the_grid,
)
def _(put):
    put(PrefixCache, "_truncate_to_grid", lambda self, sequence: None)


@mutant("deterministic jobs share a decode", deterministic)
def _(put):
    def schedule_on_grid(jobs, grid):
        first = original(jobs, grid)
        others = [job for job in jobs if job.is_decoding and job is not first[0][0]] if first else []
        return [*first, *[(job, 1) for job in others]]

    original = engine_module.schedule_on_grid
    put(engine_module, "schedule_on_grid", schedule_on_grid)


@mutant("deterministic chunks do not end on the grid", deterministic)
def _(put):
    def schedule_on_grid(jobs, grid):
        return [(job, min(job.get_chunk_limit(), 20)) for job, _ in original(jobs, grid)]

    original = engine_module.schedule_on_grid
    put(engine_module, "schedule_on_grid", schedule_on_grid)


# --- RAM and disk tiers


@mutant("a block starts one cell early", tier_laws.test_stored_blocks_change_no_token)
def _(put):
    wrap(FakeCells, "copy_rows", lambda original, self, start, stop: original(self, start - (start > 0), stop))(put)


@mutant("a block is hashed without its predecessors", tier_laws.test_stored_blocks_change_no_token)
def _(put):
    wrap(BlockHasher, "hash_block", lambda original, self, parent, entries: original(self, b"", entries))(put)


@mutant("a stored prefix is reported longer than it is", tier_laws.test_stored_blocks_change_no_token)
def _(put):
    def find_stored_prefix(original, self, entries, salt):
        prefix = original(self, entries, salt)
        length = min(prefix.length + 1, len(entries))
        return dataclasses.replace(prefix, length=length, entries=entries[:length]) if prefix.length % 8 else prefix

    wrap(BlockTree, "find_stored_prefix", find_stored_prefix)(put)


@mutant(
    "stored cells are combined with the checkpoint of another position", tier_laws.test_stored_blocks_change_no_token
)
def _(put):
    def load_checkpoint_state(original, self, checkpoint):
        others = [other.state for other in self.checkpoints.all_checkpoints if other.position != checkpoint.position]
        return others[0] if others else original(self, checkpoint)

    wrap(TieredStore, "load_checkpoint_state", load_checkpoint_state)(put)


@mutant(
    "a prefix is evicted before the blocks after it",
    tier_laws.test_the_end_of_a_conversation_is_evicted_before_its_prefix,
)
def _(put):
    wrap(RamTier, "touch", lambda original, self, blocks, checkpoint=None: original(self, blocks[::-1], checkpoint))(
        put
    )


@mutant("freed bytes stay counted", tier_laws.test_stored_blocks_stay_within_their_bytes)
def _(put):
    def forget(original, self, block):
        if self.holds(block):
            self.budget.add("blocks", block.nbytes)
        original(self, block)

    wrap(RamTier, "forget", forget)(put)


@mutant("blocks are stored without eviction", tier_laws.test_stored_blocks_stay_within_their_bytes)
def _(put):
    put(RamTier, "evict_until_free", lambda self, nbytes, protected=None: True)


@mutant("pinned blocks are evicted", tier_laws.test_pinned_blocks_are_not_evicted)
def _(put):
    put(store_module, "find_expiry", lambda spans, index: 0.0)


@mutant("the checkpoint of a pin is evicted", pin_laws.test_a_pin_includes_the_checkpoint_it_is_restored_from)
def _(put):
    put(PinManager, "_sync_checkpoint_pins", lambda self: None)


@mutant("prefill does not pause at the end of a pin", pin_laws.test_a_pin_includes_the_checkpoint_it_is_restored_from)
def _(put):
    put(Pins, "find_positions", lambda self, entries, salt: [])


@mutant("pinned bytes have no limit", pin_laws.test_system_pins_give_way_to_newer_system_pins)
def _(put):
    put(PinManager, "limit", 10**9)


@mutant("swapped bytes are never released", tier_laws.test_swapped_bytes_are_released)
def _(put):
    put(PrefixCache, "release_swapped", lambda self, saved: None)


@mutant("stored blocks are shared between salts", tier_laws.test_salts_share_no_cached_prefix)
def _(put):
    wrap(BlockHasher, "get_root_key", lambda original, self, namespace: original(self, ""))(put)


@mutant("idle sequences are shared between salts", tier_laws.test_salts_share_no_cached_prefix)
def _(put):
    wrap(RadixTree, "get_root", lambda original, self, namespace="": original(self, "one"))(put)


@mutant(
    "a moved sequence leaves its cells behind",
    placement_laws.test_conversations_in_distant_sequences_are_computed_together,
)
def _(put):
    def move_to(original, self, empty):
        self.seq_id, empty.seq_id = empty.seq_id, self.seq_id

    wrap(Sequence, "move_to", move_to)(put)


@mutant(
    "busy sequences stay where they are",
    placement_laws.test_conversations_in_distant_sequences_are_computed_together,
)
def _(put):
    wrap(PrefixCache, "pack", lambda original, self, *_: 0)(put)


@mutant("busy sequences are shared between salts", tier_laws.test_salts_share_no_cached_prefix)
def _(put):
    def find_candidates(original, self, entries, namespace):
        before = {slot: slot.namespace for slot in self.slots}
        for slot in self.slots:
            slot.namespace = namespace if slot.busy else slot.namespace
        yield from original(self, entries, namespace)
        for slot, own_namespace in before.items():
            slot.namespace = own_namespace

    wrap(PrefixCache, "_find_candidates", find_candidates)(put)


@mutant(
    "adapters are not part of the lookup",
    adapter_laws.test_an_idle_sequence_and_its_checkpoints_are_reused_only_with_the_same_adapters,
)
def _(put):
    put(PrefixCache, "build_namespace", lambda self, salt, adapters=(): salt)


@mutant(
    "the scales of adapters are not part of the lookup",
    adapter_laws.test_an_idle_sequence_and_its_checkpoints_are_reused_only_with_the_same_adapters,
)
def _(put):
    put(prefix_cache, "build_adapter_key", lambda adapters, loaded: repr([loaded[name].digest for name, _ in adapters]))


@mutant(
    "adapters are found by their names",
    adapter_laws.test_stored_state_is_loaded_only_with_the_same_adapters,
)
def _(put):
    put(prefix_cache, "build_adapter_key", lambda adapters, loaded: repr(adapters) if adapters else "")


@mutant(
    "rows with different adapters share a decode",
    adapter_laws.test_concurrent_requests_with_different_adapters_never_share_a_decode,
)
def _(put):
    put(engine_module, "select_adapter_set", list)


@mutant("the largest adapter set goes first", adapter_laws.test_sets_take_turns_so_that_none_starves)
def _(put):
    def select(jobs):
        sets = [running.adapter_set for running in jobs]
        largest = max(sets, key=sets.count, default=())
        return [running for running in jobs if running.adapter_set == largest]

    put(engine_module, "select_adapter_set", select)


@mutant("requests without a token go first", adapter_laws.test_new_requests_of_one_set_do_not_starve_another)
def _(put):
    def select(jobs):
        newest = max(jobs, key=lambda running: running.job.submitted_at, default=None)
        return [running for running in jobs if running.adapter_set == newest.adapter_set]

    put(engine_module, "select_adapter_set", select)


@mutant(
    "a request follows a leader with other adapters",
    adapter_laws.test_concurrent_requests_with_different_adapters_never_share_a_decode,
)
def _(put):
    def find_leader(original, job, running, *args):
        running = list(running)
        before = [candidate.job.namespace for candidate in running]
        for candidate in running:
            candidate.job.namespace = job.namespace
        found = original(job, running, *args)
        for candidate, namespace in zip(running, before, strict=True):
            candidate.job.namespace = namespace
        return found

    original = engine_module.find_leader
    put(engine_module, "find_leader", lambda job, *args: find_leader(original, job, *args))


@mutant(
    "the entries of an activated adapter have no label",
    adapter_laws.test_an_activated_adapter_shares_the_prefix_before_its_invocation_with_the_base,
    adapter_laws.test_stored_state_of_an_activated_adapter_is_not_confused_with_that_of_the_base,
)
def _(put):
    put(EntryInterner, "label_token", lambda self, token, label: token)


@mutant(
    "labels are not part of the names of blocks",
    adapter_laws.test_stored_state_of_an_activated_adapter_is_not_confused_with_that_of_the_base,
)
def _(put):
    put(EntryInterner, "to_portable_entries", lambda self, entries: strip_labels(entries))
    put(EntryInterner, "to_portable_bytes", lambda self, entries: strip_labels(entries).tobytes())


@mutant(
    "a chunk continues beyond the invocation of an adapter",
    adapter_laws.test_the_base_reuses_what_an_activated_request_has_computed_before_its_invocation,
    adapter_laws.test_an_activated_adapter_shares_the_prefix_before_its_invocation_with_the_base,
)
def _(put):
    wrap(
        RunningJob,
        "get_chunk_limit",
        lambda original, self: len(self.job.prompt) - len(self.sequence) if self.job.adapters.start else original(self),
    )(put)


@mutant("the checksum of a file is not verified", tier_laws.test_a_damaged_file_changes_no_token)
def _(put):
    put(disk_files, "_verify_checksum", lambda header, payload: None)


@mutant("the entries of a file are not verified", tier_laws.test_a_file_with_other_entries_changes_no_token)
def _(put):
    class Numpy:
        array_equal = staticmethod(lambda left, right: True)

    put(tier, "np", Numpy)


@mutant("a crashed engine stores its KV cache", tier_laws.test_a_crashed_engine_does_not_store_its_kv_cache)
def _(put):
    wrap(PrefixCache, "close", lambda original, self, **options: original(self))(put)
