"""What an engine did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What the engine did so far."""

    decodes: int = 0
    rows: int = 0
    prompt_entries: int = 0
    reused_entries: int = 0
    parked: int = 0
    coalesced: int = 0
    interrupted: int = 0
    widest: int = 0  # most jobs in one decode
    drafted: int = 0  # guesses that were computed
    accepted: int = 0  # and those of them that were right
