"""The radix tree: matches inside edges, keeps itself small, and agrees with a plain search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.engine.kvcache.radix_tree import RadixNode, RadixTree
from afterglow.engine.types.entries import EntryBuffer, EntryInterner, Media, common_prefix_length


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_a_match_may_end_inside_an_edge():
    tree: RadixTree[str] = RadixTree()
    tree.insert(ids(1, 2, 3, 4, 5), "one")
    match = tree.match(ids(1, 2, 3, 9))
    assert match.length == 3
    assert tree.find_nearest(match, 5) == [("one", 3)]


def test_the_nearest_come_first():
    tree: RadixTree[str] = RadixTree()
    for name, numbers in {"a": (1, 2, 3, 4), "b": (1, 2, 9), "c": (7,), "d": (1, 2, 3, 8)}.items():
        tree.insert(ids(*numbers), name)
    found = tree.find_nearest(tree.match(ids(1, 2, 3, 4, 5)), 10)
    assert found[0] == ("a", 4)
    assert dict(found) == {"a": 4, "d": 3, "b": 2, "c": 0}


def test_anchors_along_a_prompt_are_those_it_runs_through():
    tree: RadixTree[str] = RadixTree()
    for name, numbers in {"short": (1, 2), "long": (1, 2, 3, 4), "beside": (1, 5)}.items():
        tree.insert(ids(*numbers), name)
    assert list(tree.iter_anchors_on_path(tree.match(ids(1, 2, 3, 9)))) == ["short"]
    assert list(tree.iter_ancestors("long")) == ["long", "short"]


def test_what_only_one_anchor_holds_is_unique():
    tree: RadixTree[str] = RadixTree()
    tree.insert(ids(1, 2, 3, 4), "a")
    assert tree.count_unique_entries("a") == 4
    tree.insert(ids(1, 2, 9), "b")
    assert (tree.count_unique_entries("a"), tree.count_unique_entries("b")) == (2, 1)
    tree.insert(ids(1, 2, 3, 4), "twin")
    assert tree.count_unique_entries("a") == 0


def nodes(node: RadixNode[str]) -> int:
    return 1 + sum(nodes(child) for child in node.children.values())


def test_removing_everything_leaves_nothing():
    tree: RadixTree[int] = RadixTree()
    rng = np.random.default_rng(0)
    for number in range(200):
        tree.insert(rng.integers(0, 3, rng.integers(0, 20)), number)
    for number in range(200):
        tree.remove(number)
    assert len(tree) == 0
    assert nodes(tree.get_root()) == 1


sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(sequences, st.lists(st.integers(0, 2), max_size=8), st.data())
def test_it_agrees_with_a_plain_search(paths, query, data):
    tree: RadixTree[int] = RadixTree()
    for number, path in enumerate(paths):
        tree.insert(ids(*path), number)
    gone = set(data.draw(st.lists(st.sampled_from(range(len(paths))), unique=True)))
    for number in gone:
        tree.remove(number)
    left = {number: path for number, path in enumerate(paths) if number not in gone}
    expected = {number: common_prefix_length(ids(*path), ids(*query)) for number, path in left.items()}
    assert dict(tree.find_nearest(tree.match(ids(*query)), 100)) == expected
    along = {number for number, path in left.items() if expected[number] == len(path)}
    assert set(tree.iter_anchors_on_path(tree.match(ids(*query)))) == along
    for number, path in left.items():
        others = [common_prefix_length(ids(*path), ids(*other)) for n, other in left.items() if n != number]
        assert tree.count_unique_entries(number) == len(path) - max(others, default=0)


def test_media_are_single_entries_with_cells_and_positions_of_their_own():
    ledger = EntryInterner()
    picture, other = Media(b"a", cells=256, positions=16), Media(b"b", cells=256, positions=16)
    array = ledger.intern([1, 2, picture, 3, picture, other])
    assert array[2] == array[4] != array[5]
    assert array[2] < 0
    assert ledger.count_cells(array) == 3 + 3 * 256
    assert ledger.count_positions(array) == 3 + 3 * 16
    assert ledger.get_media(int(array[5])) is other


def test_a_record_grows_and_shrinks_without_losing_anything():
    record = EntryBuffer()
    for number in range(500):
        record.append(number)
    record.extend(ids(*range(500, 2000)))
    record.truncate(1500)
    record.append(7)
    assert len(record) == 1501
    assert list(record.entries[:1500]) == list(range(1500))
    assert record.entries[1500] == 7
