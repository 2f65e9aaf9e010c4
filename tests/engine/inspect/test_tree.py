"""The prefix tree of an engine: tiers, pins, requests, folding, slices, and what is left after a node is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.engine import slices
from afterglow.engine.inspect import tree
from afterglow.engine.inspect.cache import get_cache_events
from afterglow.errors import Closed, UnsupportedOperation
from support.play import KINDS, ask, fake, play, prompt, request
from support.tree_truth import check_tree, read_tree

SYSTEM = prompt(40, 1)


def run_all(engine, future):
    while engine.sliced_work.run_slice():
        pass
    return future.result(10)


def flush(engine):
    while engine.run_idle_task():
        pass
    assert engine.prefix_cache.store.disk_tier.writer.flush()
    engine.prefix_cache.store.refresh()


def find_end(engine, entries):
    """Return the node that ends after these entries."""
    path = np.array(entries)
    ids = {node.id: node for node in read_tree(engine).nodes}
    for node in ids.values():
        found = run_all(engine, tree.find_prefix(engine, node.id))
        if np.array_equal(found.entries, path):
            return node
    raise AssertionError("no node ends there")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_equals_the_truth_with_a_disk_tier(build_engine, kind):
    engine = build_engine(kind, sequences=2)
    for number in range(4):
        ask(engine, SYSTEM + prompt(20, 10 + number), boundaries=frozenset({40}))
    flush(engine)
    assert check_disk_truth(engine) > 0
    restarted = build_engine(kind, sequences=2)
    if kind != "recurrent":  # the index of a recurrent model has no paths
        assert any(node.disk_entries and not node.device_entries for node in read_tree(restarted).nodes)


def check_disk_truth(engine):
    """Check the tree without the bytes and positions of checkpoints, which the truth knows of the RAM tier only."""
    nodes = read_tree(engine).nodes
    blocks = list(engine.prefix_cache.store.tree)
    disk = engine.prefix_cache.store.disk_tier
    on_disk = sum(block.file_bytes for block in blocks) + sum(item.nbytes for item in disk.list_checkpoints())
    assert sum(node.disk_bytes for node in nodes) == on_disk
    positions = {position for node in nodes for position in node.checkpoints}
    assert positions >= {item.position for item in disk.list_checkpoints()}
    return on_disk


def test_a_system_prompt_is_the_trunk_of_its_conversations():
    engine = fake(sequences=4)
    for number in range(3):
        ask(engine, SYSTEM + prompt(20, 10 + number))
    check_tree(engine)
    trunk = read_tree(engine).nodes[0]
    assert (trunk.start, trunk.end, trunk.sharers, trunk.hits) == (0, 40, 3, 2)
    assert trunk.device_entries == 40
    assert trunk.seconds_saved > 0


def test_live_requests_are_at_the_deepest_node_of_their_path():
    engine = fake(sequences=1)
    ask(engine, SYSTEM + prompt(5, 2))
    for id, seed in (("running", 3), ("waiting", 4)):
        engine.submit(request(id, SYSTEM + prompt(30, seed)))
    engine.step()
    nodes = {id: node for node in read_tree(engine).nodes for id in node.requests}
    assert nodes["running"].sequence == 0
    assert nodes["waiting"].end <= 40
    play(engine)
    assert not any(node.requests for node in read_tree(engine).nodes)


def test_a_node_names_the_slot_of_its_sequence_after_the_sequence_was_moved_in_the_backend():
    engine = fake(sequences=4)
    ask(engine, SYSTEM, sequence=2)
    slots = engine.prefix_cache.slots
    slots[2].move_to(slots[0])  # as packing does
    assert [node.sequence for node in read_tree(engine).nodes] == [2]


def test_the_least_recently_used_branches_are_folded():
    engine = fake(sequences=4)
    for number in range(4):
        ask(engine, SYSTEM + prompt(20, 10 + number))
    whole, folded = read_tree(engine), read_tree(engine, max_nodes=3)
    assert len(folded.nodes) == 3 < whole.total_nodes == folded.total_nodes
    shown = {node.id for node in folded.nodes}
    assert all(node.parent is None or node.parent in shown for node in folded.nodes)
    assert sum(node.folded for node in folded.nodes) == whole.total_nodes - 3
    newest = min((node for node in whole.nodes if node.sharers == 1), key=lambda node: node.idle_seconds)
    assert newest.id in shown


def test_an_unchanged_version_builds_no_tree():
    engine = fake()
    ask(engine, SYSTEM)
    version = read_tree(engine).version
    assert tree.get_tree(engine, since=version) is None
    assert not engine.sliced_work
    ask(engine, [*SYSTEM, 1, 2])
    assert read_tree(engine, since=version).version != version


def test_the_tree_is_built_between_the_steps_of_a_busy_engine(monkeypatch):
    monkeypatch.setattr(slices, "STALLED_SECONDS", 0.0)  # decodes of the fake backend are too short to wait for
    engine = fake(sequences=4)
    for number in range(3):
        ask(engine, SYSTEM + prompt(20, 10 + number))
    engine.submit(request("busy", prompt(30, 5), max_tokens=300, ignore_eos=True))
    future = tree.get_tree(engine)
    steps = 0
    while not future.done():
        engine.step()
        steps += 1
    assert engine.is_busy
    assert future.result().unpack().total_nodes >= 4
    assert steps >= 1


def test_a_closed_engine_fails_the_trees_that_are_not_built():
    engine = fake()
    future = tree.get_tree(engine)
    engine.close()
    with pytest.raises(Closed):
        future.result(1)


def test_an_id_stays_the_same_from_the_device_to_the_disk(build_engine):
    engine = build_engine(sequences=1)
    tokens = ask(engine, SYSTEM).tokens
    node = find_end(engine, (SYSTEM + tokens)[:-1])
    assert (node.device_entries, node.disk_entries) == (node.end, 0)
    ask(engine, prompt(50, 9))  # evicts it
    flush(engine)
    stored = next(other for other in read_tree(engine).nodes if other.id == node.id)
    assert (stored.device_entries, stored.ram_entries, stored.disk_entries) == (0, node.end, node.end)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_node_is_nowhere_and_its_siblings_stay(build_engine, kind):
    engine = build_engine(kind, sequences=2)
    ends = []
    for number in range(4):
        question = SYSTEM + prompt(30, 10 + number)
        ends.append((question + ask(engine, question, boundaries=frozenset({40})).tokens)[:-1])
    flush(engine)
    before = {node.id for node in read_tree(engine).nodes}
    prefix = run_all(engine, tree.find_prefix(engine, find_end(engine, ends[0]).id))
    tree.forget_prefix(engine, prefix)
    flush(engine)
    after = read_tree(engine).nodes
    assert prefix.id not in {node.id for node in after}
    assert len(after) >= len(before) - 3
    assert ask(engine, ends[0], boundaries=frozenset({40})).cached <= prefix.start
    assert ask(engine, [*ends[3], 1, 2]).cached > 40


def test_forgetting_keeps_the_sequence_of_a_running_request():
    engine = fake(sequences=2)
    engine.submit(request("one", SYSTEM, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    node = next(node for node in read_tree(engine).nodes if node.sequence is not None)
    prefix = run_all(engine, tree.find_prefix(engine, node.id))
    report = tree.forget_prefix(engine, prefix)
    assert (report.sequences, report.busy_sequences) == (0, 1)
    while engine.is_busy:
        engine.step()


def test_a_pin_on_a_node_ends_at_this_node():
    engine = fake(sequences=2)
    ask(engine, SYSTEM + prompt(20, 2))
    ask(engine, SYSTEM + prompt(20, 3))
    trunk = read_tree(engine).nodes[0]
    prefix = run_all(engine, tree.find_prefix(engine, trunk.id))
    tree.pin_prefix(engine, prefix)
    assert [node.id for node in read_tree(engine).nodes if node.pinned] == [trunk.id]
    assert tree.unpin_prefix(engine, prefix)
    assert not tree.unpin_prefix(engine, prefix)
    assert not any(node.pinned for node in read_tree(engine).nodes)


def test_a_prefix_cannot_be_exported_without_a_disk_tier():
    engine = fake()
    ask(engine, SYSTEM)
    prefix = run_all(engine, tree.find_prefix(engine, read_tree(engine).nodes[0].id))
    with pytest.raises(UnsupportedOperation, match="no disk cache"):
        tree.store_prefix(engine, prefix)


def test_reuses_beyond_a_truncation_are_not_counted_for_other_entries():
    engine = fake(sequences=1)
    first = ask(engine, SYSTEM).tokens
    ask(engine, SYSTEM + first)  # reuses nearly all of it
    ask(engine, SYSTEM[:10] + prompt(60, 7))  # reuses 10 entries and replaces the others
    slot = engine.prefix_cache.slots[0]
    assert max(slot.reuse_lengths) <= 11
    deepest = max(read_tree(engine).nodes, key=lambda node: node.end)
    assert deepest.start >= 10 or deepest.hits <= 2


def test_cache_events_say_what_was_stored_loaded_and_evicted(build_engine):
    engine = build_engine(sequences=1)
    start = get_cache_events(engine, 0).last_number
    ask(engine, SYSTEM)
    ask(engine, prompt(50, 9))
    flush(engine)
    ask(engine, SYSTEM)
    page = get_cache_events(engine, start)
    kinds = {(event.kind, event.tier) for event in page.events}
    assert {("stored", "ram"), ("stored", "disk"), ("evicted", "device"), ("loaded", "ram")} <= kinds
    assert get_cache_events(engine, page.last_number).events == ()
