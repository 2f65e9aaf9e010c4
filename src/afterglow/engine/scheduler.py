"""Which entries of which jobs the next decode computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afterglow.engine.backend import Capabilities
from afterglow.engine.job import Job

AGING = 64  # entries that a job may be longer for each second it has waited, and still go first
SMALLEST_CHUNK = 16  # a prompt always moves on, however little time there is
LONGEST = 0.5  # seconds that a decode may take which nothing can stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much one decode may hold."""

    cells: int  # of the batch
    prompt_entries: int  # of prompts, so that generating jobs are not kept waiting


def schedule(generating: Sequence[Job], prompts: Sequence[Job], budget: Budget, now: float) -> list[tuple[Job, int]]:
    """Jobs that generate come first, each with its newest token, what is replayed before it and guesses behind
    it; prompts fill the rest in chunks.

    Among prompts the shortest remaining goes first, and waiting makes a job shorter, so nobody starves.
    """
    room = budget.cells - (min(SMALLEST_CHUNK, budget.cells // 2) if prompts else 0)
    if len(generating) > room:  # more than the batch holds take turns
        generating = sorted(generating, key=lambda job: job.decoded_at)
    generating = generating[:room]
    spare = room - len(generating)
    chosen: list[tuple[Job, int]] = []
    for job in generating:
        more = min(job.replay + len(job.draft), spare)
        chosen.append((job, 1 + more))
        spare -= more
    left = min(budget.cells - room + spare, budget.prompt_entries)
    for job in sorted(prompts, key=lambda job: (-job.request.priority, urgency(job, now))):
        count = min(left, job.next_stop())
        if count > 0:
            chosen.append((job, count))
            left -= count
    return chosen


def urgency(job: Job, now: float) -> float:
    """Smaller goes first: remaining entries, less what waiting has earned."""
    return job.backlog - AGING * (now - job.submitted)


def sorted_out(jobs: Iterable[Job]) -> tuple[list[Job], list[Job], list[Job]]:
    """Those that generate, those in their prompts, and those that are at a picture."""
    generating: list[Job] = []
    prompts: list[Job] = []
    pictures: list[Job] = []
    for job in jobs:
        (pictures if job.media and job.next_is_media else generating if job.generating else prompts).append(job)
    return generating, prompts, pictures


def first_of(jobs: Sequence[Job], now: float) -> Job:
    """Whose turn it is among those who cannot go together."""
    return min(jobs, key=lambda job: (-job.request.priority, urgency(job, now)))


def largest_decode(able: Capabilities, per_entry: float) -> int:
    """Rows that one decode may hold. A GPU wants many at once, but nothing stops it before it is through with them."""
    if able.interruptible:
        return able.batch_cells
    return min(able.batch_cells, max(able.ubatch_cells, int(LONGEST / per_entry)))


def prompt_budget(
    generating: int, backlogs: Sequence[int], gap: float, per_step: float, per_entry: float, cells: int
) -> int:
    """Prompt entries that fit into a decode without making `generating` jobs wait longer than `gap` seconds;
    `backlogs` are those of the prompts.

    Where more wait for their first token than for their next, one longer decode is better for all of them together,
    if it ends all of these prompts: then each that generates waits a gap for each of its share of them.
    """
    if not generating:
        return cells
    crowd = gap * len(backlogs) / generating
    if crowd > gap and per_step + per_entry * sum(backlogs) <= crowd:
        return cells
    return max(SMALLEST_CHUNK, min(cells, int((gap - per_step) / max(per_entry, 1e-9))))


def grid_step(jobs: Sequence[Job], grid: int, now: float) -> list[tuple[Job, int]]:
    """The deterministic schedule: one job in a decode, prompts in chunks that end at multiples of `grid`."""
    waiting = [job for job in jobs if job.backlog > 0]
    if not waiting:
        return []
    job = min(waiting, key=lambda job: (-job.request.priority, job.decoded_at, job.submitted))  # in turn
    assert job.sequence is not None
    length = len(job.sequence)
    # Generated tokens were computed one by one and, should that be lost, are again.
    return [(job, 1 if length >= len(job.prompt) else min(job.next_stop(), grid - length % grid))]
