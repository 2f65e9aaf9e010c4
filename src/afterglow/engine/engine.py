"""The engine: many requests, one memory, one decode at a time. Synchronous; call `step` until nothing is left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.sampling.token_constraints import TokenConstraint, TokenConstraintFactory
from afterglow.engine.scheduling.admission import check_servable
from afterglow.engine.scheduling.job import Job
from afterglow.engine.scheduling.leading import find_leader, is_following
from afterglow.engine.scheduling.media import MediaScheduler
from afterglow.engine.scheduling.scheduler import (
    BatchBudget,
    compute_max_batch,
    compute_prefill_budget,
    partition_jobs,
    pick_first,
    schedule,
    schedule_on_grid,
)
from afterglow.engine.speculation.ngram import NgramDrafter
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.speculation.speculator import Drafter, Speculator
from afterglow.engine.types.backend import Backend, DecodeSpan
from afterglow.engine.types.counters import EngineCounters
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.request import EngineEvent, Failed, Finished, FinishReason, PrefillProgress, Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.engine.verify import FinishCause, drop_rejected, sample_and_verify
from afterglow.errors import AfterglowError, Cancelled, DecodeFailed, InvalidArgument, KVCacheFull

MAX_DECODE_ATTEMPTS = 3


class Engine:
    """Requests in, events out.

    >>> engine.submit(Request(id="a", entries=[1, 2, 3], max_tokens=8))
    >>> while engine.busy:
    ...     for event in engine.step():
    ...         print(event)
    """

    def __init__(
        self, backend: Backend, settings: EngineSettings | None = None, drafters: Sequence[Drafter] = ()
    ) -> None:
        """`drafters` are those that come with the backend, beside the ones that need nothing."""
        capabilities = backend.capabilities
        if capabilities.max_outputs < capabilities.sequences:
            raise InvalidArgument("outputs", f"must be at least one for each of {capabilities.sequences} sequences")
        self.backend = backend
        self.settings = settings or EngineSettings()
        self.interner = EntryInterner()
        grid = self.settings.grid if self.settings.deterministic else 0
        self.prefix_cache = PrefixCache(backend, self.interner, self.settings, grid)
        self.counters = EngineCounters()
        replay = Rollback(backend) if capabilities.can_replay and not capabilities.max_rollback else None
        self.speculator = Speculator(
            self.settings, capabilities, self.prefix_cache.cost_model, [NgramDrafter(), *drafters], replay
        )
        self.constraint_factory = TokenConstraintFactory(backend.token_bytes)  # for any thread
        self.media_scheduler = MediaScheduler(backend.projector, self.interner, self.settings)
        self._max_media_rows = capabilities.batch_cells  # that the next decode may hold of a picture
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._events: list[EngineEvent] = []
        self._is_consistent = True  # False after a step that crashed: nobody knows what memory holds then
        self._cancel_lock = threading.RLock()  # over these two: cancel may come from another thread
        self._decoding_jobs, self._cancelled_ids = list[Job](), set[str]()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    @property
    def has_started_decoding(self) -> bool:
        """Whether anything of anybody's prompt or answer was computed."""
        return any(job.last_decoded_at for job in self._running)

    def submit(self, request: Request, token_constraint: TokenConstraint | None = None) -> None:
        """Accept a request; its events come from `step`. A request that can never be served raises at once.

        `guide` is what `guides` made of it, where somebody did that beforehand.
        """
        ids = self.interner.intern(request.entries)
        check_servable(request, ids, self.interner, self.backend)
        if request.id in self._jobs:
            raise InvalidArgument("id", f"{request.id!r} is being served already")
        token_constraint = token_constraint or self.constraint_factory.build(request)
        if self.settings.pin_system_prompts and request.system_length:
            self.prefix_cache.store.pin_manager.pin(ids[: request.system_length], request.salt, is_system=True)
        stops = StopMatcher(request.stop) if request.stop else None
        sampler = self.backend.create_sampler(request.sampling)
        room = self.backend.capabilities.cells_per_sequence
        job = Job(
            request=request,
            prompt=ids,
            sampler=sampler,
            stop_matcher=stops,
            token_constraint=token_constraint,
            max_cells=room,
        )
        self.media_scheduler.add_job(job)
        self._jobs[request.id] = job
        self._waiting.append(job)

    def cancel(self, request_id: str) -> None:
        """End a request, from any thread. Inside a decode too, where that hurts nobody else's memory."""
        if request_id not in self._jobs:
            return
        with self._cancel_lock:
            self._cancelled_ids.add(request_id)
            doomed = [job for job in self._decoding_jobs if job.request.id in self._cancelled_ids]
            able = self.backend.capabilities
            if doomed and able.interruptible and (able.survives_abort or len(doomed) == len(self._decoding_jobs)):
                self.backend.interrupt()

    def step(self) -> list[EngineEvent]:
        """Do one decode's worth of work; what came of it."""
        self._is_consistent = False
        self._end_cancelled_and_expired()
        self._admit_waiting()
        if chosen := self._schedule():
            self._decode(chosen)
        elif self._running and not self._events:
            self.media_scheduler.wait()
        self._is_consistent = True
        events, self._events = self._events, []
        return events

    def admit(self) -> None:
        """Give memory to those who wait, as far as there is some. `step` does that, too; here there is more time."""
        self._is_consistent = False
        self._admit_waiting()
        self._is_consistent = True

    def explain(self, request: Request) -> Explanation:
        """What of this request's prompt is in memory now, and why not more of it could be used."""
        ids = self.interner.intern(request.entries)
        reuse = self.prefix_cache.plan(
            ids, use_prefix_cache=request.use_prefix_cache, slot=request.sequence, salt=request.salt
        )
        return self.prefix_cache.explain(ids, reuse, request.salt)

    def run_idle_task(self) -> bool:
        """Do something that can wait until nobody waits; False: there is nothing of the kind."""
        return self.prefix_cache.write_back() or self.speculator.run_idle_task()

    def close(self) -> None:
        """End every request, keep on disk what is worth it, and give memory back."""
        try:
            for job in list(self._jobs.values()):
                self._fail(job, Cancelled("the engine was closed"))
            self.prefix_cache.close(store_idle=self._is_consistent)
        finally:
            self.speculator.close()
            self.media_scheduler.close()
            self.backend.close()

    # --- beginning and ending jobs

    def _end_cancelled_and_expired(self) -> None:
        with self._cancel_lock:
            cancelled, self._cancelled_ids = self._cancelled_ids, set()
        for id in cancelled:
            if job := self._jobs.get(id):
                self._fail(job, Cancelled(f"request {id} was cancelled"))
        for job in [job for job in self._jobs.values() if job.has_deadline_passed]:
            self._finish(job, "deadline")

    def _admit_waiting(self) -> None:
        for job in sorted(self._waiting, key=lambda job: -job.request.priority):
            if is_following(job, self._running):
                continue
            job.leader = None
            if job.is_preempted and self._running and self.backend.capabilities.kv_unified:
                break  # it would only push somebody else out
            begun = self._start_job(job) if job.swapped_state is None else self._swap_in(job)
            if not begun and job.request.sequence is None:
                break  # no slot for this one is no slot for the next

    def _start_job(self, job: Job) -> bool:
        """Give the job memory to work in. False: there is no slot for it now."""
        known = np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)]) if job.generated else job.prompt
        request = job.request
        reuse = self.prefix_cache.plan(
            known, use_prefix_cache=request.use_prefix_cache, slot=request.sequence, salt=request.salt
        )
        if reuse is None:
            return False
        if self._follow_leader(job, reuse.reuse_length) or (self._running and self.prefix_cache.prefetch(reuse)):
            return True  # it waits for somebody else, or for the disk, and the others go on
        sequence, kept = self.prefix_cache.acquire(reuse, request.salt)
        if (
            reuse.reuse_length and not kept and not job.stored_load_failed
        ):  # a stored state did not load, and is gone now: plan again
            job.stored_load_failed = True
            self.prefix_cache.release(sequence)
            return self._start_job(job)
        if not job.admitted_at:
            self.media_scheduler.record_reuse(job, min(kept, len(job.prompt)))
            self.counters.reused_entries += min(kept, len(job.prompt))
        job.checkpoint_positions = self.prefix_cache.checkpoint_positions(sequence, job.prompt, request.boundaries)
        self._mark_running(job, sequence)
        return True

    def _follow_leader(self, job: Job, reuse_length: int) -> bool:
        """Whether somebody is computing more of this prompt's beginning than is there: then once is enough."""
        found = find_leader(job, self._running, reuse_length, self.interner, self.prefix_cache.round_down)
        if found is None:
            return False
        job.leader, job.leader_position = found
        job.leader.checkpoint_positions.append(job.leader_position)
        self.counters.coalesced += 1
        return True

    def _mark_running(self, job: Job, sequence: Slot) -> None:
        job.sequence, job.is_preempted, job.on_grid_length = sequence, False, sequence.aligned
        job.admitted_at = job.admitted_at or time.monotonic()
        self._waiting.remove(job)
        self._running.append(job)

    def _finish(self, job: Job, reason: FinishReason, stop: bytes | int | None = None) -> None:
        self._events.append(Finished(job.request.id, reason, job.build_usage(), stop))
        self._remove_job(job)

    def _fail(self, job: Job, error: AfterglowError) -> None:
        self._events.append(Failed(job.request.id, error, job.build_usage()))
        self._remove_job(job)

    def _remove_job(self, job: Job) -> None:
        del self._jobs[job.request.id]
        job.sampler.close()
        self.media_scheduler.remove_job(job)
        self.speculator.release(job)
        if job.swapped_state is not None:
            self.prefix_cache.release_swapped(job.swapped_state)
        if job in self._waiting:
            self._waiting.remove(job)
        else:
            self._stop_running(job)

    def _stop_running(self, job: Job) -> None:
        self._running.remove(job)
        sequence, job.sequence, job.entries_to_recompute = job.running_sequence, None, 0
        sequence.drop_partial_media()
        self.prefix_cache.release(sequence)

    # --- one decode

    def _schedule(self) -> list[tuple[Job, int]]:
        now, costs = time.monotonic(), self.prefix_cache.cost_model
        ready = [job for job in self._running[:] if not job.media_indices or self._is_media_ready(job)]
        if self.settings.deterministic:
            return schedule_on_grid(ready, self.settings.grid, now)
        cells = compute_max_batch(self.backend.capabilities, costs.latest_seconds_per_entry)
        generating, prompts, pictures = partition_jobs(ready)
        backlogs = [job.backlog for job in prompts]
        entries = compute_prefill_budget(
            len(generating),
            backlogs,
            self.settings.max_token_gap,
            costs.seconds_per_step,
            costs.seconds_per_entry,
            cells,
        )
        if self.media_scheduler.is_media_turn(pictures, has_other_work=bool(generating or prompts)):
            self._max_media_rows = entries
            return [(pick_first(pictures, now), 1)]
        self.speculator.propose_drafts(generating, prompts)
        return schedule(generating, prompts, BatchBudget(cells=cells, prefill_entries=entries), now)

    def _is_media_ready(self, job: Job) -> bool:
        """Whether the job's next entry can be computed. A picture that cannot be encoded ends it."""
        if self.media_scheduler.prepare_next(job):
            return True
        if (error := self.media_scheduler.get_error(job)) is not None:
            self._fail(job, error)
        return False

    def _decode(self, chosen: list[tuple[Job, int]]) -> None:
        spans = [job.build_span(count, self._max_media_rows) for job, count in chosen]
        jobs = [job for job, _ in chosen]
        self.speculator.prepare_decode(jobs)
        with self._cancel_lock:
            self._decoding_jobs = jobs
        started = time.perf_counter()
        try:
            self.backend.decode(spans)
        except KVCacheFull as error:
            self._free_cells(jobs, error)
            return
        except (Cancelled, DecodeFailed, InvalidArgument) as error:
            self._recover(jobs, error)
            return
        finally:
            with self._cancel_lock:
                self._decoding_jobs = []
                self.backend.clear_interrupt()
        self._process_decode(jobs, spans, started)

    def _process_decode(self, jobs: list[Job], spans: list[DecodeSpan], started_at: float) -> None:
        tokens = replayed = 0
        for job, span in zip(jobs, spans, strict=True):  # all that needs no logits: a GPU still computes them
            replayed += job.record_decode(span, started_at)
            if job.media_indices and span.completes_entry:
                self.media_scheduler.release_decoded(job)
            if self.settings.deterministic and span.completes_entry:
                job.record_chunk(len(span.entries), self.settings.grid)
        rows, guesses = self.counters.record_decode(spans, replayed)
        for index, (job, span) in enumerate(zip(jobs, spans, strict=True)):
            if span.outputs:
                tokens += self._sample(job, index, len(span.entries) - span.outputs)
            elif span.completes_entry:
                self._events.append(PrefillProgress(job.request.id, len(job.running_sequence), len(job.prompt)))
                self._checkpoint_if_due(job)
        answers = len(spans) if rows - guesses - replayed == len(spans) else 0
        self._record_timing(rows, answers, tokens, time.perf_counter() - started_at)

    def _record_timing(self, rows: int, decoding_jobs: int, tokens: int, seconds: float) -> None:
        """A decode took so long: of so many `answers` and nothing else, or with prompts in it."""
        self.counters.encoded_media = self.media_scheduler.encoder_cache.encoded_count
        if decoding_jobs:
            self.prefix_cache.cost_model.record_decode_step(seconds)
            self.speculator.record_decode(rows, decoding_jobs, tokens, seconds)
        else:
            self.counters.prompt_entries += rows
            self.speculator.loss_budget.elapsed_seconds += seconds
            self.prefix_cache.cost_model.record_prefill(rows, seconds)

    def _checkpoint_if_due(self, job: Job) -> None:
        if len(job.running_sequence) in job.checkpoint_positions and self.backend.capabilities.has_partial_state:
            self.prefix_cache.take_checkpoint(job.running_sequence)

    def _sample(self, job: Job, span: int, row: int) -> int:
        """Draw the job's next tokens, `row` being its last known entry; how many there are."""
        job.first_token_at = job.first_token_at or time.monotonic()
        if job.request.max_tokens == 0:
            self._finish(job, "length")
            return 0
        before, accepted = len(job.generated), job.accepted_token_count
        failure: AfterglowError | None = None
        ending: FinishCause | None = None
        try:
            ending = sample_and_verify(job, self.backend, span, row, self._events)
        except AfterglowError as error:
            failure = error
        if job.draft:
            self.speculator.record_verification(job, len(job.draft), job.accepted_token_count - accepted)
            self.counters.draft_steps += 1
            self.counters.draft_tokens += len(job.draft)
            self.counters.accepted_tokens += job.accepted_token_count - accepted
        whole = not job.draft or drop_rejected(job, self.speculator.rollback)
        if failure is not None:
            self._fail(job, failure)
        elif ending is not None:
            self._finish(job, *ending)
        elif not whole:
            self._requeue(job)
        return len(job.generated) - before

    # --- when memory is full, or a decode failed

    def _free_cells(self, jobs: list[Job], error: KVCacheFull) -> None:
        """Do without guesses; evict what is idle; else the youngest job steps aside; one that is alone ends."""
        if any(job.draft for job in jobs):
            return self.speculator.pause()
        if self.prefix_cache.evict():
            return
        youngest = max(self._running, key=lambda job: job.submitted_at)
        if len(self._running) > 1:
            self._swap_out(youngest)
        elif youngest.generated:
            self._finish(youngest, "length")
        else:
            self._fail(youngest, error)

    def _swap_out(self, job: Job) -> None:
        sequence = job.running_sequence
        sequence.drop_partial_media()
        job.swapped_state = self.prefix_cache.swap_out(sequence)
        sequence.clear()
        self._stop_running(job)
        self._waiting.appendleft(job)
        job.is_preempted = True
        self.counters.preempted += 1

    def _swap_in(self, job: Job) -> bool:
        reuse = self.prefix_cache.plan(
            job.prompt, use_prefix_cache=False, slot=job.request.sequence, salt=job.request.salt
        )
        if reuse is None:
            return False
        saved, job.swapped_state = job.swapped_state, None
        assert saved is not None
        self.prefix_cache.release_swapped(saved)
        sequence, _ = self.prefix_cache.acquire(reuse, job.request.salt)
        try:
            sequence.load(saved.entries, saved.state, saved.aligned)
        except AfterglowError:
            sequence.clear()
        self._mark_running(job, sequence)
        return True

    def _recover(self, jobs: list[Job], error: AfterglowError) -> None:
        """Make every record true again after a decode that stopped in the middle."""
        self.counters.interrupted += isinstance(error, Cancelled)
        for job in jobs:
            sequence = job.running_sequence
            sequence.repair(is_intact=self.backend.capabilities.survives_abort)
            if not isinstance(error, Cancelled):
                job.failed_decodes += 1
            if job.failed_decodes >= MAX_DECODE_ATTEMPTS:
                self._fail(job, error)
            elif len(sequence) == 0:
                self._requeue(job)

    def _requeue(self, job: Job) -> None:
        """The job has lost its memory: it begins again, from what there is."""
        self._stop_running(job)
        self._waiting.appendleft(job)
