"""Prompts that begin alike and come together: one computes the beginning, the others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from afterglow.engine.entries import Ids, Ledger, common_prefix
from afterglow.engine.job import Job

SMALLEST_WAIT = 16  # cells below which computing them twice is simpler than waiting for somebody else


def find_leader(
    job: Job, running: Iterable[Job], keep: int, ledger: Ledger, round_down: Callable[[int, Ids], int]
) -> tuple[Job, int] | None:
    """Who is computing more of this prompt's beginning than the `keep` entries that are there, and how far."""
    if not job.request.reuse:
        return None
    for other in running:
        if other.request.salt != job.request.salt:
            continue
        assert other.sequence is not None
        shared = min(common_prefix(other.prompt, job.prompt), len(job.prompt) - 1)
        depth = round_down(shared, job.prompt)
        there = max(keep, len(other.sequence))
        if depth > there and ledger.cells(job.prompt[there:depth]) >= SMALLEST_WAIT:
            return other, depth
    return None


def is_led(job: Job, running: Sequence[Job]) -> bool:
    """Whether the one it waits for is still on the way."""
    leader = job.leader
    if leader is None or leader not in running:
        return False
    assert leader.sequence is not None
    return len(leader.sequence) < job.leader_depth
