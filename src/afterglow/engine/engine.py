"""The engine: runs many requests on one backend, one decode per `step`. Synchronous; a host calls `step` in a loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS, PrefixCache
from afterglow.engine.kvcache.sequence import SavedSequence
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.sampling.stops import IndentMatcher, StopMatcher
from afterglow.engine.sampling.token_constraints import TokenConstraint, TokenConstraintFactory
from afterglow.engine.scheduling.admission import check_servable
from afterglow.engine.scheduling.job import Job, RunningJob, WaitingJob
from afterglow.engine.scheduling.media import MediaScheduler
from afterglow.engine.scheduling.scheduler import (
    BatchBudget,
    compute_max_batch,
    compute_prefill_budget,
    drop_paused,
    find_leader,
    is_following,
    limit_background_prefill,
    partition_jobs,
    pick_first,
    pick_victim,
    schedule,
    schedule_on_grid,
    select_adapter_set,
)
from afterglow.engine.slices import SlicedWork
from afterglow.engine.speculation.calibration import store_costs
from afterglow.engine.speculation.ngram import NgramDrafter
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.speculation.speculator import Drafter, Speculator
from afterglow.engine.types.adapters import ActiveAdapters, AdapterSet, build_adapter_key, resolve_adapters
from afterglow.engine.types.backend import Backend, DecodeSpan
from afterglow.engine.types.counters import EngineCounters, StoreReport
from afterglow.engine.types.entries import Entries, Entry, EntryInterner
from afterglow.engine.types.request import (
    EngineEvent,
    Failed,
    FinishCause,
    Finished,
    FinishReason,
    PlannedPrefix,
    PrefillProgress,
    Request,
)
from afterglow.engine.types.settings import EngineSettings
from afterglow.engine.verify import GetLogits, append_forced, drop_rejected, sample_and_verify
from afterglow.errors import AfterglowError, Cancelled, Closed, DecodeFailed, InvalidArgument, KVCacheFull

MAX_DECODE_ATTEMPTS = 3
MIN_JOBS_SAMPLED_TOGETHER = 4


@dataclass(slots=True)
class LaunchedDecode:
    """A decode that was started. A GPU may still compute it."""

    jobs: list[RunningJob]
    spans: list[DecodeSpan]
    started_at: float
    error: AfterglowError | None = None


class Engine:
    """Accepts requests and emits their events.

    >>> engine.submit(Request(id="a", entries=[1, 2, 3], max_tokens=8))
    >>> while engine.is_busy:
    ...     for event in engine.step():
    ...         print(type(event).__name__)
    PrefillProgress
    Token
    ...
    Finished
    """

    def __init__(
        self, backend: Backend, settings: EngineSettings | None = None, drafters: Sequence[Drafter] = ()
    ) -> None:
        """`drafters` are those that belong to the backend, in addition to the n-gram drafter."""
        capabilities = backend.capabilities
        if capabilities.max_outputs < capabilities.sequences:
            raise InvalidArgument("outputs", f"must be at least one for each of {capabilities.sequences} sequences")
        self.backend = backend
        self.settings = settings or EngineSettings()
        self.interner = EntryInterner()
        grid = self.settings.grid if self.settings.deterministic else 0
        self.prefix_cache = PrefixCache(backend, self.interner, self.settings, grid)
        self.counters = EngineCounters()
        rollback = Rollback(backend) if capabilities.can_replay else None
        drafters = [NgramDrafter(self.prefix_cache.store.ram), *drafters]
        self.speculator = Speculator(self.settings, capabilities, self.prefix_cache.cost_model, drafters, rollback)
        self.constraint_factory = TokenConstraintFactory(backend.token_bytes)  # thread-safe
        self.media_scheduler = MediaScheduler(backend.projector, self.interner, self.settings)
        self.sliced_work = SlicedWork()  # runs during decodes
        self.costs_path: Path | None = None  # file for the measured costs, for the next engine of the model
        self._max_media_rows = capabilities.batch_cells  # media rows that the next decode may hold
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[WaitingJob] = deque()
        self._running: list[RunningJob] = []
        self._launched: LaunchedDecode | None = None  # a decode that was started before the events of the last one
        self._is_packed = True  # no job started or ended since the placement of its sequences was decided
        self._events: list[EngineEvent] = []
        self._is_consistent = True  # False after a step that raised: the content of the KV cache is unknown then
        self._cancel_lock = threading.RLock()  # guards the two below: `cancel` may come from another thread
        self._decoding_jobs, self._cancelled_ids = list[RunningJob](), set[str]()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting_jobs(self) -> Sequence[Job]:
        """Jobs without a sequence."""
        return [waiting.job for waiting in self._waiting]

    @property
    def running_jobs(self) -> Sequence[RunningJob]:
        return self._running

    def submit(self, request: Request, token_constraint: TokenConstraint | None = None) -> None:
        """Accept a request, with its `token_constraint` if built beforehand. Raises if it can never be served."""
        check_servable(request, self.interner.intern(request.entries), self.interner, self.backend)
        entries, namespace, adapters = self.resolve_prompt(request.entries, request.salt, request.adapters)
        if request.id in self._jobs:
            raise InvalidArgument("id", f"{request.id!r} is being served already")
        token_constraint = token_constraint or self.constraint_factory.build(request)
        if self.settings.pin_system_prompts and request.system_length:
            self.prefix_cache.store.pin_manager.pin(entries[: request.system_length], namespace, is_system=True)
        job = Job(
            request=request,
            prompt=entries,
            namespace=namespace,
            adapters=adapters,
            stop_matcher=StopMatcher(request.stop) if request.stop else None,
            indent_matcher=IndentMatcher(request.min_indent) if request.min_indent else None,
            sampler=self.backend.create_sampler(request.sampling),
            token_constraint=token_constraint,
        )
        self.media_scheduler.add_job(job)
        self._jobs[request.id] = job
        self._waiting.append(WaitingJob(job=job))

    def resolve_prompt(
        self, entries: Sequence[Entry] | NDArray[np.int64], salt: str, adapters: AdapterSet
    ) -> tuple[Entries, str, ActiveAdapters]:
        """Return the interned entries of a prompt, the namespace of its cached state, and its active adapters.

        The namespace has the adapters that are active from the first entry on. One that becomes active later labels the
        entry from which on it is: what precedes this entry is shared with prompts without the adapter.
        """
        interned = self.interner.intern(entries)
        active, activated = resolve_adapters(adapters, self.backend.adapters, interned)
        if activated:
            label = build_adapter_key(activated, self.backend.adapters)
            interned = interned.copy()
            interned[active.start] = self.interner.label_token(int(interned[active.start]), label)
        return interned, self.prefix_cache.build_namespace(salt, active.head), active

    def cancel(self, request_id: str) -> None:
        """Cancel a request, from any thread. Interrupts a running decode if no other sequence loses its KV cache."""
        if request_id not in self._jobs:
            return
        with self._cancel_lock:
            self._cancelled_ids.add(request_id)
            cancelled = [running for running in self._decoding_jobs if running.job.request.id in self._cancelled_ids]
            capabilities = self.backend.capabilities
            is_harmless = capabilities.survives_abort or len(self._decoding_jobs) == 1
            if cancelled and capabilities.interruptible and is_harmless:
                self.backend.interrupt()

    def step(self) -> list[EngineEvent]:
        """Run at most one decode. Return the events since the last step."""
        self._is_consistent = False
        is_launched = self._launched is not None
        if is_launched:
            self._collect_launched()
        if self._launched is None:
            self._end_cancelled_and_expired()
        if not is_launched:
            self._admit_waiting()
            has_first_tokens = self._sample_last_logits()
            self._pack_sequences()
            if not has_first_tokens and not self._has_long_prefill_to_report():
                if batch := self._schedule():
                    self._decode(batch)
                elif self._running and not self._events:
                    with self.sliced_work.run_meanwhile("media"):
                        self.media_scheduler.wait()
        self.sliced_work.ensure_progress()
        self._is_consistent = True
        events, self._events = self._events, []
        return events

    def settle(self) -> list[EngineEvent]:
        """Finish the decode that was started ahead, if any. Return its events.

        Call it before anything but `step` and `cancel` uses the engine.
        """
        if self._launched is None:
            return []
        self._is_consistent = False
        self._collect_launched(may_launch=False)
        self._is_consistent = True
        events, self._events = self._events, []
        return events

    def explain(self, request: Request) -> Explanation:
        """Explain which prefix of this request's prompt is cached now, and why not more of it."""
        entries, namespace, _ = self.resolve_prompt(request.entries, request.salt, request.adapters)
        plan = self.prefix_cache.plan(
            entries, use_prefix_cache=request.use_prefix_cache, slot=request.sequence, namespace=namespace
        )
        return self.prefix_cache.explain(entries, plan, namespace)

    def write_through(self) -> None:
        """Store the sequences of the requests that have ended, if the settings say so: other processes wait for them.

        Call it before the next step, while the sequences are idle.
        """
        while self.settings.write_through and self._launched is None and self.prefix_cache.write_back(keep_all=True):
            pass

    def run_idle_task(self) -> bool:
        """Do one piece of deferred work. Return False if there is none."""
        return self.prefix_cache.write_back() or self.speculator.run_idle_task()

    def close(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> StoreReport:
        """Fail every request, write the prefix cache to disk within `store_timeout` seconds, and free all resources."""
        try:
            self.sliced_work.close(Closed("engine"))
            if self._is_consistent:
                self.settle()
            for job in list(self._jobs.values()):
                self._fail(job, Cancelled("the engine was closed"))
            report = self.prefix_cache.close(store_idle=self._is_consistent, timeout=store_timeout)
            if self.costs_path is not None:
                store_costs(self.costs_path, self.prefix_cache.cost_model)
            return report
        finally:
            self.speculator.close()
            self.media_scheduler.close()
            self.backend.close()

    # --- starting and ending jobs

    def _end_cancelled_and_expired(self) -> None:
        with self._cancel_lock:
            cancelled_ids, self._cancelled_ids = self._cancelled_ids, set()
        for request_id in cancelled_ids:
            if job := self._jobs.get(request_id):
                self._fail(job, Cancelled(f"request {request_id} was cancelled"))
        for job in [job for job in self._jobs.values() if job.request.deadline is not None and job.has_deadline_passed]:
            self._finish(job, "deadline")

    def _admit_waiting(self) -> None:
        self._inherit_priorities()
        for waiting in sorted(self._waiting, key=lambda waiting: -waiting.job.request.priority):
            if is_following(waiting, self._running):
                continue
            waiting.leader = None
            if waiting.is_preempted and self._running and self.backend.capabilities.kv_unified:
                break  # it would only preempt another job
            has_slot = self._resume_job(waiting)
            if not has_slot and waiting.job.request.sequence is None:
                if not self._preempt_for(waiting.job):
                    break  # the next job would not get a slot either
                self._resume_job(waiting, may_wait=False)  # otherwise others would take the slot

    def _inherit_priorities(self) -> None:
        """Give each leader the highest priority among its followers: they wait for its prefill."""
        for job in self._jobs.values():
            job.priority = job.request.priority
        for waiting in self._waiting:
            if waiting.leader is not None and is_following(waiting, self._running):
                waiting.leader.priority = max(waiting.leader.priority, waiting.job.priority)

    def _resume_job(self, waiting: WaitingJob, *, may_wait: bool = True) -> bool:
        """Start the job, or continue it from its swapped state. Return False if there is no slot."""
        saved = waiting.swapped_state
        return self._start_job(waiting, may_wait=may_wait) if saved is None else self._swap_in(waiting, saved)

    def _preempt_for(self, job: Job) -> bool:
        """Free the slot of a running job of lower priority. Return False if there is none."""
        victim = pick_victim(self._running) if self._running else None
        if victim is None or victim.job.priority >= job.priority:
            return False
        self._swap_out(victim, needs_cells=False)
        return True

    def _start_job(self, waiting: WaitingJob, *, may_wait: bool = True, is_retry: bool = False) -> bool:
        """Give the job a sequence with its cached prefix, or let it wait for that. Return False if there is no slot."""
        job, request = waiting.job, waiting.job.request
        may_search, is_blocking = may_wait and request.use_prefix_cache, not self._running
        if may_search and self.prefix_cache.search_shared_store(job.prompt, job.namespace, is_blocking=is_blocking):
            return True
        # In deterministic mode, generated tokens are computed one by one again: a prompt has computed them in chunks.
        entries = job.known_entries if job.generated and not self.settings.deterministic else job.prompt
        plan = self.prefix_cache.plan(
            entries, use_prefix_cache=request.use_prefix_cache, slot=request.sequence, namespace=job.namespace
        )
        if plan is None:
            return False
        if may_wait and (
            self._follow_leader(waiting, plan.reuse_length) or (self._running and self.prefix_cache.prefetch(plan))
        ):
            return True
        last_logits = None
        if plan.reuse_length == job.known_length:  # before the plan is applied: that may evict them
            last_logits = self.prefix_cache.load_last_logits(entries, job.namespace)
            if last_logits is None:  # damaged, and removed: plan again
                return self._start_job(waiting, may_wait=may_wait, is_retry=is_retry)
        planned = None  # before the plan is applied: that may drop the entries which differ
        if request.explained and not job.admitted_at:
            planned = self.prefix_cache.describe_plan(job.prompt, plan, job.namespace)
        sequence, reused = self.prefix_cache.acquire(plan, job.namespace, is_transient=request.is_transient)
        if plan.reuse_length and not reused and not is_retry:
            # A stored state did not load and was removed: plan again.
            self.prefix_cache.release(sequence)
            return self._start_job(waiting, may_wait=may_wait, is_retry=True)
        if not job.admitted_at:
            self._record_reuse(job, reused, planned)
        job.checkpoint_positions = self.prefix_cache.plan_checkpoints(
            sequence,
            job.prompt,
            request.boundaries | {job.adapters.start},  # prompts without the adapter diverge there
            frozenset(prefix.length for prefix in request.retained),
        )
        self._mark_running(waiting, sequence)
        if reused == job.known_length:
            self._running[-1].last_logits = last_logits
        return True

    def _record_reuse(self, job: Job, reused: int, planned: PlannedPrefix | None) -> None:
        """Record and report how many known entries of a new job are a prefix hit."""
        if not reused:
            self.prefix_cache.store.count_miss()
        self.media_scheduler.record_reuse(job, min(reused, len(job.prompt)))
        self.counters.reused_entries += min(reused, len(job.prompt))
        self._events.append(job.build_progress(reused, planned))

    def _follow_leader(self, waiting: WaitingJob, reuse_length: int) -> bool:
        """Make the job wait if a running job is computing more of its prefix than is cached. Return whether it does."""
        leader = find_leader(waiting.job, self._running, reuse_length, self.interner, self.prefix_cache.grid)
        if leader is None:
            return False
        waiting.leader, waiting.leader_position = leader
        waiting.leader.checkpoint_positions.append(waiting.leader_position)
        waiting.leader.priority = max(waiting.leader.priority, waiting.job.priority)
        self.counters.coalesced += 1
        return True

    def _mark_running(self, waiting: WaitingJob, sequence: Slot) -> None:
        job, max_cells = waiting.job, self.backend.capabilities.cells_per_sequence
        job.admitted_at = job.admitted_at or time.monotonic()
        self._waiting.remove(waiting)
        sequence.prompt_length = len(job.prompt)
        running = RunningJob(job=job, sequence=sequence, max_cells=max_cells, ready_since=self.counters.decodes)
        self._running.append(running)
        self._is_packed = False

    def _pack_sequences(self) -> None:
        """Make the sequences of the running jobs adjacent if that pays. Asked again when a job starts or ends."""
        if self._is_packed or any(running.sequence.partial_media_rows for running in self._running):
            return
        self._is_packed = True
        max_decodes = max([running.job.max_remaining_tokens for running in self._running], default=0)
        busy = [running.sequence for running in self._running]
        self.counters.moved_sequences += self.prefix_cache.pack(busy, max_decodes)

    def _finish(self, job: Job, reason: FinishReason, stop: bytes | int | None = None) -> None:
        """End a job for this reason, or for the one that it has if its last tokens were forced."""
        reason, stop = job.finish_cause or (reason, stop)
        sequence = next((running.sequence.number for running in self._running if running.job is job), None)
        self._events.append(Finished(job.request.id, reason, job.build_usage(sequence), stop))
        self._remove_job(job)
        self._retain_prefixes(job)

    def _retain_prefixes(self, job: Job) -> None:
        """Pin the prefixes that the request asks for, and restart the retention of those that it used."""
        pin_manager = self.prefix_cache.store.pin_manager
        pin_manager.use(job.prompt, job.namespace)
        for prefix in job.request.retained:
            entries = job.prompt[: prefix.length]
            pin_manager.pin(entries, job.namespace, retention_seconds=prefix.seconds)

    def _fail(self, job: Job, error: AfterglowError) -> None:
        self._events.append(Failed(job.request.id, error, job.build_usage()))
        self._remove_job(job)

    def _remove_job(self, job: Job) -> None:
        del self._jobs[job.request.id]
        job.sampler.close()
        self.media_scheduler.remove_job(job)
        self.speculator.release(job)
        for running in [running for running in self._running if running.job is job]:
            self._stop_running(running)
        for waiting in [waiting for waiting in self._waiting if waiting.job is job]:
            self._waiting.remove(waiting)
            if waiting.swapped_state is not None:
                self.prefix_cache.release_swapped(waiting.swapped_state)

    def _stop_running(self, running: RunningJob) -> None:
        self._running.remove(running)
        self._is_packed = False
        running.sequence.drop_partial_media()
        self.prefix_cache.release(running.sequence)

    # --- one decode

    def _has_long_prefill_to_report(self) -> bool:
        """Return whether a plan is reported before its prefill, which may take seconds. No stream waits for it."""
        has_plan = any(isinstance(event, PrefillProgress) and event.is_long for event in self._events)
        return has_plan and not any(running.is_decoding for running in self._running)

    def _schedule(self) -> list[tuple[RunningJob, int]]:
        now, cost_model = time.monotonic(), self.prefix_cache.cost_model
        ready = drop_paused(
            [running for running in self._running[:] if not running.job.media_indices or self._is_media_ready(running)],
            now,
        )
        if self.settings.deterministic:
            return schedule_on_grid(ready, self.settings.grid)
        cells = compute_max_batch(self.backend.capabilities, cost_model.latest_seconds_per_entry)
        decoding, prefilling, media_jobs = partition_jobs(ready)
        waiting_for_decode = decoding
        if self.backend.adapters:  # those with other adapters wait for this decode, too
            decoding, prefilling, media_jobs = partition_jobs(select_adapter_set(ready))
        has_prefill = bool(prefilling or media_jobs)
        entries = self._compute_prefill_entries(waiting_for_decode, prefilling, cells) if has_prefill else 0
        if self.media_scheduler.is_media_turn(media_jobs, has_other_work=bool(decoding or prefilling)):
            self._max_media_rows = entries
            return [(pick_first(media_jobs, now), 1)]
        self.speculator.propose_drafts(decoding, prefilling)
        budget = BatchBudget(cells=cells, prefill_entries=entries, row_tile=self.backend.capabilities.row_tile)
        return schedule(decoding, prefilling, budget, now)

    def _compute_prefill_entries(
        self, decoding: Sequence[RunningJob], prefilling: Sequence[RunningJob], cells: int
    ) -> int:
        """Return the prompt entries of the next decode, for which the `decoding` jobs wait."""
        cost_model, seconds_per_entry = self.prefix_cache.cost_model, self._estimate_seconds_per_entry(prefilling)
        interactive = sum(not running.job.is_background for running in decoding)
        entries = compute_prefill_budget(
            interactive,
            [running.backlog for running in prefilling],
            self.settings.max_token_gap,
            cost_model.seconds_per_step,
            seconds_per_entry,
            cells,
        )
        if prefilling and all(running.job.is_background for running in prefilling):
            entries = limit_background_prefill(
                entries,
                has_interactive_decoding=interactive > 0,
                seconds_per_step=cost_model.seconds_per_step,
                seconds_per_entry=seconds_per_entry,
            )
        return entries

    def _estimate_seconds_per_entry(self, prefilling: Sequence[RunningJob]) -> float:
        """Return the expected seconds of the next entries of these prompts, each."""
        cost_model = self.prefix_cache.cost_model
        if not prefilling:
            return cost_model.seconds_per_entry
        return cost_model.estimate_seconds_per_entry(after=max([running.sequence.position for running in prefilling]))

    def _is_media_ready(self, running: RunningJob) -> bool:
        """Return whether the job's next entry can be computed. Fail the job if its media cannot be encoded."""
        if self.media_scheduler.prepare_next(running):
            return True
        if (error := self.media_scheduler.get_error(running)) is not None:
            self._fail(running.job, error)
        return False

    def _decode(self, batch: list[tuple[RunningJob, int]]) -> None:
        spans = [running.build_span(count, self._max_media_rows) for running, count in batch]
        jobs = [running for running, _ in batch]
        self.speculator.prepare_decode(jobs, spans)
        self._collect(self._launch(jobs, spans))

    def _launch(self, jobs: list[RunningJob], spans: list[DecodeSpan]) -> LaunchedDecode:
        """Start a decode. On a CPU, it has ended when this returns."""
        launched = LaunchedDecode(jobs, spans, started_at=time.perf_counter())
        with self._cancel_lock:
            self._decoding_jobs = jobs
        try:
            with self.sliced_work.run_meanwhile("decode"):
                self.backend.decode(spans)
        except (KVCacheFull, Cancelled, DecodeFailed, InvalidArgument) as error:
            launched.error = error
        finally:
            with self._cancel_lock:
                self._decoding_jobs = []
                self.backend.clear_interrupt()
        return launched

    def _collect(self, launched: LaunchedDecode, *, may_launch: bool = True) -> None:
        """Process the result of a decode. If it `may_launch`, the next one is started meanwhile."""
        match launched.error:
            case None:
                self._process_decode(launched, may_launch=may_launch)
            case KVCacheFull() as error:
                self._free_cells(launched.jobs, error)
            case error:
                self._recover(launched.jobs, error)

    def _collect_launched(self, *, may_launch: bool = True) -> None:
        launched, self._launched = self._launched, None
        assert launched is not None
        self.speculator.propose_drafts(launched.jobs, [])  # none: it is asleep
        self._collect(launched, may_launch=may_launch)

    def _may_launch_ahead(self, jobs: list[RunningJob]) -> bool:
        """Return whether the decode after that of `jobs` can be started ahead, if all of them continue."""
        if not self.backend.capabilities.computes_ahead or self.settings.deterministic or not self.speculator.is_asleep:
            return False
        return len(jobs) == len(self._running) and not self._waiting and not self._cancelled_ids

    def _launch_ahead(self, launched: LaunchedDecode, first_tokens: dict[int, int | AfterglowError]) -> None:
        """Start the next decode before the events of this one are made, so that a GPU computes meanwhile.

        Only if it surely has one row of each job, and if nothing reads the logits of this one any more. So no job ends
        before the results are collected.
        """
        jobs, eog_tokens = launched.jobs, self.backend.eog_tokens
        if len(first_tokens) < len(jobs):
            return
        spans: list[DecodeSpan] = []
        for running, span, token in zip(jobs, launched.spans, first_tokens.values(), strict=True):
            if not isinstance(token, int) or span.outputs != 1 or not running.continues_after(token, eog_tokens):
                return
            following = DecodeSpan(span.sequence, [token], running.sequence.position, 1)
            following.adapters = span.adapters
            spans.append(following)
        self.counters.decodes_ahead += 1
        self._launched = self._launch(jobs, spans)

    def _process_decode(self, launched: LaunchedDecode, *, may_launch: bool) -> None:
        jobs, spans, started_at = launched.jobs, launched.spans, launched.started_at
        recomputed, first_event = 0, len(self._events)
        forced = sum([running.forced_entries for running in jobs])
        # First everything that needs no logits: a GPU is still computing them.
        for running, span in zip(jobs, spans, strict=True):
            if len(running.sequence) < len(running.job.prompt):
                self.counters.prompt_entries += span.rows
            recomputed += running.record_decode(span, started_at)
            running.ready_since = self.counters.decodes + 1
            if running.job.media_indices and span.completes_entry:
                self.media_scheduler.release_decoded(running)
        if forced:
            forced -= sum([running.forced_entries for running in jobs])  # those that this decode computed
        rows, draft_tokens = self.counters.record_decode(spans, recomputed)
        may_launch = may_launch and self._may_launch_ahead(jobs)
        self._wait_for_logits(spans)
        first_tokens = self._sample_first_tokens(jobs, spans, min_jobs=1 if may_launch else MIN_JOBS_SAMPLED_TOGETHER)
        if may_launch:
            self._launch_ahead(launched, first_tokens)
        tokens = self._sample_spans(jobs, spans, first_tokens)
        self.counters.encoded_media = self.media_scheduler.encoder_cache.encoded_count
        seconds = time.perf_counter() - started_at
        self._record_costs(spans, rows, rows - draft_tokens - recomputed, forced, tokens, seconds)
        if draft_tokens:
            self._add_savings_to_usage(jobs, first_event)

    def _sample_spans(
        self, jobs: list[RunningJob], spans: list[DecodeSpan], first_tokens: dict[int, int | AfterglowError]
    ) -> int:
        """Sample after each span with outputs, and report the progress of the other prompts. Return the tokens."""
        tokens = 0
        for index, (running, span) in enumerate(zip(jobs, spans, strict=True)):
            if span.outputs:
                tokens += self._sample_rows(running, index, len(span.entries) - span.outputs, first_tokens.get(index))
            elif span.completes_entry:
                job, length = running.job, len(running.sequence)
                self._events.append(job.build_progress(length))
                if length in job.checkpoint_positions and self.backend.capabilities.has_partial_state:
                    self.prefix_cache.take_checkpoint(running.sequence)
        return tokens

    def _record_costs(
        self, spans: list[DecodeSpan], rows: int, new_rows: int, forced: int, tokens: int, seconds: float
    ) -> None:
        """Record the seconds of a decode of `rows`, from which `tokens` were sampled.

        `new_rows` are those without draft tokens and recomputed entries. Of a decoding job, they are the newest token
        and the forced ones before it, `forced` of all jobs. A decode with more has prefill.
        """
        jobs = len(spans)
        if forced and new_rows == jobs + forced:  # its costs are neither those of a decode step nor of a prefill
            self.speculator.loss_budget.elapsed_seconds += seconds
        elif new_rows == jobs:
            self.prefix_cache.cost_model.record_decode_step(seconds)
            self.speculator.record_decode(rows, jobs, tokens, seconds)
        else:
            self.speculator.loss_budget.elapsed_seconds += seconds
            rows_and_cells = ((span.rows, span.position) for span in spans)
            self.prefix_cache.cost_model.record_prefill(rows, seconds, rows_and_cells)

    def _add_savings_to_usage(self, jobs: list[RunningJob], first_event: int) -> None:
        """Add what a decode has saved to the usage of the jobs that ended in it, whose events are the newest ones."""
        jobs_by_id = {running.job.request.id: running.job for running in jobs}
        for index, event in enumerate(self._events[first_event:], first_event):
            if isinstance(event, Finished | Failed):
                saved = jobs_by_id[event.request_id].speculation_seconds_saved
                self._events[index] = replace(event, usage=replace(event.usage, speculation_seconds_saved=saved))

    def _wait_for_logits(self, spans: list[DecodeSpan]) -> None:
        """Run sliced work, if any, until a GPU has computed the logits. On a CPU the decode itself has waited."""
        if not self.sliced_work:
            return
        for index, span in enumerate(spans):
            if span.outputs:
                # Sampling reports errors.
                with self.sliced_work.run_meanwhile("logits"), contextlib.suppress(AfterglowError):
                    self.backend.get_logits(index, len(span.entries) - span.outputs)
                return

    def _sample_last_logits(self) -> bool:
        """Sample the next tokens of the jobs whose known entries were all a prefix hit; return whether there are any.

        They are sampled from stored logits.
        """
        hits = [running for running in self._running if running.last_logits is not None]
        for running in hits:
            self.counters.skipped_prefills += 1
            self._sample(running, running.pop_last_logits)
        return bool(hits)

    def _sample_first_tokens(
        self, jobs: list[RunningJob], spans: list[DecodeSpan], min_jobs: int
    ) -> dict[int, int | AfterglowError]:
        """Sample the first tokens of many jobs together: the backend uses several threads. Return them by span.

        Jobs with a token constraint are sampled one after the other, and so are less than `min_jobs`.
        """
        if len(jobs) < min_jobs:
            return {}
        draws = [
            (index, len(span.entries) - span.outputs, running.job.sampler)
            for index, (running, span) in enumerate(zip(jobs, spans, strict=True))
            if span.outputs
            and running.job.token_constraint is None
            and running.job.request.max_tokens != 0
            and running.job.finish_cause is None
        ]
        if len(draws) < min_jobs:
            return {}
        return dict(zip([index for index, _, _ in draws], self.backend.sample_rows(draws), strict=True))

    def _sample_rows(
        self, running: RunningJob, index: int, first_row: int, first_token: int | AfterglowError | None
    ) -> int:
        """Sample after the last rows of the span at `index`. The logits after a prompt are stored for its repeats."""
        if not running.job.generated:
            self.prefix_cache.store_last_logits(running.sequence, self.backend.get_logits(index, first_row))
        return self._sample(running, lambda row: self.backend.get_logits(index, first_row + row), first_token)

    def _sample(
        self, running: RunningJob, get_logits: GetLogits, first_token: int | AfterglowError | None = None
    ) -> int:
        """Sample the job's next tokens after its last known entry. Return how many there are, without forced ones."""
        job = running.job
        job.first_token_at = job.first_token_at or time.monotonic()
        if job.request.max_tokens == 0 or job.finish_cause is not None:
            self._finish(job, "length")
            return 0
        generated_before, accepted_before = len(job.generated), job.accepted_token_count
        failure: AfterglowError | None = None
        finish_cause: FinishCause | None = None
        try:
            finish_cause = sample_and_verify(running, self.backend, get_logits, self._events, first_token)
        except AfterglowError as error:
            failure = error
        if running.draft:
            accepted = job.accepted_token_count - accepted_before
            self.speculator.record_verification(running, len(running.draft), accepted)
            self.counters.draft_steps += 1
            self.counters.draft_tokens += len(running.draft)
            self.counters.accepted_tokens += accepted
        sampled = len(job.generated) - generated_before
        is_intact = not running.draft or drop_rejected(running, self.speculator.rollback)
        may_be_forced = job.token_constraint is not None and not self.settings.deterministic
        if may_be_forced and failure is None and finish_cause is None and is_intact:
            try:
                finish_cause = append_forced(running, self.backend, self._events)
            except AfterglowError as error:
                failure = error
            self.counters.forced_tokens += running.forced_entries
        if failure is not None:
            self._fail(job, failure)
        elif finish_cause is not None:
            self._finish(job, *finish_cause)
        elif not is_intact:
            self._requeue(running)
        return sampled

    # --- preemption and recovery

    def _free_cells(self, jobs: list[RunningJob], error: KVCacheFull) -> None:
        """Free cells: stop drafting, else evict, else preempt the youngest job of the lowest priority.

        A job that runs alone ends.
        """
        if any(running.draft for running in jobs):
            return self.speculator.pause()
        if self.prefix_cache.evict():
            return
        victim = pick_victim(self._running)
        if len(self._running) > 1:
            self._swap_out(victim)
        elif victim.job.generated:
            self._finish(victim.job, "length")
        else:
            self._fail(victim.job, error)

    def _swap_out(self, running: RunningJob, *, needs_cells: bool = True) -> None:
        """Preempt a job. `needs_cells`: for its cells, so that it waits until other jobs have freed some."""
        running.sequence.drop_partial_media()
        saved = self.prefix_cache.swap_out(running.sequence)
        running.sequence.clear()
        self._requeue(running, saved, is_preempted=needs_cells)
        self.counters.preempted += 1

    def _swap_in(self, waiting: WaitingJob, saved: SavedSequence) -> bool:
        job = waiting.job
        plan = self.prefix_cache.plan(
            job.prompt, use_prefix_cache=False, slot=job.request.sequence, namespace=job.namespace
        )
        if plan is None:
            return False
        waiting.swapped_state = None
        self.prefix_cache.release_swapped(saved)
        sequence, _ = self.prefix_cache.acquire(plan, job.namespace, is_transient=job.request.is_transient)
        try:
            self.prefix_cache.load_evicting(sequence, lambda: sequence.load(saved.entries, saved.state))
        except AfterglowError:
            sequence.clear()
        self._mark_running(waiting, sequence)
        return True

    def _recover(self, jobs: list[RunningJob], error: AfterglowError) -> None:
        """Make the sequences consistent with the KV cache after a decode that failed or was interrupted."""
        self.counters.interrupted += isinstance(error, Cancelled)
        is_intact = self.backend.capabilities.survives_abort
        if not is_intact and len(jobs) > 1:
            self._clear_bystanders(jobs)
        for running in jobs:
            sequence = running.sequence
            sequence.repair(is_intact=is_intact)
            if not isinstance(error, Cancelled):
                running.job.failed_decodes += 1
            if running.job.failed_decodes >= MAX_DECODE_ATTEMPTS:
                self._fail(running.job, error)
            elif len(sequence) == 0:
                self._requeue(running)

    def _clear_bystanders(self, jobs: list[RunningJob]) -> None:
        """Clear the sequences outside of a failed decode of several recurrent ones.

        llama.cpp moves recurrent states so that those of a batch are adjacent. If it stops meanwhile, the others may
        be lost, too.
        """
        for slot in self.prefix_cache.slots:
            if not slot.busy and len(slot):
                self.prefix_cache.discard(slot)
        for running in [running for running in self._running if running not in jobs]:
            running.sequence.clear()
            self._requeue(running)

    def _requeue(
        self, running: RunningJob, swapped_state: SavedSequence | None = None, *, is_preempted: bool = False
    ) -> None:
        """Queue a job that lost its KV cache; it resumes from its swapped state or from its longest cached prefix."""
        self._stop_running(running)
        self._waiting.appendleft(WaitingJob(job=running.job, swapped_state=swapped_state, is_preempted=is_preempted))
