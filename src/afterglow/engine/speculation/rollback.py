"""Rollback where the KV cache cannot drop rejected draft tokens: saves partial states before a decode, restores them.

After a restore, the accepted tokens are recomputed with the next token. Whether that pays is decided by the choice of
the draft length, not here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afterglow.engine.kvcache.cost_model import RunningAverage
from afterglow.engine.scheduling.job import RunningJob
from afterglow.engine.types.backend import Backend, BackendState, DecodeSpan


@dataclass(frozen=True, slots=True)
class RollbackState:
    """A sequence before its draft tokens: its length and partial state."""

    length: int
    state: BackendState


class Rollback:
    """Saves the states of drafting jobs for one decode and restores them on rejection."""

    def __init__(self, backend: Backend) -> None:
        self.seconds_per_state = RunningAverage(0.0)  # to save or restore one state
        self._backend = backend
        self._saved_states: dict[RunningJob, RollbackState] = {}
        self._restore_seconds = 0.0  # spent on restoring states after the last decode

    def save(self, jobs: Iterable[RunningJob], spans: Sequence[DecodeSpan]) -> float:
        """Save the states of jobs with draft tokens that the KV cache cannot drop after a decode of these spans.

        Returns the seconds it took.
        """
        self._saved_states, self._restore_seconds = {}, 0.0
        drafting = [running for running in jobs if running.draft]
        if not drafting or (self._backend.capabilities.max_rollback and self._backend.can_roll_back_after(spans)):
            return 0.0
        started = time.perf_counter()
        for running in drafting:
            state = self._backend.save(running.sequence.seq_id, "partial")
            self._saved_states[running] = RollbackState(len(running.sequence), state)
        seconds = time.perf_counter() - started
        self.seconds_per_state.add(seconds / len(drafting))
        return seconds

    def restore(self, running: RunningJob) -> bool:
        """Return to the state before the draft; accepted tokens are recomputed. Return False if none was saved."""
        saved = self._saved_states.pop(running, None)
        if saved is None:
            return False
        started = time.perf_counter()
        running.sequence.restore(saved.length, saved.state)
        running.entries_to_recompute = running.job.known_length - 1 - saved.length
        seconds = time.perf_counter() - started
        self._restore_seconds += seconds
        self.seconds_per_state.add(seconds)
        return True

    def finish_decode(self) -> float:
        """Discard the states of this decode. Return the seconds spent on restoring."""
        self._saved_states = {}
        return self._restore_seconds
