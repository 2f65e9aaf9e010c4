"""What an engine did, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afterglow.engine.types.backend import DecodeSpan


@dataclass(slots=True)
class EngineCounters:
    """What the engine did so far."""

    decodes: int = 0
    rows: int = 0
    prompt_entries: int = 0
    reused_entries: int = 0
    preempted: int = 0
    coalesced: int = 0
    interrupted: int = 0
    max_batch_jobs: int = 0  # most jobs in one decode
    draft_steps: int = 0  # times that somebody's guesses were computed
    draft_tokens: int = 0  # guesses that were computed
    accepted_tokens: int = 0  # and those of them that were right
    replayed_entries: int = 0  # entries computed again, because memory could not drop wrong guesses without them
    encoded_media: int = 0  # pictures and sounds

    def record_decode(self, spans: Sequence[DecodeSpan], replayed: int) -> tuple[int, int]:
        """There was a decode; its rows, and how many of them were guesses."""
        rows, guesses = 0, 0
        for span in spans:
            rows += span.rows
            guesses += max(span.outputs - 1, 0)
        self.decodes += 1
        self.rows += rows
        self.replayed_entries += replayed
        self.max_batch_jobs = max(self.max_batch_jobs, len(spans))
        return rows, guesses


@dataclass(slots=True)
class TierCounters:
    """What one tier did so far."""

    saves: int = 0  # sequences of which something was stored
    saved_bytes: int = 0
    hits: int = 0  # prompts that began from here
    misses: int = 0  # prompts that found nothing here, nor in memory
    hit_entries: int = 0  # that need not be computed because of it
    loaded_bytes: int = 0
    evictions: int = 0  # segments and checkpoints that had to make room
    rejected_saves: int = 0  # sequences for which there was no room
    seconds_saved: float = 0.0

    def record_hit(self, entries: int, nbytes: int, seconds_saved: float) -> None:
        """A prompt began from here."""
        self.hits += 1
        self.hit_entries += entries
        self.loaded_bytes += nbytes
        self.seconds_saved += max(0.0, seconds_saved)
