"""Prompts that begin alike and come together: one computes the beginning, the others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length

MIN_COALESCED_CELLS = 16  # cells below which computing them twice is simpler than waiting for somebody else


def find_leader(
    job: Job,
    running: Iterable[Job],
    reuse_length: int,
    interner: EntryInterner,
    round_down: Callable[[int, Entries], int],
) -> tuple[Job, int] | None:
    """Who is computing more of this prompt's beginning than the `keep` entries that are there, and how far."""
    if not job.request.use_prefix_cache:
        return None
    for other in running:
        if other.request.salt != job.request.salt:
            continue
        assert other.sequence is not None
        shared = min(common_prefix_length(other.prompt, job.prompt), len(job.prompt) - 1)
        depth = round_down(shared, job.prompt)
        there = max(reuse_length, len(other.sequence))
        if depth > there and interner.count_cells(job.prompt[there:depth]) >= MIN_COALESCED_CELLS:
            return other, depth
    return None


def is_following(job: Job, running: Sequence[Job]) -> bool:
    """Whether the one it waits for is still on the way."""
    leader = job.leader
    if leader is None or leader not in running:
        return False
    assert leader.sequence is not None
    return len(leader.sequence) < job.leader_position
