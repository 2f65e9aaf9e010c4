"""Prefix planner: the cheapest plan for given inputs, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.engine.kvcache.blocks import Block, StoredPrefix
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.planner import (
    Continue,
    Fork,
    Fresh,
    LoadStored,
    PlanInputs,
    PrefixPlan,
    Restore,
    ReuseCandidate,
    plan_prefix,
)
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.types.entries import EntryInterner
from afterglow.testing import FakeBackend


class EmptyState:
    nbytes = 0


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """Backend whose sequences can resume anywhere."""
    monkeypatch.setattr(FakeBackend, "can_resume_at", lambda self, sequence, position: True)
    return FakeBackend("attention", sequences=2)


def make_slot(backend: FakeBackend, seq_id: int, length: int, *, busy: bool = False) -> Sequence:
    """Return a sequence that claims to hold `length` entries; the planner reads only its length."""
    slot = Sequence(seq_id, backend, EntryInterner())
    slot.append_decoded(np.arange(length, dtype=np.int64))
    slot.busy = busy
    return slot


def make_checkpoint(position: int) -> Checkpoint:
    return Checkpoint(entries=np.arange(position, dtype=np.int64), state=EmptyState())


def make_stored_prefix(length: int) -> StoredPrefix:
    entries = np.arange(length, dtype=np.int64)
    block = Block(key=b"1", parent=b"0", start=0, entries=entries, cells=length, nbytes=length)
    return StoredPrefix((block,), length, entries)


def plan(target: Sequence | None, *candidates: ReuseCandidate, **inputs: object) -> PrefixPlan | None:
    """Plan a prompt of 100 entries for an attention model."""
    defaults = {
        "prompt": np.arange(100, dtype=np.int64),
        "candidates": candidates,
        "checkpoints": (),
        "target": target,
        "target_eviction_cost": 0.0,
        "can_fork_anywhere": True,
        "checkpoints_need_cells": True,
        "has_copy_cost": True,
        "cost_model": CostModel(),
    }
    return plan_prefix(PlanInputs(**{**defaults, **inputs}))  # type: ignore[arg-type]


def test_an_idle_sequence_with_a_common_prefix_is_continued_in_place(backend):
    slot, empty = make_slot(backend, 0, 80), make_slot(backend, 1, 0)
    assert plan(empty, ReuseCandidate(slot, 80, 1.0)) == Continue(slot, 80)


def test_a_busy_sequence_is_forked_into_the_target(backend):
    slot, empty = make_slot(backend, 0, 80, busy=True), make_slot(backend, 1, 0)
    assert plan(empty, ReuseCandidate(slot, 60, 0.0)) == Fork(slot, 60, empty)


def test_a_fork_of_a_part_needs_a_checkpoint_if_only_full_sequences_can_be_copied(backend):
    slot, empty = make_slot(backend, 0, 80, busy=True), make_slot(backend, 1, 0)
    checkpoint = make_checkpoint(40)
    candidate = ReuseCandidate(slot, 60, 0.0)
    assert plan(empty, candidate, can_fork_anywhere=False) == Fresh(empty)
    planned = plan(empty, candidate, can_fork_anywhere=False, checkpoints=[checkpoint])
    assert planned == Fork(slot, 40, empty, checkpoint)


def test_a_standalone_checkpoint_is_restored(backend):
    empty, checkpoint = make_slot(backend, 1, 0), make_checkpoint(70)
    planned = plan(empty, checkpoints=[checkpoint], checkpoints_need_cells=False)
    assert planned == Restore(checkpoint, 70, empty)


def test_a_stored_prefix_is_loaded_if_loading_is_faster_than_computing(backend):
    empty, stored_prefix = make_slot(backend, 1, 0), make_stored_prefix(64)
    assert plan(empty, stored_prefix=stored_prefix) == LoadStored(stored_prefix, 64, empty)
    slow = plan(empty, stored_prefix=stored_prefix, estimate_load_seconds=lambda stored_prefix, reuse_length: 10.0)
    assert slow == Fresh(empty)


def test_without_anything_to_reuse_the_prompt_is_computed_or_waits_for_a_slot(backend):
    empty = make_slot(backend, 1, 0)
    assert plan(empty) == Fresh(empty)
    assert plan(None) is None


def test_at_least_the_last_entry_is_always_recomputed(backend):
    empty = make_slot(backend, 1, 0)
    candidates = [ReuseCandidate(make_slot(backend, 0, 100), 100, 1.0)]
    assert plan(empty, *candidates) == Continue(candidates[0].slot, 99)
    planned = plan(empty, stored_prefix=make_stored_prefix(100))
    assert planned is not None
    assert planned.reuse_length == 99
    checkpoints = [make_checkpoint(100), make_checkpoint(50)]
    restored = plan(empty, checkpoints=checkpoints, checkpoints_need_cells=False)
    assert restored == Restore(checkpoints[1], 50, empty)


@settings(max_examples=300, deadline=None)
@given(
    tokens_per_second=st.floats(5, 50_000),
    bytes_per_second=st.floats(1e8, 1e10),
    bytes_per_entry=st.sampled_from([5_000, 20_000, 130_000, 400_000]),
    prompt_length=st.integers(100, 32_000),
    stored_fraction=st.floats(0.05, 1.0),
)
def test_after_one_prompt_the_plan_is_within_a_tenth_of_the_better_choice_on_any_machine(
    tokens_per_second, bytes_per_second, bytes_per_entry, prompt_length, stored_fraction
):
    def compute_seconds(entries: int) -> float:
        return 0.002 + entries / tokens_per_second

    def transfer_seconds(entries: int) -> float:
        return entries * bytes_per_entry / bytes_per_second

    cost_model = CostModel()
    for entries in (2048, 1952):  # the first prompt, in two chunks, and its transfer to RAM
        cost_model.record_prefill(entries, compute_seconds(entries))
    cost_model.record_transfer(4000 * bytes_per_entry, transfer_seconds(4000), entries=4000)

    length = max(1, int(stored_fraction * (prompt_length - 1)))
    empty, stored_prefix = make_slot(FakeBackend("attention"), 1, 0), make_stored_prefix(length)
    planned = plan(
        empty,
        prompt=np.arange(prompt_length, dtype=np.int64),
        stored_prefix=stored_prefix,
        cost_model=cost_model,
        estimate_load_seconds=lambda prefix, count: count * cost_model.bytes_per_entry * cost_model.seconds_per_byte,
    )
    fresh = compute_seconds(prompt_length)
    loaded = transfer_seconds(length) + compute_seconds(prompt_length - length)
    chosen = loaded if isinstance(planned, LoadStored) else fresh
    assert chosen <= 1.1 * min(fresh, loaded)
