"""How to begin a request: what of its prompt is in memory already, and the cheapest way to it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from afterglow.engine.kvcache.blocks import StoredPrefix
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.sequence import Sequence as Slot

# How likely an entry that is thrown away is asked for again, right after it was used and per half-life later.
REUSE_PROBABILITY = 0.5
DEVICE_HALF_LIFE_SECONDS = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class ReuseCandidate:
    """A sequence in memory that begins like the prompt."""

    slot: Slot
    shared_entries: int  # entries they have in common, as far as memory holds them
    idle_seconds: float  # seconds since it was used; busy sequences have none


@dataclass(frozen=True, slots=True)
class Continue:
    """Use this idle sequence itself: keep its first entries, back to a checkpoint where one is named."""

    slot: Slot
    reuse_length: int
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Copy the first entries of this sequence into another slot, back to a checkpoint where one is named."""

    source: Slot
    reuse_length: int
    target: Slot
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Load a checkpoint that is complete by itself into a slot."""

    checkpoint: Checkpoint
    reuse_length: int
    target: Slot


@dataclass(frozen=True, slots=True)
class LoadStored:
    """Load stored cells into a slot, and over them a checkpoint where one is named."""

    stored_prefix: StoredPrefix
    reuse_length: int
    target: Slot
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    """Nothing usable is in memory: begin at the beginning."""

    target: Slot
    reuse_length: int = 0


PrefixPlan: TypeAlias = Continue | Fork | Restore | LoadStored | Fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Everything a plan depends on."""

    prompt_length: int  # of the prompt
    candidates: Sequence[ReuseCandidate]
    checkpoints: Sequence[Checkpoint]  # along the prompt, deepest first
    target: Slot | None  # the slot that can best be spared; None: every one is busy
    target_eviction_cost: float  # seconds that sparing it is expected to cost later
    can_resume_at: Callable[[Slot, int], bool]
    can_fork_anywhere: bool
    checkpoints_need_cells: bool
    has_copy_cost: bool
    cost_model: CostModel
    round_down: Callable[[int], int] = lambda keep: keep
    stored_prefix: StoredPrefix = field(default_factory=StoredPrefix)  # what of the prompt is stored outside of memory
    estimate_load_seconds: Callable[[StoredPrefix, int], float] = lambda cover, keep: 0.0
    estimate_checkpoint_seconds: Callable[[Checkpoint], float] = lambda checkpoint: 0.0
    cells_suffice: bool = True  # memory is nothing but cells
    estimate_store_seconds: Callable[[int], float] | None = None  # seconds to store so many entries, where that is done


def plan_prefix(inputs: PlanInputs) -> PrefixPlan | None:
    """The cheapest way to begin, or None where it has to wait for a slot.

    At least the last entry is computed again, because its logits are needed: reuse is planned over all but it.
    """
    options = [
        *_list_continue_options(inputs),
        *_list_fork_options(inputs),
        *_list_restore_options(inputs),
        *_list_load_options(inputs),
    ]
    if inputs.target is not None:
        options.append((inputs.target_eviction_cost, Fresh(inputs.target)))
    if not options:
        return None
    return min(options, key=lambda option: option[0] + _estimate_compute_seconds(inputs, option[1]))[1]


def _estimate_compute_seconds(inputs: PlanInputs, plan: PrefixPlan) -> float:
    return (inputs.prompt_length - plan.reuse_length) * inputs.cost_model.seconds_per_entry


def _find_reusable_length(
    inputs: PlanInputs, candidate: ReuseCandidate, *, is_copy: bool
) -> tuple[int, Checkpoint | None]:
    """How many of the source's entries can be kept, in place or in a copy, and with which checkpoint."""
    shared = inputs.round_down(min(candidate.shared_entries, inputs.prompt_length - 1))
    whole = shared == len(candidate.slot)
    if inputs.can_resume_at(candidate.slot, shared) and (whole or not is_copy or inputs.can_fork_anywhere):
        return shared, None
    for checkpoint in inputs.checkpoints:
        if checkpoint.position <= shared and inputs.round_down(checkpoint.position) == checkpoint.position:
            return checkpoint.position, checkpoint
    return 0, None


def _list_continue_options(inputs: PlanInputs) -> list[tuple[float, PrefixPlan]]:
    options: list[tuple[float, PrefixPlan]] = []
    for source in inputs.candidates:
        if source.slot.busy:
            continue
        keep, checkpoint = _find_reusable_length(inputs, source, is_copy=False)
        if keep:
            moving = inputs.estimate_store_seconds and inputs.estimate_store_seconds(len(source.slot))
            lost = estimate_eviction_cost(len(source.slot) - keep, source.idle_seconds, inputs.cost_model, moving)
            options.append((lost, Continue(source.slot, keep, checkpoint)))
    return options


def _list_fork_options(inputs: PlanInputs) -> list[tuple[float, PrefixPlan]]:
    options: list[tuple[float, PrefixPlan]] = []
    for source in inputs.candidates:
        target = inputs.target
        if target is None or target is source.slot:
            continue
        keep, checkpoint = _find_reusable_length(inputs, source, is_copy=True)
        if keep:
            moving = inputs.cost_model.estimate_copy_seconds(len(source.slot)) if inputs.has_copy_cost else 0.0
            options.append((inputs.target_eviction_cost + moving, Fork(source.slot, keep, target, checkpoint)))
    return options


def _list_restore_options(inputs: PlanInputs) -> list[tuple[float, PrefixPlan]]:
    if inputs.checkpoints_need_cells or inputs.target is None:
        return []
    for checkpoint in inputs.checkpoints:
        depth = checkpoint.position
        if depth < inputs.prompt_length and inputs.round_down(depth) == depth:
            moving = inputs.estimate_checkpoint_seconds(checkpoint)
            return [(inputs.target_eviction_cost + moving, Restore(checkpoint, depth, inputs.target))]
    return []


def _list_load_options(inputs: PlanInputs) -> list[tuple[float, PrefixPlan]]:
    cover, target = inputs.stored_prefix, inputs.target
    if target is None or not cover.length:
        return []
    keep = inputs.round_down(min(cover.length, inputs.prompt_length - 1))
    checkpoint = None
    if not inputs.cells_suffice:
        usable = [one for one in inputs.checkpoints if one.position <= keep]
        checkpoint = next((one for one in usable if inputs.round_down(one.position) == one.position), None)
        keep = checkpoint.position if checkpoint else 0
    if not keep:
        return []
    moving = inputs.estimate_load_seconds(cover, keep)
    moving += inputs.estimate_checkpoint_seconds(checkpoint) if checkpoint else 0.0
    return [(inputs.target_eviction_cost + moving, LoadStored(cover, keep, target, checkpoint))]


def estimate_eviction_cost(
    entry_count: int, idle_seconds: float, cost_model: CostModel, transfer_seconds: float | None = None
) -> float:
    """Seconds that giving entries up is expected to cost later: to compute them again, or to store and load what
    holds them, where that takes `moving` seconds each way."""
    returning = REUSE_PROBABILITY * math.pow(0.5, idle_seconds / DEVICE_HALF_LIFE_SECONDS)
    computing = returning * entry_count * cost_model.seconds_per_entry
    return computing if transfer_seconds is None else min(computing, transfer_seconds + returning * transfer_seconds)
