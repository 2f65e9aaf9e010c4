"""Radix tree: matches inside edges, removes empty branches, and agrees with a linear search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.engine.kvcache.radix_tree import RadixNode, RadixTree
from afterglow.engine.types.entries import common_prefix_length


def to_entries(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_a_match_may_end_inside_an_edge():
    tree: RadixTree[str] = RadixTree()
    tree.insert(to_entries(1, 2, 3, 4, 5), "one")
    match = tree.match(to_entries(1, 2, 3, 9))
    assert match.length == 3
    assert tree.find_nearest(match, 5) == [("one", 3)]


def test_anchors_with_the_longest_common_prefix_come_first():
    tree: RadixTree[str] = RadixTree()
    for name, numbers in {"a": (1, 2, 3, 4), "b": (1, 2, 9), "c": (7,), "d": (1, 2, 3, 8)}.items():
        tree.insert(to_entries(*numbers), name)
    nearest = tree.find_nearest(tree.match(to_entries(1, 2, 3, 4, 5)), 10)
    assert nearest[0] == ("a", 4)
    assert dict(nearest) == {"a": 4, "d": 3, "b": 2, "c": 0}


def test_anchors_on_the_path_of_a_prompt_are_its_prefixes():
    tree: RadixTree[str] = RadixTree()
    for name, numbers in {"short": (1, 2), "long": (1, 2, 3, 4), "sibling": (1, 5)}.items():
        tree.insert(to_entries(*numbers), name)
    assert list(tree.iter_anchors_on_path(tree.match(to_entries(1, 2, 3, 9)))) == ["short"]
    assert list(tree.iter_ancestors("long")) == ["long", "short"]


def test_entries_on_the_path_of_one_anchor_only_are_unique():
    tree: RadixTree[str] = RadixTree()
    tree.insert(to_entries(1, 2, 3, 4), "a")
    assert tree.count_unique_entries("a") == 4
    tree.insert(to_entries(1, 2, 9), "b")
    assert (tree.count_unique_entries("a"), tree.count_unique_entries("b")) == (2, 1)
    tree.insert(to_entries(1, 2, 3, 4), "twin")
    assert tree.count_unique_entries("a") == 0


def count_nodes(node: RadixNode[str]) -> int:
    return 1 + sum(count_nodes(child) for child in node.children.values())


def test_removing_every_anchor_removes_every_node():
    tree: RadixTree[int] = RadixTree()
    rng = np.random.default_rng(0)
    for anchor in range(200):
        tree.insert(rng.integers(0, 3, rng.integers(0, 20)), anchor)
    for anchor in range(200):
        tree.remove(anchor)
    assert len(tree) == 0
    assert count_nodes(tree.get_root()) == 1


paths_strategy = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(paths_strategy, st.lists(st.integers(0, 2), max_size=8), st.data())
def test_the_tree_agrees_with_a_linear_search(paths, query, data):
    tree: RadixTree[int] = RadixTree()
    for anchor, path in enumerate(paths):
        tree.insert(to_entries(*path), anchor)
    removed = set(data.draw(st.lists(st.sampled_from(range(len(paths))), unique=True)))
    for anchor in removed:
        tree.remove(anchor)
    remaining = {anchor: path for anchor, path in enumerate(paths) if anchor not in removed}
    expected = {
        anchor: common_prefix_length(to_entries(*path), to_entries(*query)) for anchor, path in remaining.items()
    }
    assert dict(tree.find_nearest(tree.match(to_entries(*query)), 100)) == expected
    on_path = {anchor for anchor, path in remaining.items() if expected[anchor] == len(path)}
    assert set(tree.iter_anchors_on_path(tree.match(to_entries(*query)))) == on_path
    for anchor, path in remaining.items():
        shared_lengths = [
            common_prefix_length(to_entries(*path), to_entries(*other_path))
            for other_anchor, other_path in remaining.items()
            if other_anchor != anchor
        ]
        assert tree.count_unique_entries(anchor) == len(path) - max(shared_lengths, default=0)
