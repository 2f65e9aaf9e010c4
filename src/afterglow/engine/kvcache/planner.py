"""Prefix planner: chooses the cheapest way to start a prompt from cached state. A pure function of `PlanInputs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from afterglow.engine.kvcache.blocks import StoredPrefix
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import estimate_eviction_cost
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.types.entries import Entries, round_down_to_grid


@dataclass(frozen=True, slots=True)
class ReuseCandidate:
    """Sequence on the device that shares a prefix with the prompt."""

    slot: Slot
    shared_entries: int  # length of the common prefix, as far as the KV cache holds it
    idle_seconds: float  # since its last use; 0 for busy sequences


@dataclass(frozen=True, slots=True)
class Continue:
    """Reuse an idle sequence in place: truncate it, or restore a checkpoint if one is given."""

    slot: Slot
    reuse_length: int
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Copy the prefix of a sequence to another slot, then restore a checkpoint if one is given."""

    source: Slot
    reuse_length: int
    target: Slot
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Load a checkpoint that is complete without attention cells into a slot."""

    checkpoint: Checkpoint
    reuse_length: int
    target: Slot


@dataclass(frozen=True, slots=True)
class LoadStored:
    """Load stored blocks into a slot, then restore a checkpoint if one is given."""

    stored_prefix: StoredPrefix
    reuse_length: int
    target: Slot
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    """Prefix miss: compute the prompt from its first entry."""

    target: Slot
    reuse_length: int = 0


PrefixPlan: TypeAlias = Continue | Fork | Restore | LoadStored | Fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Everything that a plan depends on."""

    prompt: Entries
    candidates: Sequence[ReuseCandidate]
    checkpoints: Sequence[Checkpoint]  # on the path of the prompt, deepest first
    target: Slot | None  # the slot with the lowest eviction cost; None: all are busy
    target_eviction_cost: float  # expected seconds that evicting it costs later
    can_fork_anywhere: bool
    checkpoints_need_cells: bool
    has_copy_cost: bool
    cost_model: CostModel
    grid: int = 0  # entries per chunk in deterministic mode; 0: any length can be reused
    stored_prefix: StoredPrefix = field(default_factory=StoredPrefix)  # prefix of the prompt in all tiers
    fast_prefix: StoredPrefix = field(default_factory=StoredPrefix)  # the part of it before what only a slow tier has
    estimate_load_seconds: Callable[[StoredPrefix, int], float] = lambda stored_prefix, reuse_length: 0.0
    estimate_checkpoint_seconds: Callable[[Checkpoint], float] = lambda checkpoint: 0.0
    cells_suffice: bool = True  # the state of a sequence is nothing but cells
    estimate_store_seconds: Callable[[int], float] | None = None  # to store a sequence; None: evicted ones are lost
    has_last_logits: bool = False  # the logits after the prompt are stored

    @property
    def max_reuse_length(self) -> int:
        """Most entries that a plan can reuse. The last entry is computed for its logits, unless they are stored."""
        return len(self.prompt) if self.has_last_logits else len(self.prompt) - 1

    def limit_reuse(self, shared_entries: int) -> int:
        """Return how much of a common prefix is reusable: in deterministic mode, up to the end of a full chunk."""
        return round_down_to_grid(min(shared_entries, self.max_reuse_length), self.prompt, self.grid)


def plan_prefix(inputs: PlanInputs) -> PrefixPlan | None:
    """Return the cheapest plan, or None if the request has to wait for a slot."""
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
    missing = len(inputs.prompt) - plan.reuse_length
    return inputs.cost_model.estimate_prefill_seconds(missing, after=plan.reuse_length)


def _find_reusable_length(
    inputs: PlanInputs, candidate: ReuseCandidate, *, is_copy: bool
) -> tuple[int, Checkpoint | None]:
    """Return how many entries of a candidate are reusable, in place or in a copy, and the checkpoint needed for it."""
    shared = inputs.limit_reuse(candidate.shared_entries)
    is_whole = shared == len(candidate.slot)
    if candidate.slot.can_resume_at(shared) and (is_whole or not is_copy or inputs.can_fork_anywhere):
        return shared, None
    checkpoint = _find_checkpoint(inputs, shared)
    return (0, None) if checkpoint is None else (checkpoint.position, checkpoint)


def _find_checkpoint(inputs: PlanInputs, length: int) -> Checkpoint | None:
    """Return the deepest reusable checkpoint within the first `length` entries."""
    for checkpoint in inputs.checkpoints:
        if checkpoint.position <= length:
            return checkpoint
    return None


def _list_continue_options(inputs: PlanInputs) -> Iterator[tuple[float, PrefixPlan]]:
    for candidate in inputs.candidates:
        slot = candidate.slot
        if slot.busy:
            continue
        length, checkpoint = _find_reusable_length(inputs, candidate, is_copy=False)
        if length:
            transfer = inputs.estimate_store_seconds and inputs.estimate_store_seconds(len(slot))
            recompute = inputs.cost_model.estimate_prefill_seconds(len(slot) - length, after=length)
            cost = estimate_eviction_cost(recompute, candidate.idle_seconds, transfer)
            yield cost, Continue(slot, length, checkpoint)


def _list_fork_options(inputs: PlanInputs) -> Iterator[tuple[float, PrefixPlan]]:
    for candidate in inputs.candidates:
        target = inputs.target
        if target is None or target is candidate.slot:
            continue
        length, checkpoint = _find_reusable_length(inputs, candidate, is_copy=True)
        if length:
            transfer = inputs.cost_model.estimate_copy_seconds(len(candidate.slot)) if inputs.has_copy_cost else 0.0
            yield inputs.target_eviction_cost + transfer, Fork(candidate.slot, length, target, checkpoint)


def _list_restore_options(inputs: PlanInputs) -> Iterator[tuple[float, PrefixPlan]]:
    if inputs.checkpoints_need_cells or inputs.target is None:
        return
    checkpoint = _find_checkpoint(inputs, inputs.max_reuse_length)
    if checkpoint is not None:
        cost = inputs.target_eviction_cost + inputs.estimate_checkpoint_seconds(checkpoint)
        yield cost, Restore(checkpoint, checkpoint.position, inputs.target)


def _list_load_options(inputs: PlanInputs) -> Iterator[tuple[float, PrefixPlan]]:
    for stored_prefix in (inputs.stored_prefix, inputs.fast_prefix):
        yield from _list_load_options_of(inputs, stored_prefix)


def _list_load_options_of(inputs: PlanInputs, stored_prefix: StoredPrefix) -> Iterator[tuple[float, PrefixPlan]]:
    target = inputs.target
    if target is None or not stored_prefix.length:
        return
    length = inputs.limit_reuse(stored_prefix.length)
    checkpoint = None
    if not inputs.cells_suffice:
        checkpoint = _find_checkpoint(inputs, length)
        length = checkpoint.position if checkpoint else 0
    if length:
        transfer = inputs.estimate_load_seconds(stored_prefix, length)
        transfer += inputs.estimate_checkpoint_seconds(checkpoint) if checkpoint else 0.0
        yield inputs.target_eviction_cost + transfer, LoadStored(stored_prefix, length, target, checkpoint)
