"""Going back where memory keeps no snapshots: the state before guesses is saved, put back where one was wrong, and what
was right is computed again with the next token.

It acts; whether that is worth it, the choice of a draft's length knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.backend import Backend, BackendState

NEW_MEASUREMENT_WEIGHT = 0.2  # of a new measurement


@dataclass(frozen=True, slots=True)
class RollbackState:
    """A sequence as it stood before its guesses: how long it was, and its partial state."""

    length: int
    state: BackendState
    aligned: int


class Rollback:
    """Saves states before guesses, for one decode each, and puts them back."""

    def __init__(self, backend: Backend) -> None:
        self.seconds_per_state = 0.0  # that saving a state takes, or putting it back
        self._backend = backend
        self._saved_states: dict[Job, RollbackState] = {}
        self._restore_seconds = 0.0  # seconds of the last decode that went into putting states back

    def save(self, jobs: Iterable[Job]) -> float:
        """Save the states of jobs that have guesses; the seconds it took."""
        self._saved_states, self._restore_seconds = {}, 0.0
        started = time.perf_counter()
        for job in jobs:
            if job.draft:
                assert job.sequence is not None
                sequence = job.sequence
                state = self._backend.save(sequence.seq_id, "partial")
                self._saved_states[job] = RollbackState(len(sequence), state, sequence.aligned)
        seconds = time.perf_counter() - started
        if self._saved_states:
            self._record_seconds(seconds / len(self._saved_states))
        return seconds

    def restore(self, job: Job) -> bool:
        """Put the state before the guesses back; the right ones are to be computed again. False: there is none."""
        before = self._saved_states.pop(job, None)
        if before is None:
            return False
        assert job.sequence is not None
        started = time.perf_counter()
        job.sequence.restore(before.length, before.state, before.aligned)
        job.entries_to_recompute = job.known_length - 1 - before.length
        seconds = time.perf_counter() - started
        self._restore_seconds += seconds
        self._record_seconds(seconds)
        return True

    def finish_decode(self) -> float:
        """The decode is over: forget what was saved for it; the seconds that went into putting states back."""
        self._saved_states = {}
        return self._restore_seconds

    def _record_seconds(self, seconds: float) -> None:
        self.seconds_per_state += (
            NEW_MEASUREMENT_WEIGHT * (seconds - self.seconds_per_state) if self.seconds_per_state else seconds
        )
