"""The tree of blocks finds the longest stored prefix among any number of siblings, in about the same time."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.engine.kvcache.blocks import Block, BlockHasher, BlockTree
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.types.entries import EntryInterner, common_prefix_length

BLOCK_SIZE = 8
PROMPTS = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=BLOCK_SIZE), min_size=1, max_size=12)


def build_tree() -> BlockTree:
    interner = EntryInterner()
    return BlockTree(BlockHasher(b"model", interner, BLOCK_SIZE), interner, ByteBudget(10**9))


def to_entries(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def add_first_block(tree: BlockTree, numbers: list[int]) -> list[Block]:
    """Add the first block of a prompt, unless it is stored; return the blocks that it makes redundant."""
    entries, root = to_entries(numbers), tree.hasher.get_root_key("")
    if tree.find_stored_prefix(entries, "").length == len(entries):
        return []
    key = tree.hasher.hash_block(root, entries)
    return tree.add(Block(key=key, parent=root, start=0, entries=entries, cells=len(entries), nbytes=1))


@given(PROMPTS, PROMPTS)
@settings(deadline=None)
def test_the_longest_prefix_is_that_of_a_search_through_all_siblings(stored, wanted):
    tree = build_tree()
    for numbers in stored:
        add_first_block(tree, numbers)
    for numbers in [*stored, *wanted]:
        entries = to_entries(numbers)
        longest = max(common_prefix_length(block.entries, entries) for block in tree)
        assert tree.find_stored_prefix(entries, "").length == longest


@given(PROMPTS)
@settings(deadline=None)
def test_no_block_is_a_prefix_of_its_sibling_and_none_is_lost(stored):
    tree = build_tree()
    for numbers in stored:
        add_first_block(tree, numbers)
    kept = [tuple(block.entries.tolist()) for block in tree]
    expected = {
        tuple(numbers)
        for numbers in stored
        if not any(len(other) > len(numbers) and other[: len(numbers)] == numbers for other in stored)
    }
    assert sorted(kept) == sorted(expected)
    for block in tree:
        tree.remove(block)
    assert len(tree) == 0


def test_a_prefix_is_found_among_a_hundred_times_as_many_siblings_in_a_few_times_the_time():
    def measure(siblings: int) -> float:
        tree = build_tree()
        for number in range(siblings):
            add_first_block(tree, [1, 2, 3, 4, number])
        entries, seconds = to_entries([1, 2, 3, 4, siblings // 2, 5]), []
        for _ in range(20):
            started = time.thread_time()
            assert tree.find_stored_prefix(entries, "").length == 5
            seconds.append(time.thread_time() - started)
        return min(seconds)

    assert measure(10_000) < 10 * measure(100)
