"""Going back where memory keeps no snapshots: the state before guesses is saved, put back where one was wrong, and what
was right is computed again with the next token.

It acts; whether that is worth it, the choice of a draft's length knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from afterglow.engine.backend import Backend, State
from afterglow.engine.job import Job

WEIGHT = 0.2  # of a new measurement


@dataclass(frozen=True, slots=True)
class Before:
    """A sequence as it stood before its guesses: how long it was, and its partial state."""

    length: int
    state: State
    aligned: int


class Replay:
    """Saves states before guesses, for one decode each, and puts them back."""

    def __init__(self, backend: Backend) -> None:
        self.seconds = 0.0  # that saving a state takes, or putting it back
        self._backend = backend
        self._before: dict[Job, Before] = {}
        self._returning = 0.0  # seconds of the last decode that went into putting states back

    def keep(self, jobs: Iterable[Job]) -> float:
        """Save the states of jobs that have guesses; the seconds it took."""
        self._before, self._returning = {}, 0.0
        started = time.perf_counter()
        for job in jobs:
            if job.draft:
                assert job.sequence is not None
                sequence = job.sequence
                state = self._backend.save(sequence.number, "partial")
                self._before[job] = Before(len(sequence), state, sequence.aligned)
        seconds = time.perf_counter() - started
        if self._before:
            self._measured(seconds / len(self._before))
        return seconds

    def undo(self, job: Job) -> bool:
        """Put the state before the guesses back; the right ones are to be computed again. False: there is none."""
        before = self._before.pop(job, None)
        if before is None:
            return False
        assert job.sequence is not None
        started = time.perf_counter()
        job.sequence.restore(before.length, before.state, before.aligned)
        job.replay = job.known - 1 - before.length
        seconds = time.perf_counter() - started
        self._returning += seconds
        self._measured(seconds)
        return True

    def settle(self) -> float:
        """The decode is over: forget what was saved for it; the seconds that went into putting states back."""
        self._before = {}
        return self._returning

    def _measured(self, seconds: float) -> None:
        self.seconds += WEIGHT * (seconds - self.seconds) if self.seconds else seconds
