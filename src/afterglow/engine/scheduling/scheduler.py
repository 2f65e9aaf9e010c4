"""Batch scheduling and prefix coalescing: chooses the jobs and entries of the next decode. Pure functions over jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.backend import Capabilities
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length

AGING_ENTRIES_PER_SECOND = 64  # each second of waiting offsets this many remaining prompt entries
MIN_CHUNK_ENTRIES = 16  # a prefill always advances by this much, however small the time budget
MAX_DECODE_SECONDS = 0.5  # bound on a decode that cannot be interrupted
MIN_COALESCED_CELLS = 16  # below this, computing a prefix twice is simpler than waiting for the leader


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBudget:
    """Limits of one decode."""

    cells: int  # rows of the batch
    prefill_entries: int  # bounds the delay that prefill adds to decoding jobs


def schedule(
    decoding: Sequence[Job], prefilling: Sequence[Job], budget: BatchBudget, now: float
) -> list[tuple[Job, int]]:
    """Return the jobs of the next decode and the number of entries of each.

    Decoding jobs come first, each with its newest token, the entries to recompute before it and the draft tokens after
    it. Prefill chunks fill the rest, shortest remaining prompt first. Waiting time is subtracted from the remaining
    length, so no prompt starves.
    """
    decode_cells = budget.cells - (min(MIN_CHUNK_ENTRIES, budget.cells // 2) if prefilling else 0)
    if len(decoding) > decode_cells:  # more jobs than the batch holds: least recently decoded first
        decoding = sorted(decoding, key=lambda job: job.last_decoded_at)
    decoding = decoding[:decode_cells]
    spare = decode_cells - len(decoding)
    batch: list[tuple[Job, int]] = []
    for job in decoding:
        extra = min(job.entries_to_recompute + len(job.draft), spare)
        batch.append((job, 1 + extra))
        spare -= extra
    remaining = min(budget.cells - decode_cells + spare, budget.prefill_entries)
    for job in sorted(prefilling, key=lambda job: (-job.request.priority, compute_sort_key(job, now))):
        count = min(remaining, job.get_chunk_limit())
        if count > 0:
            batch.append((job, count))
            remaining -= count
    return batch


def compute_sort_key(job: Job, now: float) -> float:
    """Return the remaining entries less an allowance for waiting time; the smallest key is scheduled first."""
    return job.backlog - AGING_ENTRIES_PER_SECOND * (now - job.submitted_at)


def partition_jobs(jobs: Iterable[Job]) -> tuple[list[Job], list[Job], list[Job]]:
    """Split jobs into decoding, prefilling text, and prefilling media next."""
    decoding: list[Job] = []
    prefilling: list[Job] = []
    media: list[Job] = []
    for job in jobs:
        (media if job.media_indices and job.is_next_media else decoding if job.is_decoding else prefilling).append(job)
    return decoding, prefilling, media


def pick_first(jobs: Sequence[Job], now: float) -> Job:
    """Return the job to run next among jobs that cannot share a decode."""
    return min(jobs, key=lambda job: (-job.request.priority, compute_sort_key(job, now)))


def compute_max_batch(capabilities: Capabilities, seconds_per_entry: float) -> int:
    """Return the rows that one decode may hold.

    A GPU is faster with large batches but cannot be interrupted, so its batches are bounded by `MAX_DECODE_SECONDS`.
    """
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
    """Return the prompt entries that fit into a decode without delaying decoding jobs beyond `max_token_gap` seconds.

    `backlogs` are the remaining entries of the prefilling jobs. If more jobs wait for their first token than for their
    next one, a single longer decode is better overall, provided it completes all these prompts: each decoding job then
    waits one gap per prefilling job of its share.
    """
    if not decoding_jobs:
        return max_entries
    shared_gap = max_token_gap * len(backlogs) / decoding_jobs
    if shared_gap > max_token_gap and seconds_per_step + seconds_per_entry * sum(backlogs) <= shared_gap:
        return max_entries
    return max(
        MIN_CHUNK_ENTRIES, min(max_entries, int((max_token_gap - seconds_per_step) / max(seconds_per_entry, 1e-9)))
    )


def schedule_on_grid(jobs: Sequence[Job], grid: int, now: float) -> list[tuple[Job, int]]:
    """Deterministic schedule: one job per decode, prefill chunks end at multiples of `grid`."""
    runnable = [job for job in jobs if job.backlog > 0]
    if not runnable:
        return []
    job = min(runnable, key=lambda job: (-job.request.priority, job.last_decoded_at, job.submitted_at))  # round robin
    assert job.sequence is not None
    length = len(job.sequence)
    # Generated tokens are computed one by one, also when they are recomputed.
    return [(job, 1 if length >= len(job.prompt) else min(job.get_chunk_limit(), grid - length % grid))]


# --- prefix coalescing: concurrent requests with a common prefix prefill it once


def find_leader(
    job: Job,
    running: Iterable[Job],
    reuse_length: int,
    interner: EntryInterner,
    round_down: Callable[[int, Entries], int],
) -> tuple[Job, int] | None:
    """Return a running job that will compute more of this prompt's prefix than `reuse_length`, and its position.

    The position is the end of the common prefix. None if there is no such leader or too little is left to wait for.
    """
    if not job.request.use_prefix_cache:
        return None
    for candidate in running:
        if candidate.request.salt != job.request.salt:
            continue
        assert candidate.sequence is not None
        common_length = min(common_prefix_length(candidate.prompt, job.prompt), len(job.prompt) - 1)
        position = round_down(common_length, job.prompt)
        computed = max(reuse_length, len(candidate.sequence))
        if position > computed and interner.count_cells(job.prompt[computed:position]) >= MIN_COALESCED_CELLS:
            return candidate, position
    return None


def is_following(job: Job, running: Sequence[Job]) -> bool:
    """Return whether the job's leader is still computing the common prefix."""
    leader = job.leader
    if leader is None or leader not in running:
        return False
    assert leader.sequence is not None
    return len(leader.sequence) < job.leader_position
