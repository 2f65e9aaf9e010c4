"""Byte budget: the bytes of tables are estimated, and the estimates are about what Python allocates."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np

from afterglow.engine.kvcache.blocks import Block, BlockHasher, BlockTree
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.checkpoints import Checkpoint, CheckpointStore
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.settings import CheckpointSettings
from support.play import ask, fake, prompt


def measure_bytes(function: Callable[[], object]) -> int:
    """Return the bytes that Python allocates in a function and does not free."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = function()
        after = tracemalloc.get_traced_memory()[0]
        del result
        return after - before
    finally:
        tracemalloc.stop()


def make_entries(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100_000, length)


def test_kinds_add_up():
    budget = ByteBudget(100)
    budget.add("blocks", 60)
    budget.add("tables", 10)
    budget.remove("blocks", 20)
    assert budget.by_kind == {"blocks": 40, "tables": 10}
    assert (budget.used_bytes, budget.free_bytes) == (50, 50)


def test_the_tables_of_blocks_are_counted_to_within_a_factor_of_two():
    budget = ByteBudget(10**9)

    def fill() -> BlockTree:
        interner = EntryInterner()
        hasher = BlockHasher(b"model", interner, 64)
        tree = BlockTree(hasher, interner, budget)
        for path in range(40):
            parent = hasher.get_root_key("")
            for start in range(0, 50 * 64, 64):
                entries = make_entries(64, path * 10_000 + start)
                key = hasher._hash_block(parent, entries.tobytes())
                sizes = {"cells": 64, "nbytes": 80_000 + start, "file_bytes": 81_000 + start}
                tree.add(Block(key=key, parent=parent, start=start, entries=entries, **sizes))
                parent = key
        return tree

    allocated = measure_bytes(fill)
    assert allocated / 2 < budget.get("tables") < allocated * 2


def test_the_tables_of_checkpoints_are_counted_to_within_a_factor_of_two():
    budget = ByteBudget(10**9)

    class State:
        nbytes = 0

    def fill() -> CheckpointStore:
        checkpoints = CheckpointStore(CheckpointSettings(), CostModel(), budget)
        for path in range(200):
            entries = make_entries(400, path)
            for position in (100, 250, 400):
                keys = {"key": bytes([position % 256]) * 32, "parent": bytes([path]) * 32}
                checkpoints.add(Checkpoint(entries=entries[:position].copy(), state=State(), **keys))
        return checkpoints

    allocated = measure_bytes(fill)
    assert allocated / 2 < budget.used_bytes < allocated * 2


def test_every_byte_has_a_kind():
    engine = fake("hybrid", sequences=1)
    for number in range(4):
        ask(engine, prompt(60, number), boundaries=frozenset({30}))
    budget = engine.prefix_cache.store.ram.budget
    assert {"blocks", "checkpoints", "tables"} <= budget.by_kind.keys()
    assert sum(budget.by_kind.values()) == budget.used_bytes > 0
