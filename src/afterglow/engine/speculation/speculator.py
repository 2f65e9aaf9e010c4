"""Guessing ahead: who guesses for which job before a decode, and how far. What comes of it, the sampler decides."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from afterglow.engine.kvcache.cost_model import CostModel, RecentTimings
from afterglow.engine.scheduling.job import Job
from afterglow.engine.speculation.draft_length import DraftLength, LossBudget, choose_length
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.types.backend import Capabilities
from afterglow.engine.types.draft_stats import AcceptanceEstimator
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS, EngineSettings
from afterglow.errors import UnsupportedOption

DraftRequest: TypeAlias = tuple[Job, int]
"""A job that generates, and how many guesses it could use."""

INITIAL_RETRY_DECODES = (
    16  # decodes without guesses after which they are tried again, where they lost; twice as many each time
)
MAX_RETRY_DECODES = 1024
TRIAL_DRAFT_TOKENS = 2  # guesses in a trial
INITIAL_ACCEPTANCE_RATE = 0.7  # of how many guesses are right where nothing is known: hopeful, so that they are tried
REFRESH_AFTER_DECODES = (
    48  # decodes with guesses after which there are two without, so that what the second takes stays known
)
RECHOOSE_AFTER_DECODES = 16  # decodes after which lengths are chosen anew, even where nothing was learned from guesses
SLEEP_DECODES = 8  # decodes for which all are left alone after nothing could be won for any of them
EXPECTED_ANSWER_TOKENS = 256  # tokens within which what a drafter has to compute first must have paid
MEMORY_FULL_PAUSE_DECODES = 16  # decodes without guesses after they did not fit into memory


class Drafter(Protocol):
    """Guesses the next tokens of answers. Wrong guesses cost time and change nothing."""

    name: str

    def can_draft(self, job: Job) -> bool:
        """Whether it has anything to guess for this job now. Asked before every decode, so it has to be cheap."""

    def get_draft_kind(self, job: Job) -> str:
        """What its guesses for a job that it is ready for are called now: those of one kind are judged together."""

    def estimate_acceptance(self, job: Job) -> float:
        """How likely its next guess for such a job is right, as far as it can tell before any was verified."""

    def estimate_catch_up_entries(self, job: Job) -> float:
        """What it has to compute before it can guess for this job at all, in entries of a prompt that take the model
        itself as long; 0 where that is not worth mentioning."""

    def catch_up(self, jobs: Sequence[Job]) -> None:
        """Compute that; `draft` does it, too, but there it would look like the price of a guess."""

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each job its guesses, as many as it wishes or fewer. `job.prompt` and `job.generated` are what is known,
        of which memory lacks the newest token."""

    def release(self, job: Job) -> None:
        """The job has ended."""

    def run_idle_task(self) -> bool:
        """Do something that can wait until nobody waits; False: there is nothing of the kind."""

    def close(self) -> None:
        """Give back what it owns."""


def choose_drafters(available: Sequence[Drafter], settings: EngineSettings) -> list[Drafter]:
    """All there are, or those that the settings name, in that order. `UnsupportedOption` where one is not there."""
    if settings.drafters is None:
        return list(available)
    by_name = {drafter.name: drafter for drafter in available}
    for name in settings.drafters:
        if name not in by_name:
            raise UnsupportedOption("drafters", f"there is no {name!r} here, only {', '.join(by_name)}")
    return [by_name[name] for name in settings.drafters]


