"""How to begin a request: what of its prompt is in memory already, and the cheapest way to it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from afterglow.engine.checkpoint import Checkpoint
from afterglow.engine.costs import Costs
from afterglow.engine.segments import Cover
from afterglow.engine.sequence import Sequence as Slot

# How likely an entry that is thrown away is asked for again, right after it was used and per half-life later.
RETURN = 0.5
HALF_LIFE = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class Source:
    """A sequence in memory that begins like the prompt."""

    slot: Slot
    shared: int  # entries they have in common, as far as memory holds them
    idle_time: float  # seconds since it was used; busy sequences have none


@dataclass(frozen=True, slots=True)
class Continue:
    """Use this idle sequence itself: keep its first entries, back to a checkpoint where one is named."""

    slot: Slot
    keep: int
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Copy the first entries of this sequence into another slot, back to a checkpoint where one is named."""

    source: Slot
    keep: int
    target: Slot
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Load a checkpoint that is complete by itself into a slot."""

    checkpoint: Checkpoint
    keep: int
    target: Slot


@dataclass(frozen=True, slots=True)
class Recall:
    """Load stored cells into a slot, and over them a checkpoint where one is named."""

    cover: Cover
    keep: int
    target: Slot
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    """Nothing usable is in memory: begin at the beginning."""

    target: Slot
    keep: int = 0


Reuse: TypeAlias = Continue | Fork | Restore | Recall | Fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything a plan depends on."""

    length: int  # of the prompt
    sources: Sequence[Source]
    checkpoints: Sequence[Checkpoint]  # along the prompt, deepest first
    target: Slot | None  # the slot that can best be spared; None: every one is busy
    target_loss: float  # seconds that sparing it is expected to cost later
    resumable: Callable[[Slot, int], bool]
    forks_anywhere: bool
    needs_cells: bool
    copies_cost: bool
    costs: Costs
    round_down: Callable[[int], int] = lambda keep: keep
    cover: Cover = field(default_factory=Cover)  # what of the prompt is stored outside of memory
    cover_seconds: Callable[[Cover, int], float] = lambda cover, keep: 0.0
    checkpoint_seconds: Callable[[Checkpoint], float] = lambda checkpoint: 0.0
    cells_suffice: bool = True  # memory is nothing but cells
    storing: Callable[[int], float] | None = None  # seconds to store so many entries, where that is done


def plan(situation: Situation) -> Reuse | None:
    """The cheapest way to begin, or None where it has to wait for a slot.

    At least the last entry is computed again, because its logits are needed: reuse is planned over all but it.
    """
    options = [*_continued(situation), *_forked(situation), *_restored(situation), *_recalled(situation)]
    if situation.target is not None:
        options.append((situation.target_loss, Fresh(situation.target)))
    if not options:
        return None
    return min(options, key=lambda option: option[0] + _computing(situation, option[1]))[1]


def _computing(situation: Situation, reuse: Reuse) -> float:
    return (situation.length - reuse.keep) * situation.costs.per_entry


def _usable(situation: Situation, source: Source, *, copied: bool) -> tuple[int, Checkpoint | None]:
    """How many of the source's entries can be kept, in place or in a copy, and with which checkpoint."""
    shared = situation.round_down(min(source.shared, situation.length - 1))
    whole = shared == len(source.slot)
    if situation.resumable(source.slot, shared) and (whole or not copied or situation.forks_anywhere):
        return shared, None
    for checkpoint in situation.checkpoints:
        if checkpoint.depth <= shared and situation.round_down(checkpoint.depth) == checkpoint.depth:
            return checkpoint.depth, checkpoint
    return 0, None


def _continued(situation: Situation) -> list[tuple[float, Reuse]]:
    options: list[tuple[float, Reuse]] = []
    for source in situation.sources:
        if source.slot.busy:
            continue
        keep, checkpoint = _usable(situation, source, copied=False)
        if keep:
            moving = situation.storing and situation.storing(len(source.slot))
            lost = loss(len(source.slot) - keep, source.idle_time, situation.costs, moving)
            options.append((lost, Continue(source.slot, keep, checkpoint)))
    return options


def _forked(situation: Situation) -> list[tuple[float, Reuse]]:
    options: list[tuple[float, Reuse]] = []
    for source in situation.sources:
        target = situation.target
        if target is None or target is source.slot:
            continue
        keep, checkpoint = _usable(situation, source, copied=True)
        if keep:
            moving = situation.costs.of_copy(len(source.slot)) if situation.copies_cost else 0.0
            options.append((situation.target_loss + moving, Fork(source.slot, keep, target, checkpoint)))
    return options


def _restored(situation: Situation) -> list[tuple[float, Reuse]]:
    if situation.needs_cells or situation.target is None:
        return []
    for checkpoint in situation.checkpoints:
        depth = checkpoint.depth
        if depth < situation.length and situation.round_down(depth) == depth:
            moving = situation.checkpoint_seconds(checkpoint)
            return [(situation.target_loss + moving, Restore(checkpoint, depth, situation.target))]
    return []


def _recalled(situation: Situation) -> list[tuple[float, Reuse]]:
    cover, target = situation.cover, situation.target
    if target is None or not cover.length:
        return []
    keep = situation.round_down(min(cover.length, situation.length - 1))
    checkpoint = None
    if not situation.cells_suffice:
        usable = [one for one in situation.checkpoints if one.depth <= keep]
        checkpoint = next((one for one in usable if situation.round_down(one.depth) == one.depth), None)
        keep = checkpoint.depth if checkpoint else 0
    if not keep:
        return []
    moving = situation.cover_seconds(cover, keep)
    moving += situation.checkpoint_seconds(checkpoint) if checkpoint else 0.0
    return [(situation.target_loss + moving, Recall(cover, keep, target, checkpoint))]


def loss(entries: int, idle_time: float, costs: Costs, moving: float | None = None) -> float:
    """Seconds that giving entries up is expected to cost later: to compute them again, or to store and load what
    holds them, where that takes `moving` seconds each way."""
    returning = RETURN * math.pow(0.5, idle_time / HALF_LIFE)
    computing = returning * entries * costs.per_entry
    return computing if moving is None else min(computing, moving + returning * moving)
