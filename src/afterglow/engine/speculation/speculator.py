"""Speculator: chooses, before each decode, which drafter drafts for which job and how many tokens.

Verification happens in `engine/verify.py`; its results come back through `record_verification` and `record_decode`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from afterglow.engine.kvcache.cost_model import CostModel, RecentTimings
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.speculation.draft_length import DraftLength, LossBudget, choose_length
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.types.backend import Capabilities, DecodeSpan
from afterglow.engine.types.draft_stats import AcceptanceEstimator
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS, EngineSettings
from afterglow.errors import UnsupportedOption

DraftRequest: TypeAlias = tuple[RunningJob, int]
"""A decoding job and the most draft tokens it can use."""

# If drafting did not pay, it is tried again after this many plain decodes, then after twice as many each time.
INITIAL_RETRY_DECODES = 16
MAX_RETRY_DECODES = 1024
TRIAL_DRAFT_TOKENS = 2
INITIAL_ACCEPTANCE_RATE = 0.7  # prior without measurements: optimistic, so that drafting is tried
# After this many decodes with drafts, two plain decodes follow; the second refreshes the cost of a plain decode.
REFRESH_AFTER_DECODES = 48
RECHOOSE_AFTER_DECODES = 16  # lengths are chosen again after this many decodes, even without new verifications
SLEEP_DECODES = 8  # pause after no job could gain from drafting
EXPECTED_ANSWER_TOKENS = 256  # catching up has to pay off within this many tokens
MEMORY_FULL_PAUSE_DECODES = 16  # pause after draft tokens did not fit into the KV cache


class Drafter(Protocol):
    """Proposes the next tokens of jobs. Rejected draft tokens cost time and change nothing."""

    name: str

    def can_draft(self, running: RunningJob) -> bool:
        """Return whether it has draft tokens for this job now. Called before every decode, so it has to be cheap."""

    def get_draft_kind(self, running: RunningJob) -> str:
        """Return the kind of its drafts for a job it can draft for. Acceptance is estimated per kind."""

    def estimate_acceptance(self, running: RunningJob) -> float:
        """Return the prior acceptance rate of its next draft token for such a job."""

    def estimate_catch_up_entries(self, running: RunningJob) -> float:
        """Return what it must compute before it can draft, as target prompt entries of the same time; 0: negligible."""

    def catch_up(self, jobs: Sequence[RunningJob]) -> None:
        """Compute what is missing. `draft` does so, too, but would count the time as cost of its draft tokens."""

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the draft tokens of each job, at most as requested. The KV cache lacks only the newest token."""

    def release(self, job: Job) -> None:
        """Release what it holds for a job that has ended."""

    def run_idle_task(self) -> bool:
        """Do one piece of deferred work. Return False if there is none."""

    def close(self) -> None:
        """Free its resources."""


def choose_drafters(available: Sequence[Drafter], settings: EngineSettings) -> list[Drafter]:
    """Return all drafters, or those the settings name, in that order. `UnsupportedOption`: one is not available."""
    if settings.drafters is None:
        return list(available)
    by_name = {drafter.name: drafter for drafter in available}
    for name in settings.drafters:
        if name not in by_name:
            raise UnsupportedOption("drafters", f"{name!r} is not available here, only {', '.join(by_name)}")
    return [by_name[name] for name in settings.drafters]


