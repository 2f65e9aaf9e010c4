"""Planted bugs. Each breaks the engine, or the memory under it, in a way somebody might; a law must notice.

A mutant is a function that plants itself; it is listed with the laws that see it. One that nothing sees is a hole in
the laws: add a law, not an exception.
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
from afterglow.engine.kvcache import checkpoint_store, planner, prefix_cache
from afterglow.engine.kvcache.blocks import BlockHasher, BlockTree
from afterglow.engine.kvcache.checkpoint_store import CheckpointStore
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk import tier
from afterglow.engine.kvcache.pinning import PinManager
from afterglow.engine.kvcache.pins import Pins
from afterglow.engine.kvcache.planner import ReuseCandidate
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.kvcache.store import TieredStore
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.backend import Capabilities
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.request import Failed, PrefillProgress
from afterglow.errors import KVCacheFull
from afterglow.llama import kv_memory
from afterglow.testing import FakeBackend, FakeCells, FakeKVCache
from laws import test_laws_on_the_fake as laws
from laws import test_more_laws as more
from laws import test_pins as pinned
from laws import test_regressions as once
from laws import test_tiers as stored

Plant = Callable[[object, str, object], None]  # as `monkeypatch.setattr`


@dataclass(frozen=True)
class Mutant:
    name: str
    plant: Callable[[Plant], None]
    laws: tuple[Callable[..., None], ...]


MUTANTS: list[Mutant] = []


def mutant(name: str, *laws: Callable[..., None]) -> Callable[[Callable[[Plant], None]], None]:
    return lambda plant: MUTANTS.append(Mutant(name, plant, laws))


def wrapped(owner: object, name: str, around: Callable[..., object]) -> Callable[[Plant], None]:
    """Plant `around(original, self, *arguments)` in place of a method."""

    def plant(put: Plant) -> None:
        original = getattr(owner, name)
        put(owner, name, lambda self, *args, **named: around(original, self, *args, **named))

    return plant


# --- what is kept of a sequence


@mutant(
    "keep one entry more than is shared", laws.test_c3_an_edited_last_message_computes_from_the_last_shared_boundary
)
def _(put):
    def sources(original, self, *whose):
        for source in original(self, *whose):
            yield ReuseCandidate(source.slot, min(source.shared + 1, len(source.slot)), source.idle_seconds)

    wrapped(PrefixCache, "_find_candidates", sources)(put)


@mutant("trim memory one entry too late", laws.test_c3_an_edited_last_message_computes_from_the_last_shared_boundary)
def _(put):
    wrapped(FakeBackend, "truncate", lambda original, self, slot, at: original(self, slot, at + (at > 0)))(put)


@mutant(
    "the last entry of a known prompt is not computed again",
    laws.test_c8_the_same_prompt_again_computes_at_least_its_last_entry,
)
def _(put):
    def situation(*args, **named):
        return original(*args, **named | {"length": named["length"] + 1})

    original = prefix_cache.PlanInputs
    put(prefix_cache, "Situation", situation)


@mutant("trim where memory said no", more.test_a_checkpoint_behind_an_edit_is_of_no_use)
def _(put):
    put(Sequence, "can_resume_at", lambda self, length: True)


@mutant("a window that has passed counts as there", more.test_a_checkpoint_behind_an_edit_is_of_no_use)
def _(put):
    def resumable(original, self, sequence, position):
        return self.capabilities.memory == "window" or original(self, sequence, position)

    wrapped(FakeBackend, "can_resume_at", resumable)(put)


@mutant(
    "roll back deeper than the last decode had rows",
    more.test_a_recurrent_memory_goes_back_less_than_its_last_decode_and_no_further,
)
def _(put):
    def resumable(original, self, sequence, position):
        back = self._memory[sequence].position - position
        return 0 <= back <= self.recurrent_snapshots or original(self, sequence, position)

    wrapped(FakeBackend, "can_resume_at", resumable)(put)


@mutant("roll back deeper than the last decode had rows, in llama.cpp", more.test_rollback_changes_no_token_on_llama)
def _(put):
    def resumable(original, self, sequence, position):
        held = self.positions(sequence)
        back = held[1] + 1 - position if held else 0
        return 0 <= back <= self._context.max_rollback or original(self, sequence, position)

    wrapped(kv_memory.KVMemory, "can_resume", resumable)(put)


@mutant("roll back twice after one decode", more.test_a_recurrent_memory_goes_back_once_for_each_decode)
def _(put):
    def truncate(original, self, sequence, position):
        rows = self._memory[sequence].rows
        original(self, sequence, position)
        self._memory[sequence].rows = rows

    wrapped(FakeBackend, "truncate", truncate)(put)


# --- copies


@mutant(
    "copies between streams wait for the next decode",
    more.test_a_conversation_goes_on_in_a_copy_while_its_source_is_busy,
)
def _(put):
    def copy(original, self, source, target, stop):
        self.__dict__.setdefault("late", []).append((source, target, stop))
        self._memory[target].position = stop
        return 0

    def decode(original, self, spans):
        for source, target, stop in self.__dict__.pop("late", []):
            self._memory[target] = FakeKVCache()
            copied(self, source, target, stop)
        original(self, spans)

    copied = FakeBackend.copy
    wrapped(FakeBackend, "copy", copy)(put)
    wrapped(FakeBackend, "decode", decode)(put)


@mutant("a part of any memory can be copied", more.test_a_prompt_is_asked_again_while_it_is_answered)
def _(put):
    put(Capabilities, "can_fork_anywhere", property(lambda self: True))


@mutant(
    "a fork of a busy sequence is longer than what is computed", laws.test_requests_on_one_new_prefix_compute_it_once
)
def _(put):
    def copy_from(original, self, source, length):
        nbytes = original(self, source, length)
        if source.busy:
            self.entry_buffer.append(self.ids[-1])
        return nbytes

    wrapped(Sequence, "copy_from", copy_from)(put)


@mutant("a follower does not wait for its leader", laws.test_requests_on_one_new_prefix_compute_it_once)
def _(put):
    put(Engine, "_follow_leader", lambda self, job, keep: False)


@mutant("a follower forks before its leader is there", more.test_a_prompt_is_computed_once_in_chunks_too)
def _(put):
    def is_led(job, running):
        job.leader_position -= 20
        led = original(job, running)
        job.leader_position += 20
        return led

    original = engine_module.is_following
    put(engine_module, "is_led", is_led)


# --- checkpoints


def checkpoint_of(kept: Callable[[Sequence], np.ndarray]) -> Callable[[Plant], None]:
    def take(original, self, sequence):
        original(self, sequence)
        if self.checkpoints and self.checkpoints[-1].depth == len(sequence):
            taken = self.checkpoints[-1]
            self.checkpoints.drop(taken)
            moved = Checkpoint(entries=kept(sequence).copy(), state=taken.state, aligned=taken.aligned)
            self.checkpoints.append(moved)
            self.checkpoints.tree.insert(moved.entries, moved)

    return wrapped(PrefixCache, "take_checkpoint", take)


@mutant("a checkpoint is taken one entry late", laws.test_c3_a_new_conversation_shares_the_system_prompt)
def _(put):
    checkpoint_of(lambda sequence: sequence.entries[:-1])(put)


@mutant("checkpoints of another branch are used", more.test_a_checkpoint_behind_an_edit_is_of_no_use)
def _(put):
    put(
        RadixTree,
        "iter_anchors_on_path",
        lambda self, match: (anchor for node in match.path[::-1] for anchor in node.anchors),
    )


@mutant("a checkpoint outlives its cells", more.test_a_checkpoint_goes_when_its_cells_do)
def _(put):
    put(PrefixCache, "_drop_orphaned_checkpoints", lambda self: None)


@mutant("a checkpoint is laid over cells of something else", more.test_a_checkpoint_is_restored_over_its_own_cells_only)
def _(put):
    def usable(original, situation, source, *, copied):
        deepest = next((one for one in situation.checkpoints if one.depth < situation.length), None)
        if deepest and len(source.slot) >= deepest.depth:
            return deepest.depth, deepest
        return original(situation, source, copied=copied)

    original = planner._find_reusable_length
    put(planner, "_find_reusable_length", lambda *args, **named: usable(original, *args, **named))


@mutant("what lies behind a restored checkpoint stays", laws.test_c3_a_new_conversation_shares_the_system_prompt)
def _(put):
    def load(original, self, sequence, state):
        behind = list(self._memory[sequence].cells)
        original(self, sequence, state)
        if state.scope == "partial":
            self._memory[sequence].cells = behind

    wrapped(FakeBackend, "load", load)(put)


@mutant("boundaries are ignored", laws.test_c3_an_edited_last_message_computes_from_the_last_shared_boundary)
def _(put):
    original = prefix_cache.choose_checkpoint_positions
    put(prefix_cache, "cut_points", lambda length, boundaries, *rest: original(length, (), *rest))


@mutant(
    "a prompt runs past the places where it should stand still",
    laws.test_c3_a_new_conversation_shares_the_system_prompt,
)
def _(put):
    put(Job, "get_chunk_limit", lambda self: self.backlog if self.generated else len(self.prompt) - len(self.sequence))


@mutant("thinning drops the newest checkpoint", more.test_the_first_and_the_newest_checkpoint_stay)
def _(put):
    put(checkpoint_store, "thinned", lambda depths, limit: list(depths[limit:]))


@mutant("thinning drops the first checkpoint", more.test_the_first_and_the_newest_checkpoint_stay)
def _(put):
    put(checkpoint_store, "thinned", lambda depths, limit: list(depths[: max(0, len(depths) - limit)]))


@mutant("checkpoints are never thinned", more.test_checkpoints_have_a_number_and_a_size)
def _(put):
    put(checkpoint_store, "thinned", lambda depths, limit: [])


@mutant(
    "only the checkpoints before the newest are counted",
    once.test_a_checkpoint_in_the_middle_counts_for_every_path_through_it,
)
def _(put):
    put(RadixTree, "find_descendants", lambda self, anchor: iter([anchor]))


@mutant("two checkpoints are taken at one place", once.test_there_is_one_checkpoint_for_the_same_entries)
def _(put):
    def take(original, self, sequence):
        with patch.object(self.checkpoints, "has_checkpoint_at", lambda ids, salt: False):
            original(self, sequence)

    wrapped(PrefixCache, "take_checkpoint", take)(put)


@mutant("the bytes of checkpoints are not counted", more.test_checkpoints_have_a_number_and_a_size)
def _(put):
    put(CheckpointStore, "nbytes", property(lambda self: 0))


@mutant("a checkpoint that does not load ends the engine", laws.test_a_bad_checkpoint_is_a_miss)
def _(put):
    put(prefix_cache, "AfterglowError", KVCacheFull)


# --- which slot


@mutant("a busy slot is evicted", more.test_full_memory_evicts_then_parks_and_changes_no_token)
def _(put):
    def evict(original, self):
        if original(self):
            return True
        self.forget(next(slot for slot in self.slots if len(slot)))
        return True

    wrapped(PrefixCache, "evict", evict)(put)


@mutant("an evicted sequence can still be found", more.test_full_memory_evicts_then_parks_and_changes_no_token)
def _(put):
    def evict(original, self):
        before = {slot: slot.entries.copy() for slot in self._idle_slots if len(slot)}
        done = original(self)
        for slot, ids in before.items():
            self._idle.insert(ids, slot)
        return done

    wrapped(PrefixCache, "evict", evict)(put)


@mutant("a sequence in use can still be found as idle", more.test_a_sequence_comes_back_from_a_snapshot_and_from_a_fork)
def _(put):
    def begin(original, self, reuse, *salt):
        ids = getattr(reuse, "slot", None) and reuse.slot.ids.copy()
        target, kept = original(self, reuse, *salt)
        if ids is not None:
            self._idle.insert(ids, target)
        return target, kept

    wrapped(PrefixCache, "acquire", begin)(put)


@mutant("a slot is given to two jobs", laws.test_company_changes_no_token)
def _(put):
    def begin(original, self, reuse, *salt):
        target, kept = original(self, reuse, *salt)
        target.busy = False
        self._idle_slots[target] = None
        return target, kept

    wrapped(PrefixCache, "acquire", begin)(put)


@mutant("a named slot is not the one that is used", more.test_a_certain_slot_is_used_though_another_holds_the_prompt)
def _(put):
    def plan(original, self, ids, *, slot=None, **options):
        return original(self, ids, **options)

    wrapped(PrefixCache, "plan", plan)(put)


@mutant(
    "a parked job comes back into another slot than its record",
    more.test_full_memory_evicts_then_parks_and_changes_no_token,
)
def _(put):
    def load(original, self, ids, state, aligned):
        number = self.number
        self.number = (number + 1) % self._backend.capabilities.sequences
        original(self, ids, state, aligned)
        self.number = number

    wrapped(Sequence, "load", load)(put)


@mutant("a parked job comes back to push others out", more.test_full_memory_evicts_then_parks_and_changes_no_token)
def _(put):
    def park(original, self, job):
        original(self, job)
        job.is_preempted = False

    wrapped(Engine, "_swap_out", park)(put)


@mutant(
    "parked bytes are those that were expected", once.test_parked_bytes_are_what_was_saved_and_not_what_was_expected
)
def _(put):
    put(Sequence, "nbytes", property(lambda self: 20 * len(self)))


@mutant("parked jobs have no budget", more.test_parked_jobs_stay_within_their_bytes)
def _(put):
    def park(original, self, sequence):
        self._swap_limit_bytes = 10**9
        return original(self, sequence)

    wrapped(PrefixCache, "swap_out", park)(put)


@mutant(
    "a snapshot that does not load stays in the record",
    more.test_a_damaged_snapshot_is_refused_and_leaves_the_record_true,
)
def _(put):
    def load(original, self, ids, state, aligned):
        self.entry_buffer.truncate(0)
        self.decoded(ids)
        self._backend.load(self.number, state)

    wrapped(Sequence, "load", load)(put)
    put(snapshots, "InvalidState", KVCacheFull)


# --- failed decodes, cancels, ends


@mutant("a failed decode leaves the record as it was", laws.test_a_decode_that_fails_once_costs_time_and_no_token)
def _(put):
    def recover(self, jobs, error):
        for job in jobs:
            job.failed_decodes += 1

    put(Engine, "_recover", recover)


@mutant(
    "an aborted decode is thought to spare recurrent states", laws.test_a_decode_that_fails_once_costs_time_and_no_token
)
def _(put):
    put(Capabilities, "survives_abort", property(lambda self: True))


@mutant("a job that begins again draws again", more.test_a_failed_decode_draws_no_token_twice)
def _(put):
    def begin(original, self, job):
        if job.generated:
            job.sampler.sample(np.zeros(self.backend.vocabulary, dtype=np.float32))
        return original(self, job)

    wrapped(Engine, "_start_job", begin)(put)


@mutant("a job that begins again forgets what it said", more.test_a_failed_decode_draws_no_token_twice)
def _(put):
    def begin(original, self, job):
        job.generated.clear()
        return original(self, job)

    wrapped(Engine, "_start_job", begin)(put)


@mutant("a decode that fails is tried for ever", laws.test_a_decode_that_keeps_failing_ends_the_job_and_not_the_engine)
def _(put):
    put(engine_module, "MAX_DECODE_ATTEMPTS", 10**9)


@mutant("a cancel stops any decode", more.test_a_cancel_inside_a_decode_stops_it_only_where_nobody_else_loses_memory)
def _(put):
    def cancel(original, self, id):
        original(self, id)
        if self._decoding_jobs:
            self.backend.interrupt()

    wrapped(Engine, "cancel", cancel)(put)


@mutant("a late interruption stops the next decode", more.test_an_interruption_that_comes_too_late_stops_nobody)
def _(put):
    put(FakeBackend, "clear_interrupt", lambda self: None)


@mutant("a cancelled job that waits goes on waiting", more.test_a_cancelled_job_is_gone)
def _(put):
    def forget(original, self, job):
        waits = job in self._waiting
        original(self, job)
        if waits:
            self._waiting.append(job)

    wrapped(Engine, "_remove_job", forget)(put)


@mutant("a token that does not exist reaches a decode", once.test_a_token_that_does_not_exist_ends_its_own_request_only)
def _(put):
    def check(request, ids, ledger, backend):
        original(request, ids % backend.vocabulary, ledger, backend)

    original = engine_module.check_servable
    put(engine_module, "check_servable", check)


@mutant(
    "a late cancel waits for the next request of that name",
    once.test_a_cancel_of_what_has_ended_does_not_end_the_next_of_that_name,
)
def _(put):
    def cancel(original, self, id):
        original(self, id)
        self._cancelled_ids.add(id)

    wrapped(Engine, "cancel", cancel)(put)


@mutant("the deadline is ignored", laws.test_the_deadline_s_answer_is_what_there_is)
def _(put):
    put(Job, "has_deadline_passed", property(lambda self: False))


@mutant("a request ends twice", laws.test_a_cancelled_job_leaves_what_it_computed)
def _(put):
    def fail(original, self, job, error):
        original(self, job, error)
        self._events.append(Failed(job.request.id, error, job.build_usage()))

    wrapped(Engine, "_fail", fail)(put)


@mutant("progress is told after the end", laws.test_company_changes_no_token)
def _(put):
    def finish(original, self, job, *rest):
        original(self, job, *rest)
        self._events.append(PrefillProgress(job.request.id, 1, 1))

    wrapped(Engine, "_finish", finish)(put)


@mutant(
    "an answer may fill one cell more than there are",
    more.test_an_answer_ends_where_its_sequence_does_and_pushes_nobody_out,
)
def _(put):
    def submit(original, self, request):
        original(self, request)
        self._jobs[request.id].max_cells += 1

    wrapped(Engine, "submit", submit)(put)


@mutant("a stop text is only seen within one token", laws.test_stop_texts_and_stop_tokens_end_an_answer_exactly)
def _(put):
    def feed(original, self, piece):
        self._tail = b""
        return original(self, piece)

    wrapped(StopMatcher, "feed", feed)(put)


@mutant("neighbours share a sampler", laws.test_several_answers_to_one_prompt_share_it)
def _(put):
    def sampler(original, self, verify):
        self.__dict__.setdefault("one", original(self, verify))
        return self.one

    wrapped(FakeBackend, "create_sampler", sampler)(put)


@mutant("neighbours read each other's logits", laws.test_company_changes_no_token)
def _(put):
    wrapped(FakeBackend, "get_logits", lambda original, self, span, row: original(self, 0, -1))(put)


# --- pictures


@mutant("cells are taken for positions", more.test_reuse_and_company_change_no_token_with_pictures)
def _(put):
    put(EntryInterner, "count_positions", EntryInterner.count_cells)


@mutant("an answer ends where positions do", once.test_an_answer_ends_where_cells_do_and_not_where_positions_do)
def _(put):
    def ending(job, backend, token):
        job.sequence.cell_count = job.sequence.position
        return original(job, backend, token)

    original = verify._find_finish_cause
    put(verify, "_find_finish_cause", ending)


@mutant("positions are taken for cells", more.test_a_prompt_is_measured_in_cells)
def _(put):
    put(EntryInterner, "count_cells", EntryInterner.count_positions)


@mutant("entries are taken for positions", more.test_reuse_and_company_change_no_token_with_pictures)
def _(put):
    put(Sequence, "position_at", lambda self, length: length)


@mutant("pictures of one size are one picture", more.test_another_picture_of_the_same_size_is_another_picture)
def _(put):
    def number(original, self, media):
        return original(self, dataclasses.replace(media, digest=b""))

    wrapped(EntryInterner, "_intern_media", number)(put)


# --- deterministic mode


deterministic = more.test_deterministic_cold_warm_restored_forked_and_concurrent_give_the_same_tokens


@mutant("reuse is not rounded down to the grid", deterministic)
def _(put):
    put(PrefixCache, "round_down", lambda self, length, ids: length)


@mutant("generated tokens count as computed on the grid", deterministic)
def _(put):
    def note(self, count, grid):
        self.sequence.aligned = len(self.sequence)

    put(Job, "record_chunk", note)


@mutant("deterministic jobs share a decode", deterministic)
def _(put):
    def grid_step(original, jobs, grid, now):
        first = original(jobs, grid, now)
        others = [job for job in jobs if job.is_decoding and job is not first[0][0]] if first else []
        return [*first, *[(job, 1) for job in others]]

    original = engine_module.schedule_on_grid
    put(engine_module, "grid_step", lambda *args: grid_step(original, *args))


@mutant("deterministic chunks end anywhere", deterministic)
def _(put):
    def grid_step(original, jobs, grid, now):
        return [(job, min(job.get_chunk_limit(), 20)) for job, _ in original(jobs, grid, now)]

    original = engine_module.schedule_on_grid
    put(engine_module, "grid_step", lambda *args: grid_step(original, *args))


# --- what is stored


@mutant("a segment begins one cell early", stored.test_what_is_stored_changes_no_token)
def _(put):
    wrapped(FakeCells, "copy_rows", lambda original, self, start, stop: original(self, start - (start > 0), stop))(put)


@mutant("a segment is named by its own entries only", stored.test_what_is_stored_changes_no_token)
def _(put):
    wrapped(BlockHasher, "hash_block", lambda original, self, parent, ids: original(self, b"", ids))(put)


@mutant("a prompt is taken for longer than it is stored", stored.test_what_is_stored_changes_no_token)
def _(put):
    def cover(original, self, ids, salt, *, aligned):
        found = original(self, ids, salt, aligned=aligned)
        longer = min(found.length + 1, len(ids))
        return dataclasses.replace(found, length=longer, ids=ids[:longer]) if found.length % 8 else found

    wrapped(BlockTree, "find_stored_prefix", cover)(put)


@mutant("stored cells are used with the state of another depth", stored.test_what_is_stored_changes_no_token)
def _(put):
    def state(original, self, checkpoint):
        others = [one.state for one in self._marks.checkpoints if one.depth != checkpoint.depth]
        return others[0] if others else original(self, checkpoint)

    wrapped(TieredStore, "load_checkpoint_state", state)(put)


@mutant("a beginning goes before what builds on it", stored.test_the_end_of_a_conversation_goes_before_its_beginning)
def _(put):
    wrapped(RamTier, "touch", lambda original, self, segments, now: original(self, reversed(list(segments)), now))(put)


@mutant("bytes that are free are not counted so", stored.test_what_is_stored_keeps_to_its_bytes)
def _(put):
    def drop(original, self, segment):
        original(self, segment)
        self.block_bytes += segment.nbytes

    wrapped(RamTier, "drop", drop)(put)


@mutant("no room is made for what is stored", stored.test_what_is_stored_keeps_to_its_bytes)
def _(put):
    put(TieredStore, "evict_until_free", lambda self, nbytes, kept=None: True)


@mutant("what is pinned goes like the rest", stored.test_what_is_pinned_stays)
def _(put):
    put(TieredStore, "is_pinned", lambda self, ids, salt, start: False)


@mutant("the checkpoint of a pin goes like the rest", pinned.test_a_pin_has_the_checkpoint_that_it_is_restored_from)
def _(put):
    put(PinManager, "_sync_checkpoint_pins", lambda self: None)


@mutant("nothing stands still where a pin ends", pinned.test_a_pin_has_the_checkpoint_that_it_is_restored_from)
def _(put):
    put(Pins, "find_positions", lambda self, ids, salt: [])


@mutant("pins take whatever they like", pinned.test_pins_of_system_prompts_make_room_for_each_other)
def _(put):
    put(PinManager, "limit", 10**9)


@mutant("parked bytes are never given back", stored.test_parked_bytes_are_given_back)
def _(put):
    put(PrefixCache, "release_swapped", lambda self, saved: None)


@mutant("what is stored belongs to everybody", stored.test_no_salt_finds_what_another_computed)
def _(put):
    wrapped(BlockHasher, "get_root_key", lambda original, self, salt: original(self, ""))(put)


@mutant("what is idle belongs to everybody", stored.test_no_salt_finds_what_another_computed)
def _(put):
    wrapped(RadixTree, "get_root", lambda original, self, salt="": original(self, "one"))(put)


@mutant("what is running belongs to everybody", stored.test_no_salt_finds_what_another_computed)
def _(put):
    def sources(original, self, ids, salt):
        before = {slot: slot.salt for slot in self.slots}
        for slot in self.slots:
            slot.salt = salt if slot.busy else slot.salt
        yield from original(self, ids, salt)
        for slot, whose in before.items():
            slot.salt = whose

    wrapped(PrefixCache, "_find_candidates", sources)(put)


@mutant("a file is believed without its checksum", stored.test_a_damaged_file_changes_no_token)
def _(put):
    def load(path):
        view = disk_files._map_file(path)
        item, start = disk_files._parse_header(view)
        return disk_files.LoadedFile(item, view[start:])

    put(disk_files, "load_file", load)


@mutant("a file is believed without its entries", stored.test_a_file_of_other_entries_changes_no_token)
def _(put):
    class Numpy:
        array_equal = staticmethod(lambda one, other: True)

    put(tier, "np", Numpy)


@mutant("a crashed engine stores its memory", stored.test_an_engine_that_crashed_stores_nothing_of_what_it_was_doing)
def _(put):
    wrapped(PrefixCache, "close", lambda original, self, **options: original(self))(put)