class Speculator:
    """Asks drafters for guesses, as many as are expected to pay, and learns from what came of them."""

    def __init__(
        self,
        settings: EngineSettings,
        capabilities: Capabilities,
        cost_model: CostModel,
        drafters: Sequence[Drafter],
        rollback: Rollback | None = None,
    ) -> None:
        """`replay` is for memory that cannot drop wrong guesses by itself."""
        self.rollback = rollback
        self.loss_budget = LossBudget()
        self._fixed_length = settings.speculation if isinstance(settings.speculation, int) else None
        on = settings.speculation != "off" and not settings.deterministic
        able = capabilities.max_rollback > 0 or rollback is not None
        if on and self._fixed_length is not None and not able:
            raise UnsupportedOption(
                "speculation",
                f"this {capabilities.memory_kind} memory can neither drop wrong guesses nor go back to a saved state",
            )
        self._owned_drafters = list(drafters)
        chosen = choose_drafters(drafters, settings)
        self._drafters = chosen if on and able else []
        self._capabilities = capabilities
        self._max_draft_tokens = (
            MAX_DRAFT_TOKENS if rollback is not None else min(MAX_DRAFT_TOKENS, capabilities.max_rollback)
        )
        # Where sequences have their own memory, llama.cpp computes rows of several together as far as all have as many;
        # what some have more comes once more, by itself. On a processor that is most of what guesses cost.
        self._splits_uneven_batches = capabilities.interruptible and not capabilities.kv_unified
        self._cost_model = cost_model
        self._acceptance_by_kind = defaultdict[str, AcceptanceEstimator](AcceptanceEstimator)  # by kind
        self._retry_intervals = defaultdict[str, int](lambda: INITIAL_RETRY_DECODES)
        self._seconds_per_draft_token = {drafter.name: RecentTimings() for drafter in drafters}
        self._draft_seconds = 0.0  # seconds of guessing for the coming decode
        self._length_cache: dict[tuple[str, float, int, int, int | None], DraftLength] = {}
        self._measured_decodes = 0
        self._decode_count = 0
        self._paused_until = 0  # the decode before which nobody is asked
        self._drafted_jobs: list[Job] = []  # who has guesses, or had them in the last decode
        self._decodes_with_drafts = 0  # decodes with guesses since one without was measured
        self._last_plain_decode = 0, 0  # the last decode without guesses, and how many rows it had
        self._verified_jobs: list[Job] = []  # whose guesses were in the decode that is being measured

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Who may guess."""
        return tuple(drafter.name for drafter in self._drafters)

    def propose_drafts(self, generating: Sequence[Job], prefilling: Sequence[Job]) -> None:
        """Give jobs that generate their guesses for the coming decode, in which others may have prompts."""
        for job in self._drafted_jobs:
            job.draft = []
        self._drafted_jobs = []
        self._draft_seconds = 0.0
        self._decode_count += 1
        if self._decode_count < self._paused_until or not self._drafters:
            return
        rows = len(generating)
        if self._fixed_length is None and not (generating and not prefilling and self._can_draft(rows)):
            return
        # Not for jobs that are replayed: what drafters know is that memory lacks one token.
        ready = {
            job: able
            for job in generating
            if not job.entries_to_recompute and (able := [one for one in self._drafters if one.can_draft(job)])
        }
        if not ready:
            return
        spare = self._get_spare_rows(rows + len(prefilling), rows)
        choices = self._choose_lengths(ready, rows, spare)
        if not any(choices.values()):
            self._paused_until = self._decode_count + SLEEP_DECODES
            return
        for rank in range(len(self._drafters)):
            for drafter in self._drafters:
                wishes = self._collect_draft_requests(drafter, rank, choices, spare)
                spare -= self._request_drafts(drafter, wishes)

    def _can_draft(self, rows: int) -> bool:
        """Whether guesses may be tried in a decode of so many rows. One with a prompt in it is never asked about: it
        computes as many rows as it can anyway, and guesses would only make it longer."""
        return (
            self.loss_budget.has_credit
            and self._decodes_with_drafts < REFRESH_AFTER_DECODES
            and self._cost_model.step_costs.is_measured(rows)
        )

    def _get_spare_rows(self, running: int, generating: int) -> int:
        """Guesses that one decode has room for: everybody needs a row, and an output at its end. What was never
        measured is approached step by step: twice as far as before, and no further."""
        room = min(self._capabilities.max_outputs - running, self._capabilities.batch_cells - generating)
        known = self._cost_model.step_costs.max_measured_rows - (1 if self._splits_uneven_batches else generating)
        return room if self._fixed_length is not None else min(room, max(TRIAL_DRAFT_TOKENS * generating, 2 * known))

    def _get_max_length(self, job: Job, spare_rows: int) -> int:
        """Guesses that could be right, could be computed, and could be dropped again."""
        if job.draft_stats.disabled:
            return 0
        assert job.sequence is not None
        left = MAX_DRAFT_TOKENS if job.request.max_tokens is None else job.request.max_tokens - len(job.generated) - 1
        room = job.max_cells - job.sequence.cell_count - 1
        return max(0, min(self._max_draft_tokens, left, room, spare_rows))

    def _choose_lengths(
        self, drafters_by_job: dict[Job, list[Drafter]], rows: int, spare_rows: int
    ) -> dict[Job, list[tuple[Drafter, int]]]:
        """For each job those that would help it, the most promising first, and how far each should guess.

        Where guesses cost only their rows, each job is a case of its own; else those that can guess do so alike.
        """
        alike = rows > 1 and self._fixed_length is None and self._splits_uneven_batches
        found: dict[Job, list[tuple[float, Drafter, int]]] = {job: [] for job in drafters_by_job}
        for drafter in self._drafters:
            able = [job for job, drafters in drafters_by_job.items() if drafter in drafters]
            for group in [able] if alike else [[job] for job in able]:
                for job, choice in self._choose_group_lengths(group, drafter, rows, spare_rows).items():
                    found[job].append((-choice.speedup, drafter, choice.length))
        return {
            job: [(drafter, length) for _, drafter, length in sorted(options, key=lambda one: one[0])]
            for job, options in found.items()
        }

    def _choose_group_lengths(
        self, group: Sequence[Job], drafter: Drafter, rows: int, spare_rows: int
    ) -> dict[Job, DraftLength]:
        """How far a drafter should guess for jobs that guess alike; where that does not pay, one may try, seldom."""
        limits = {job: limit for job in group if (limit := self._get_max_length(job, spare_rows // len(group)))}
        if self._fixed_length is not None or not limits:
            return {job: DraftLength(min(self._fixed_length or 0, limit), 1.0) for job, limit in limits.items()}
        for job in limits:
            job.draft_stats.last_decode = job.draft_stats.last_decode or self._decode_count
        sharing = len(limits) if self._splits_uneven_batches else None
        choice = self._find_best_length(
            drafter.name, self._estimate_acceptance(limits, drafter), max(limits.values()), rows, sharing
        )
        chosen = list(limits)
        if choice.length:
            self._retry_intervals.update((drafter.get_draft_kind(job), INITIAL_RETRY_DECODES) for job in chosen)
        else:
            choice = DraftLength(TRIAL_DRAFT_TOKENS, 0.0)
            chosen = [
                job
                for job in chosen
                if self._decode_count - job.draft_stats.last_decode
                >= self._retry_intervals[drafter.get_draft_kind(job)]
            ][:1]
        return {
            job: DraftLength(min(choice.length, limits[job]), choice.speedup)
            for job in chosen
            if self._should_catch_up(job, drafter, rows, choice.speedup)
        }

    def _estimate_acceptance(self, group: Iterable[Job], drafter: Drafter) -> float:
        """How likely guesses for these jobs are right."""
        kinds = [(job, drafter.get_draft_kind(job)) for job in group]
        rates = [
            job.draft_stats.estimate_acceptance(
                kind, self._acceptance_by_kind[kind].estimate(drafter.estimate_acceptance(job))
            )
            for job, kind in kinds
        ]
        return round(sum(rates) / len(rates), 2)

    def _should_catch_up(self, job: Job, drafter: Drafter, rows: int, speedup: float) -> bool:
        """Whether a drafter that knows little of a job may be asked: not where it would hardly be done before the
        answer is, and not beyond what may be lost."""
        behind = drafter.estimate_catch_up_entries(job) * self._cost_model.seconds_per_entry
        if not behind:
            return True
        most = (
            EXPECTED_ANSWER_TOKENS
            if job.request.max_tokens is None
            else min(EXPECTED_ANSWER_TOKENS, job.request.max_tokens)
        )
        step = self._estimate_seconds(rows, rows)
        saved = max(0, most - len(job.generated)) * step * (1 - 1 / speedup) if speedup > 1 else behind
        return behind <= saved and self.loss_budget.can_afford(behind, step)

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
                save_seconds=None if self.rollback is None else self.rollback.seconds_per_state,
            )
        return self._length_cache[key]

    def _estimate_seconds(self, rows: int, jobs: int, drafting_jobs: int | None = None) -> float:
        """Seconds that a decode of so many rows is expected to take: one for each of the jobs, and guesses for as many
        as are `sharing` them."""
        per_row = min(self._cost_model.seconds_per_entry, self._cost_model.seconds_per_step)
        if self._is_single_pass(rows, jobs, drafting_jobs):
            return self._cost_model.step_costs.estimate_seconds(rows, per_row)
        return self._cost_model.step_costs.estimate_seconds(
            jobs, per_row
        ) + self._cost_model.step_costs.estimate_seconds(rows - jobs, per_row)

    def _is_single_pass(self, rows: int, jobs: int, drafting_jobs: int | None) -> bool:
        return not self._splits_uneven_batches or jobs in (1, rows, drafting_jobs)

    def _collect_draft_requests(
        self, drafter: Drafter, rank: int, choices: dict[Job, list[tuple[Drafter, int]]], spare_rows: int
    ) -> list[DraftRequest]:
        wishes: list[DraftRequest] = []
        for job, options in choices.items():
            if not job.draft and rank < len(options) and options[rank][0] is drafter:
                length = min(options[rank][1], spare_rows)
                if length > 0:
                    wishes.append((job, length))
                    spare_rows -= length
        return wishes

    def _request_drafts(self, drafter: Drafter, draft_requests: list[DraftRequest]) -> int:
        """Let a drafter guess; how many guesses there are. Those that cannot come next are cut off."""
        if not draft_requests:
            return 0
        late = [job for job, _ in draft_requests if drafter.estimate_catch_up_entries(job)]
        started = time.perf_counter()
        if late:
            drafter.catch_up(late)
            self.loss_budget.record_catch_up(time.perf_counter() - started)
            started = time.perf_counter()
        drafts = drafter.draft(draft_requests)
        seconds = time.perf_counter() - started
        total = 0
        for (job, limit), draft in zip(draft_requests, drafts, strict=True):
            guesses = draft[:limit]
            if guesses and job.token_constraint is not None:
                guesses = guesses[: job.token_constraint.count_allowed(guesses)]
            job.draft = guesses
            self._drafted_jobs.append(job)
            job.draft_stats.last_kind = drafter.get_draft_kind(job)
            total += len(guesses)
        price = self._seconds_per_draft_token[drafter.name]
        if len(price):  # the first time is no loss: it prepares the others
            self._draft_seconds += seconds
        if total:
            price.add(seconds / total)
        return total

    def prepare_decode(self, jobs: Sequence[Job]) -> None:
        """The decode is about to run: save what cannot be dropped again."""
        if self.rollback is not None and self._drafters:
            self._draft_seconds += self.rollback.save(jobs)

    def record_verification(self, job: Job, draft_tokens: int, accepted_tokens: int) -> None:
        """So many of a job's guesses were computed, and so many of them were right."""
        guessing = job.draft_stats
        kind = guessing.last_kind
        job.draft_token_count += draft_tokens
        job.draft_steps += 1
        self._verified_jobs.append(job)
        guessing.last_decode = self._decode_count
        guessing.update(kind, draft_tokens, accepted_tokens)
        self._acceptance_by_kind[kind].update(draft_tokens, accepted_tokens)
        self._retry_intervals[kind] = min(MAX_RETRY_DECODES, 2 * self._retry_intervals[kind])

    def record_decode(self, rows: int, jobs: int, tokens: int, seconds: float) -> None:
        """A decode of generating rows only took so long, for `jobs` jobs, and brought so many tokens."""
        if not self._drafters:
            return
        returning = 0.0 if self.rollback is None else self.rollback.finish_decode()
        self._measured_decodes += 1
        if self._measured_decodes % RECHOOSE_AFTER_DECODES == 0 or rows > jobs:
            self._length_cache.clear()
        if rows == jobs:
            self._record_plain_decode(rows, seconds - returning)
            self.loss_budget.record_plain_decode(seconds)
        else:
            self._record_draft_decode(rows, jobs, tokens, seconds, returning)
        self._verified_jobs = []

    def _record_plain_decode(self, rows: int, seconds: float) -> None:
        """A decode had no guesses. The first of its kind after another takes up to a tenth longer, which would make
        guesses look that much better than they are: it tells nothing."""
        if self._last_plain_decode == (self._decode_count - 1, rows):
            self._cost_model.step_costs.record(rows, seconds)
            self._decodes_with_drafts = 0
        self._last_plain_decode = self._decode_count, rows

    def _record_draft_decode(self, rows: int, jobs: int, tokens: int, seconds: float, restore_seconds: float) -> None:
        """A decode had guesses in it: learn what such rows take, and whether they won."""
        steps = self._cost_model.step_costs
        lengths = {len(job.draft) for job in self._verified_jobs}
        sharing = len(self._verified_jobs) if len(lengths) == 1 else 0  # who has more than others is computed by itself
        first = False
        if self._is_single_pass(rows, jobs, sharing):
            first = steps.is_first(rows)
            steps.record(rows, seconds - restore_seconds)
        step = self._estimate_seconds(jobs, jobs)
        self._decodes_with_drafts += 1
        # What it took to prepare such decodes is not taken again; their rows are.
        spent = min(seconds, self._estimate_seconds(rows, jobs, sharing)) if first else seconds
        won = self.loss_budget.record_draft_decode(spent + self._draft_seconds, step * tokens / jobs, step)
        for job in self._verified_jobs:
            job.speculation_seconds_saved += won / len(self._verified_jobs)

    def pause(self) -> None:
        """Guesses did not fit into memory: do without them for a while."""
        self._paused_until = self._decode_count + MEMORY_FULL_PAUSE_DECODES

    def release(self, job: Job) -> None:
        """The job has ended."""
        for drafter in self._drafters:
            drafter.release(job)

    def run_idle_task(self) -> bool:
        """Let drafters do what can wait; False: there is nothing."""
        return any(drafter.run_idle_task() for drafter in self._drafters)

    def close(self) -> None:
        """Give back what drafters own, also those that were never asked."""
        for drafter in self._owned_drafters:
            drafter.close()