class Speculator:
    """Requests as many draft tokens as are expected to pay, and learns from their verification."""

    def __init__(
        self,
        settings: EngineSettings,
        capabilities: Capabilities,
        cost_model: CostModel,
        drafters: Sequence[Drafter],
        rollback: Rollback | None = None,
    ) -> None:
        """`rollback` is for a KV cache that cannot always drop rejected draft tokens by itself."""
        self.rollback = rollback
        self.loss_budget = LossBudget()
        self._fixed_length = settings.speculation if isinstance(settings.speculation, int) else None
        is_enabled = settings.speculation != "off" and not settings.deterministic
        is_supported = capabilities.max_rollback > 0 or rollback is not None
        if is_enabled and self._fixed_length is not None and not is_supported:
            raise UnsupportedOption(
                "speculation",
                f"this {capabilities.memory_kind} KV cache can neither drop rejected draft tokens nor restore a state",
            )
        self._owned_drafters = list(drafters)
        chosen = choose_drafters(drafters, settings)
        self._drafters = chosen if is_enabled and is_supported else []
        self._capabilities = capabilities
        self._max_draft_tokens = min(MAX_DRAFT_TOKENS, capabilities.max_rollback or MAX_DRAFT_TOKENS)
        # If sequences have separate KV caches, llama.cpp computes rows of several sequences together only up to the
        # smallest row count; the excess rows take another pass. On a CPU that is most of the cost of draft tokens.
        self._splits_uneven_batches = capabilities.interruptible and not capabilities.kv_unified
        self._cost_model = cost_model
        self._acceptance_by_kind = defaultdict[str, AcceptanceEstimator](AcceptanceEstimator)
        self._retry_intervals = defaultdict[str, int](lambda: INITIAL_RETRY_DECODES)
        self._seconds_per_draft_token = {drafter.name: RecentTimings() for drafter in drafters}
        self._draft_seconds = 0.0  # spent on drafting for the next decode
        self._length_cache: dict[tuple[str, float, int, int, int | None], DraftLength] = {}
        self._measured_decodes = 0
        self._decode_count = 0
        self._paused_until = 0  # decode count before which no drafter is asked
        self._drafted_jobs: list[RunningJob] = []  # jobs with draft tokens in the next or last decode
        self._decodes_with_drafts = 0  # since the last measured plain decode
        self._last_plain_decode = 0, 0  # decode count and rows of the last decode without draft tokens
        self._verified_jobs: list[RunningJob] = []  # jobs with draft tokens in the last decode

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Names of the active drafters."""
        return tuple(drafter.name for drafter in self._drafters)

    @property
    def is_asleep(self) -> bool:
        """Whether the next decode has no draft tokens, whatever is sampled before it."""
        return not self._drafters or self._decode_count + 1 < self._paused_until

    def propose_drafts(self, decoding: Sequence[RunningJob], prefilling: Sequence[RunningJob]) -> None:
        """Set the draft tokens of decoding jobs for the next decode, which may also hold prefill chunks."""
        for running in self._drafted_jobs:
            running.draft = []
        self._drafted_jobs = []
        self._verified_jobs = []  # also after a decode with prefill, which is not measured
        self._draft_seconds = 0.0
        self._decode_count += 1
        if self._decode_count < self._paused_until or not self._drafters:
            return
        rows = len(decoding)
        if self._fixed_length is None and not (decoding and not prefilling and self._can_draft(rows)):
            return
        # Jobs with entries before the newest token are left out: drafters assume that only that one is missing.
        drafters_by_job = {
            running: drafters
            for running in decoding
            if not running.entries_before_newest
            and (drafters := [drafter for drafter in self._drafters if drafter.can_draft(running)])
        }
        if not drafters_by_job:
            return
        spare_rows = self._get_spare_rows(rows + len(prefilling), rows)
        choices = self._choose_lengths(drafters_by_job, rows, spare_rows)
        if not any(choices.values()):
            self._paused_until = self._decode_count + SLEEP_DECODES
            return
        for rank in range(len(self._drafters)):
            for drafter in self._drafters:
                draft_requests = self._collect_draft_requests(drafter, rank, choices, spare_rows)
                spare_rows -= self._request_drafts(drafter, draft_requests)

    def _can_draft(self, rows: int) -> bool:
        """Return whether a decode of `rows` decoding rows may have draft tokens.

        Not called for decodes with prefill: they compute as many rows as they can anyway, and draft tokens would only
        make them longer.
        """
        return (
            self.loss_budget.has_credit
            and self._decodes_with_drafts < REFRESH_AFTER_DECODES
            and self._cost_model.step_costs.is_measured(rows)
        )

    def _get_spare_rows(self, running: int, decoding: int) -> int:
        """Return the draft tokens that fit into one decode: every job needs a row, and an output after its last row.

        Row counts that were not measured yet are approached in steps: at most twice the largest measured one.
        """
        free = min(self._capabilities.max_outputs - running, self._capabilities.batch_cells - decoding)
        measured = self._cost_model.step_costs.max_measured_rows - (1 if self._splits_uneven_batches else decoding)
        return free if self._fixed_length is not None else min(free, max(TRIAL_DRAFT_TOKENS * decoding, 2 * measured))

    def _get_max_length(self, running: RunningJob, spare_rows: int) -> int:
        """Return the most draft tokens that a job can use, compute and roll back."""
        if running.job.draft_stats.disabled:
            return 0
        wanted = (
            MAX_DRAFT_TOKENS
            if running.job.request.max_tokens is None
            else running.job.request.max_tokens - len(running.job.generated) - 1
        )
        free_cells = running.max_cells - running.sequence.cell_count - 1
        return max(0, min(self._max_draft_tokens, wanted, free_cells, spare_rows))

    def _choose_lengths(
        self, drafters_by_job: dict[RunningJob, list[Drafter]], rows: int, spare_rows: int
    ) -> dict[RunningJob, list[tuple[Drafter, int]]]:
        """Return for each job the drafters that would speed it up, most promising first, with their draft lengths.

        If draft tokens cost only their rows, each job is decided alone; otherwise all jobs of a drafter draft alike.
        """
        draft_alike = rows > 1 and self._fixed_length is None and self._splits_uneven_batches
        options: dict[RunningJob, list[tuple[float, Drafter, int]]] = {running: [] for running in drafters_by_job}
        for drafter in self._drafters:
            jobs = [running for running, drafters in drafters_by_job.items() if drafter in drafters]
            for group in [jobs] if draft_alike else [[running] for running in jobs]:
                for running, choice in self._choose_group_lengths(group, drafter, rows, spare_rows).items():
                    options[running].append((-choice.speedup, drafter, choice.length))
        return {
            running: [(drafter, length) for _, drafter, length in sorted(job_options, key=lambda option: option[0])]
            for running, job_options in options.items()
        }

    def _choose_group_lengths(
        self, group: Sequence[RunningJob], drafter: Drafter, rows: int, spare_rows: int
    ) -> dict[RunningJob, DraftLength]:
        """Return the draft lengths of jobs that draft alike. If drafting does not pay, one job retries it sometimes."""
        limits = {
            running: limit for running in group if (limit := self._get_max_length(running, spare_rows // len(group)))
        }
        if self._fixed_length is not None or not limits:
            return {running: DraftLength(min(self._fixed_length or 0, limit), 1.0) for running, limit in limits.items()}
        for running in limits:
            running.job.draft_stats.last_decode = running.job.draft_stats.last_decode or self._decode_count
        drafting_jobs = len(limits) if self._splits_uneven_batches else None
        acceptance_rate, max_length = self._estimate_acceptance(limits, drafter), max(limits.values())
        choice = self._find_best_length(drafter.name, acceptance_rate, max_length, rows, drafting_jobs)
        jobs = list(limits)
        if choice.length:
            self._retry_intervals.update((drafter.get_draft_kind(running), INITIAL_RETRY_DECODES) for running in jobs)
        else:
            choice = DraftLength(TRIAL_DRAFT_TOKENS, 0.0)
            jobs = [
                running
                for running in jobs
                if self._decode_count - running.job.draft_stats.last_decode
                >= self._retry_intervals[drafter.get_draft_kind(running)]
            ][:1]
        return {
            running: DraftLength(min(choice.length, limits[running]), choice.speedup)
            for running in jobs
            if self._should_catch_up(running, drafter, rows, choice.speedup)
        }

    def _estimate_acceptance(self, group: Iterable[RunningJob], drafter: Drafter) -> float:
        """Return the mean acceptance rate of a drafter over a group of jobs."""
        kinds = [(running, drafter.get_draft_kind(running)) for running in group]
        rates = [
            running.job.draft_stats.estimate_acceptance(
                kind, self._acceptance_by_kind[kind].estimate(drafter.estimate_acceptance(running))
            )
            for running, kind in kinds
        ]
        return round(sum(rates) / len(rates), 2)

    def _should_catch_up(self, running: RunningJob, drafter: Drafter, rows: int, speedup: float) -> bool:
        """Return whether catching up on a job would pay off before its completion ends, within the loss budget."""
        catch_up_seconds = drafter.estimate_catch_up_entries(running) * self._cost_model.seconds_per_entry
        if not catch_up_seconds:
            return True
        expected_tokens = (
            EXPECTED_ANSWER_TOKENS
            if running.job.request.max_tokens is None
            else min(EXPECTED_ANSWER_TOKENS, running.job.request.max_tokens)
        )
        step_seconds = self._estimate_seconds(rows, rows)
        saved_seconds = (
            max(0, expected_tokens - len(running.job.generated)) * step_seconds * (1 - 1 / speedup)
            if speedup > 1
            else catch_up_seconds
        )
        return catch_up_seconds <= saved_seconds and self.loss_budget.can_afford(catch_up_seconds, step_seconds)

    def _find_best_length(
        self, name: str, acceptance_rate: float, max_length: int, rows: int, drafting_jobs: int | None
    ) -> DraftLength:
        key = name, acceptance_rate, max_length, rows, drafting_jobs
        if key not in self._length_cache:
            self._length_cache[key] = choose_length(
                acceptance_rate,
                max_length,
                lambda count: self._estimate_seconds(count, rows, drafting_jobs),
                rows=rows,
                drafting_jobs=drafting_jobs,
                seconds_per_draft_token=self._seconds_per_draft_token[name].seconds,
                save_seconds=self._save_seconds,
            )
        return self._length_cache[key]

    @property
    def _save_seconds(self) -> float | None:
        """Seconds to save a state, if that is necessary for every draft."""
        if self.rollback is None or self._capabilities.max_rollback:
            return None
        return self.rollback.seconds_per_state.value

    def _estimate_seconds(self, rows: int, jobs: int, drafting_jobs: int | None = None) -> float:
        """Return the expected seconds of a decode: one row per job, and draft tokens for `drafting_jobs` of them."""
        step_costs = self._cost_model.step_costs
        seconds_per_row = min(self._cost_model.seconds_per_entry, self._cost_model.seconds_per_step)
        if self._is_single_pass(rows, jobs, drafting_jobs):
            return step_costs.estimate_seconds(rows, seconds_per_row)
        first_pass_seconds = step_costs.estimate_seconds(jobs, seconds_per_row)
        return first_pass_seconds + step_costs.estimate_seconds(rows - jobs, seconds_per_row)

    def _is_single_pass(self, rows: int, jobs: int, drafting_jobs: int | None) -> bool:
        return not self._splits_uneven_batches or jobs in (1, rows, drafting_jobs)

    def _collect_draft_requests(
        self, drafter: Drafter, rank: int, choices: dict[RunningJob, list[tuple[Drafter, int]]], spare_rows: int
    ) -> list[DraftRequest]:
        """Return the requests for a drafter: jobs without a draft whose choice at `rank` it is."""
        draft_requests: list[DraftRequest] = []
        for running, options in choices.items():
            if not running.draft and rank < len(options) and options[rank][0] is drafter:
                length = min(options[rank][1], spare_rows)
                if length > 0:
                    draft_requests.append((running, length))
                    spare_rows -= length
        return draft_requests

    def _request_drafts(self, drafter: Drafter, draft_requests: list[DraftRequest]) -> int:
        """Set the drafts of these jobs. Return the number of draft tokens; those a constraint forbids are cut off."""
        if not draft_requests:
            return 0
        behind = [running for running, _ in draft_requests if drafter.estimate_catch_up_entries(running)]
        started = time.perf_counter()
        if behind:
            drafter.catch_up(behind)
            catch_up_seconds = time.perf_counter() - started
            self.loss_budget.record_catch_up(catch_up_seconds)
            for running in behind:
                running.job.speculation_seconds_saved -= catch_up_seconds / len(behind)
            started = time.perf_counter()
        drafts = drafter.draft(draft_requests)
        seconds = time.perf_counter() - started
        total = 0
        for (running, limit), draft in zip(draft_requests, drafts, strict=True):
            tokens = draft[:limit]
            if tokens and running.job.token_constraint is not None:
                tokens = tokens[: running.job.token_constraint.count_allowed(tokens)]
            running.draft = tokens
            self._drafted_jobs.append(running)
            running.job.draft_stats.last_kind = drafter.get_draft_kind(running)
            total += len(tokens)
        timings = self._seconds_per_draft_token[drafter.name]
        if len(timings):  # the first time is a warm-up and not charged
            self._draft_seconds += seconds
        if total:
            timings.add(seconds / total)
        return total

    def prepare_decode(self, jobs: Sequence[RunningJob], spans: Sequence[DecodeSpan]) -> None:
        """Save states before a decode after which rejected draft tokens cannot be dropped."""
        if self.rollback is not None and self._drafters:
            self._draft_seconds += self.rollback.save(jobs, spans)

    def record_verification(self, running: RunningJob, draft_tokens: int, accepted_tokens: int) -> None:
        """Record how many of a job's draft tokens were computed and accepted."""
        stats = running.job.draft_stats
        kind = stats.last_kind
        running.job.draft_token_count += draft_tokens
        running.job.draft_steps += 1
        self._verified_jobs.append(running)
        stats.last_decode = self._decode_count
        stats.update(kind, draft_tokens, accepted_tokens)
        self._acceptance_by_kind[kind].update(draft_tokens, accepted_tokens)
        self._retry_intervals[kind] = min(MAX_RETRY_DECODES, 2 * self._retry_intervals[kind])

    def record_decode(self, rows: int, jobs: int, tokens: int, seconds: float) -> None:
        """Record a decode without prefill: its rows, jobs, generated tokens and duration."""
        if not self._drafters:
            return
        restore_seconds = 0.0 if self.rollback is None else self.rollback.finish_decode()
        self._measured_decodes += 1
        if self._measured_decodes % RECHOOSE_AFTER_DECODES == 0 or rows > jobs:
            self._length_cache.clear()
        if rows == jobs:
            # The first one after a decode of another shape takes up to a tenth longer, which would make drafting look
            # better than it is, so it is not measured.
            if self._last_plain_decode == (self._decode_count - 1, rows):
                self._cost_model.step_costs.record(rows, seconds - restore_seconds)
                self._decodes_with_drafts = 0
            self._last_plain_decode = self._decode_count, rows
            self.loss_budget.record_plain_decode(seconds)
        else:
            self._record_draft_decode(rows, jobs, tokens, seconds, restore_seconds)

    def _record_draft_decode(self, rows: int, jobs: int, tokens: int, seconds: float, restore_seconds: float) -> None:
        """Record a decode with draft tokens: the cost of its rows, and the time it saved or lost."""
        step_costs = self._cost_model.step_costs
        lengths = {len(running.draft) for running in self._verified_jobs}
        drafting_jobs = len(self._verified_jobs) if len(lengths) == 1 else 0  # uneven drafts take another pass
        is_first = False
        if self._is_single_pass(rows, jobs, drafting_jobs):
            is_first = step_costs.is_first(rows)
            step_costs.record(rows, seconds - restore_seconds)
        step_seconds = self._estimate_seconds(jobs, jobs)
        self._decodes_with_drafts += 1
        # The warm-up of a new row count happens once and is not charged; its rows are.
        spent = min(seconds, self._estimate_seconds(rows, jobs, drafting_jobs)) if is_first else seconds
        saved = self.loss_budget.record_draft_decode(
            spent + self._draft_seconds, step_seconds * tokens / jobs, step_seconds
        )
        for running in self._verified_jobs:
            running.job.speculation_seconds_saved += saved / len(self._verified_jobs)

    def pause(self) -> None:
        """Stop drafting for a while because draft tokens did not fit into the KV cache."""
        self._paused_until = self._decode_count + MEMORY_FULL_PAUSE_DECODES

    def release(self, job: Job) -> None:
        """Release what drafters hold for a job that has ended."""
        for drafter in self._drafters:
            drafter.release(job)

    def run_idle_task(self) -> bool:
        """Let a drafter do deferred work. Return False if there is none."""
        return any(drafter.run_idle_task() for drafter in self._drafters)

    def close(self) -> None:
        """Close all drafters, also those that are not active."""
        for drafter in self._owned_drafters:
            drafter.close()
