"""Where to take checkpoints, and which to let go. Decides; the engine acts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from afterglow.engine.types.backend import BackendState
from afterglow.engine.types.entries import Entries
from afterglow.engine.types.settings import CheckpointSettings
from afterglow.llama import page_buffers

TAIL_DISTANCE_TOKENS = 4  # tokens before the end of a prompt: templates often rewrite just these


@dataclass(eq=False, slots=True, kw_only=True)
class Checkpoint:
    """The partial state after exactly these entries."""

    entries: Entries
    state: BackendState
    aligned: int
    salt: str = ""
    parent: bytes = b""  # the name of the whole segments before it
    start: int = 0  # entries in them
    key: bytes = b""  # its own name
    pinned: bool = False  # a pinned beginning is restored from it
    last_used: float = field(default_factory=time.monotonic)

    @property
    def position(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        return page_buffers.get_allocated_bytes(self.state.nbytes) + self.entries.nbytes


def choose_checkpoint_positions(
    length: int, boundaries: Iterable[int], existing: Iterable[int], ubatch: int, settings: CheckpointSettings
) -> list[int]:
    """Where the prefill of a prompt of `length` entries must stand still, ascending.

    At the ends of messages; 4, and 4 + `ubatch`, before the prompt's end; and every `every_n_tokens`. `taken` are
    the depths along this prompt that have a checkpoint already.
    """
    if settings.max_checkpoints == 0:
        return []
    chosen = {point for point in boundaries if 0 < point < length}
    known = set(existing)
    wanted = [length - TAIL_DISTANCE_TOKENS, length - TAIL_DISTANCE_TOKENS - ubatch]
    if settings.every_n_tokens:
        wanted += range(settings.every_n_tokens, length, settings.every_n_tokens)
    for point in wanted:
        apart = all(abs(point - other) >= settings.min_gap for other in chosen | known)
        if settings.min_tokens <= point < length and apart:
            chosen.add(point)
    return sorted(chosen - known)


def choose_positions_to_drop(positions: Sequence[int], limit: int) -> list[int]:
    """Which of the ascending `depths` along one path to let go so that `limit` remain.

    The newest stays, since the conversation goes on there, and so does the first: the system prompt, shared by most.
    Of the others the one goes whose absence costs least: with the nearest neighbour before it, relative to its
    distance from the end, so that old ones become sparse and recent ones stay dense.
    """
    kept, gone = list(positions), []
    while len(kept) > max(limit, 0):
        inner = range(1, len(kept) - 1)
        if not inner:
            index = 0
        else:
            end = kept[-1] + 1
            index = min(inner, key=lambda i: (kept[i] - kept[i - 1]) / (end - kept[i]))
        gone.append(kept.pop(index))
    return gone
