"""Which entries of which jobs the next decode computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.backend import Capabilities

AGING_ENTRIES_PER_SECOND = 64  # entries that a job may be longer for each second it has waited, and still go first
MIN_CHUNK_ENTRIES = 16  # a prompt always moves on, however little time there is
MAX_DECODE_SECONDS = 0.5  # seconds that a decode may take which nothing can stop


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBudget:
    """How much one decode may hold."""

    cells: int  # of the batch
    prefill_entries: int  # of prompts, so that generating jobs are not kept waiting


def schedule(
    decoding: Sequence[Job], prefilling: Sequence[Job], budget: BatchBudget, now: float
) -> list[tuple[Job, int]]:
    """Jobs that generate come first, each with its newest token, what is replayed before it and guesses behind
    it; prompts fill the rest in chunks.

    Among prompts the shortest remaining goes first, and waiting makes a job shorter, so nobody starves.
    """
    room = budget.cells - (min(MIN_CHUNK_ENTRIES, budget.cells // 2) if prefilling else 0)
    if len(decoding) > room:  # more than the batch holds take turns
        decoding = sorted(decoding, key=lambda job: job.last_decoded_at)
    decoding = decoding[:room]
    spare = room - len(decoding)
    chosen: list[tuple[Job, int]] = []
    for job in decoding:
        more = min(job.entries_to_recompute + len(job.draft), spare)
        chosen.append((job, 1 + more))
        spare -= more
    left = min(budget.cells - room + spare, budget.prefill_entries)
    for job in sorted(prefilling, key=lambda job: (-job.request.priority, compute_sort_key(job, now))):
        count = min(left, job.get_chunk_limit())
        if count > 0:
            chosen.append((job, count))
            left -= count
    return chosen


def compute_sort_key(job: Job, now: float) -> float:
    """Smaller goes first: remaining entries, less what waiting has earned."""
    return job.backlog - AGING_ENTRIES_PER_SECOND * (now - job.submitted_at)


def partition_jobs(jobs: Iterable[Job]) -> tuple[list[Job], list[Job], list[Job]]:
    """Those that generate, those in their prompts, and those that are at a picture."""
    generating: list[Job] = []
    prompts: list[Job] = []
    pictures: list[Job] = []
    for job in jobs:
        (pictures if job.media_indices and job.is_next_media else generating if job.is_decoding else prompts).append(
            job
        )
    return generating, prompts, pictures


def pick_first(jobs: Sequence[Job], now: float) -> Job:
    """Whose turn it is among those who cannot go together."""
    return min(jobs, key=lambda job: (-job.request.priority, compute_sort_key(job, now)))


def compute_max_batch(capabilities: Capabilities, seconds_per_entry: float) -> int:
    """Rows that one decode may hold. A GPU wants many at once, but nothing stops it before it is through with them."""
    if capabilities.interruptible:
        return capabilities.batch_cells
    return min(capabilities.batch_cells, max(capabilities.ubatch_cells, int(MAX_DECODE_SECONDS / seconds_per_entry)))


def compute_prefill_budget(
    decoding_jobs: int,
    backlogs: Sequence[int],
    max_token_gap: float,
    seconds_per_step: float,
    seconds_per_entry: float,
    max_entries: int,
) -> int:
    """Prompt entries that fit into a decode without making `generating` jobs wait longer than `gap` seconds;
    `backlogs` are those of the prompts.

    Where more wait for their first token than for their next, one longer decode is better for all of them together,
    if it ends all of these prompts: then each that generates waits a gap for each of its share of them.
    """
    if not decoding_jobs:
        return max_entries
    crowd = max_token_gap * len(backlogs) / decoding_jobs
    if crowd > max_token_gap and seconds_per_step + seconds_per_entry * sum(backlogs) <= crowd:
        return max_entries
    return max(
        MIN_CHUNK_ENTRIES, min(max_entries, int((max_token_gap - seconds_per_step) / max(seconds_per_entry, 1e-9)))
    )


def schedule_on_grid(jobs: Sequence[Job], grid: int, now: float) -> list[tuple[Job, int]]:
    """The deterministic schedule: one job in a decode, prompts in chunks that end at multiples of `grid`."""
    waiting = [job for job in jobs if job.backlog > 0]
    if not waiting:
        return []
    job = min(waiting, key=lambda job: (-job.request.priority, job.last_decoded_at, job.submitted_at))  # in turn
    assert job.sequence is not None
    length = len(job.sequence)
    # Generated tokens were computed one by one and, should that be lost, are again.
    return [(job, 1 if length >= len(job.prompt) else min(job.get_chunk_limit(), grid - length % grid))]
