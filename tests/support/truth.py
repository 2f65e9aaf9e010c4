"""What must be true of an engine on the fake between any two steps, whatever happened before.

Nothing here believes a record or an engine: memory is compared with one that computed the same entries from scratch,
and an answer with what a backend says that nobody manages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.blocks import Block
from afterglow.engine.kvcache.radix_tree import RadixNode, RadixTree
from afterglow.engine.types.backend import DecodeSpan
from afterglow.engine.types.entries import Entries, Entry, EntryInterner, common_prefix_length
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support.play import GREEDY


def check_all(engine: Engine) -> None:
    """Every law that can be seen from outside of a step."""
    check_jobs(engine)
    check_memory(engine)
    check_trees(engine)
    check_checkpoints(engine)
    check_budgets(engine)
    check_stored(engine)


def answer(
    kind: str,
    entries: Sequence[Entry],
    *,
    cells: int = 1024,
    sampling: Sampling = GREEDY,
    max_tokens: int | None = 12,
    stop: tuple[bytes, ...] = (),
    ignore_ends: bool = False,
) -> tuple[list[int], str, bytes | int | None]:
    """The tokens, why they end, and what stopped them: without an engine, one row after the other."""
    backend = fresh(kind)
    sampler, tokens, text = backend.create_sampler(sampling), [], b""
    room = cells - backend.interner.count_cells(backend.interner.intern(entries))
    ids = backend.interner.intern(entries)
    while max_tokens != 0:
        backend.decode(
            [
                DecodeSpan(
                    0, ids, backend.get_position_range(0)[1] + 1 if backend.get_position_range(0) else 0, outputs=1
                )
            ]
        )
        tokens.append(sampler.sample(backend.get_logits(0, len(ids) - 1)))
        text += backend.token_to_piece(tokens[-1])
        if tokens[-1] in backend.eog_tokens and not ignore_ends:
            return tokens, "stop", tokens[-1]
        if found := [one for one in stop if text.endswith(one)]:
            return tokens, "stop", max(found, key=len)
        if len(tokens) == max_tokens or len(tokens) > room:
            return tokens, "length", None
        ids = tokens[-1:]
    return [], "length", None


def fresh(kind: str) -> FakeBackend:
    backend = FakeBackend(kind, sequences=1, cells_per_sequence=10**6, batch_cells=10**6)  # type: ignore[arg-type]
    backend.interner = EntryInterner()
    return backend


def check_memory(engine: Engine) -> None:
    """The record equals memory: each slot holds what a cold computation of its record holds."""
    for slot in engine.prefix_cache.slots:
        held = engine.backend.get_position_range(slot.seq_id)
        assert (held[1] + 1 if held else 0) == slot.position, f"slot {slot.seq_id}: {held}, record {slot.position}"
        if not engine.backend.rounding:
            same = engine.backend.contents(slot.seq_id) == cold(engine, slot.entries)
            assert same, f"slot {slot.seq_id} is not its record"
        assert slot.partial_media_rows or engine.backend.can_resume_at(slot.seq_id, slot.position), (
            f"slot {slot.seq_id} cannot go on"
        )
        assert slot.busy or not slot.partial_media_rows, f"slot {slot.seq_id} is left with half a picture"
        assert slot.cell_count == engine.interner.count_cells(slot.entries)
        assert 0 <= slot.aligned <= len(slot)


def cold(engine: Engine, ids: Entries) -> tuple[object, ...]:
    """What memory holds after these entries were computed in one go, with nothing before and nobody beside."""
    entries = tuple(int(one) if one >= 0 else engine.interner.get_media(int(one)) for one in ids)
    return computed(engine.backend.capabilities.memory_kind, entries)


@lru_cache(maxsize=8192)
def computed(kind: str, entries: tuple[Entry, ...]) -> tuple[object, ...]:
    """The same for plain entries. A backend that has computed all but the last few goes on from there."""
    shorter = next(((kind, entries[:-more]) for more in range(1, 5) if (kind, entries[:-more]) in computing), None)
    backend = computing.pop(shorter) if shorter else fresh(kind)
    done = len(shorter[1]) if shorter else 0
    if len(entries) > done:
        backend.decode(
            [
                DecodeSpan(
                    0,
                    backend.interner.intern(entries[done:]),
                    backend.get_position_range(0)[1] + 1 if done else 0,
                    outputs=1,
                )
            ]
        )
    computing[kind, entries] = backend
    while len(computing) > 64:
        del computing[next(iter(computing))]
    return backend.visible_state(0)


computing: dict[tuple[str, tuple[Entry, ...]], FakeBackend] = {}


def check_jobs(engine: Engine) -> None:
    """Every job is in one place, every busy slot has one job, and memory never runs ahead of what is known."""
    jobs, running, waiting = engine._jobs.values(), engine._running, list(engine._waiting)
    assert Counter(map(id, jobs)) == Counter(map(id, running + waiting))
    assert all(job.sequence is None for job in waiting)
    assert not engine._decoding_jobs
    slots = [job.sequence.seq_id for job in running]
    assert sorted(slots) == [slot.seq_id for slot in engine.prefix_cache.slots if slot.busy]
    for job in engine._jobs.values():
        known = np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)])
        named = job.request.sequence
        assert named is None or job.sequence is None or job.sequence.seq_id == named
        for ids in [job.sequence.entries] if job.sequence else [job.swapped_state.entries] if job.swapped_state else []:
            assert len(ids) < len(known), f"{job.request.id}: nothing is left to compute"
            assert common_prefix_length(ids, known) == len(ids), (
                f"{job.request.id} works on the memory of something else"
            )
        assert not job.sampler.closed


def check_trees(engine: Engine) -> None:
    """What can be found is what there is: each idle sequence and each checkpoint once, under its entries."""
    memory = engine.prefix_cache
    idle = {slot: slot.entries for slot in memory.slots if not slot.busy and len(slot)}
    check_tree(memory._idle_tree, idle)
    check_tree(memory.checkpoints.tree, {checkpoint: checkpoint.entries for checkpoint in memory.all_checkpoints})
    assert len({(one.salt, one.entries.tobytes()) for one in memory.all_checkpoints}) == len(memory.all_checkpoints)
    assert set(memory._idle_slots) == {slot for slot in memory.slots if not slot.busy}


def check_tree(tree: RadixTree, expected: dict) -> None:
    found = {}
    for root in tree._roots.values():
        check_node(root, np.zeros(0, dtype=np.int64), found)
    assert set(found) == set(expected) == set(tree._nodes)
    for anchor, ids in expected.items():
        assert np.array_equal(found[anchor], ids), f"{anchor} is in the tree as something else"


def check_node(node: RadixNode, above: Entries, found: dict) -> int:
    ids = np.concatenate([above, node.edge])
    assert node.depth == len(ids)
    assert node.parent is None or node.anchors or len(node.children) > 1, "a node that leads on only"
    for anchor in node.anchors:
        assert anchor not in found, "an anchor in two places"
        found[anchor] = ids
    below = 0
    for first, child in node.children.items():
        assert child.parent is node
        assert child.edge[0] == first
        below += check_node(child, ids, found)
    assert node.count == below + len(node.anchors)
    return node.count


def check_checkpoints(engine: Engine) -> None:
    """A checkpoint is the state after its entries, and cells that cover it are there."""
    for checkpoint in engine.prefix_cache.all_checkpoints:
        if isinstance(checkpoint.state, Damaged) or engine.backend.rounding:
            continue
        assert checkpoint.state.memory.contents() == cold(engine, checkpoint.entries), "a checkpoint of something else"
        if engine.backend.capabilities.checkpoints_need_cells:
            covered = [
                common_prefix_length(slot.entries, checkpoint.entries) == checkpoint.position
                for slot in engine.prefix_cache.slots
            ]
            stored = (
                engine.prefix_cache.store.find_stored_prefix(checkpoint.entries, checkpoint.salt).length
                == checkpoint.position
            )
            assert any(covered) or stored, "a checkpoint without its cells"


def check_stored(engine: Engine) -> None:
    """What is stored is what was computed, everything before it is stored too, and its bytes are counted."""
    tiers = engine.prefix_cache.store
    stored = list(tiers.ram)
    size = sum(segment.rows.nbytes + segment.entries.nbytes for segment in stored)
    assert size == tiers.ram.block_bytes
    assert (
        size + engine.prefix_cache.checkpoints.nbytes + engine.prefix_cache.swapped_bytes
        == tiers.ram.used_bytes
        <= tiers.ram.limit
    )
    assert engine.prefix_cache.swapped_bytes == sum(
        job.swapped_state.nbytes for job in engine._jobs.values() if job.swapped_state
    )
    assert {segment.key for segment in tiers.tree if not segment.is_on_disk} <= {segment.key for segment in stored}
    for segment in stored:
        assert segment.start == 0 or tiers.tree.get(segment.parent) is not None, "it lost its beginning"
        if not engine.backend.rounding:
            check_cells(engine, segment)


def check_cells(engine: Engine, segment: Block) -> None:
    """The cells of a segment are those of a cold computation."""
    path = [segment]
    while path[0].start:
        before = engine.prefix_cache.store.tree.get(path[0].parent)
        assert before.end == path[0].start, "it lies behind something else"
        path.insert(0, before)
    known = {
        int(engine.interner.to_portable_entries(np.array([-n]))[0]): -n
        for n in range(1, len(engine.interner._media_by_id) + 1)
    }
    ids = np.array([known.get(int(one), int(one)) for part in path for one in part.entries])
    before = engine.interner.count_cells(ids[: segment.start])
    expected = cold(engine, ids)[1][before:]
    assert segment.rows.view(np.int64).tolist() == [list(cell) for cell in expected], "other cells are stored"


class Damaged:
    """A state that does not load."""

    nbytes = 1


def check_budgets(engine: Engine) -> None:
    """Bytes of checkpoints, checkpoints on a path, bytes of parked jobs, cells."""
    settings, memory = engine.settings, engine.prefix_cache
    size = sum(checkpoint.state.nbytes + checkpoint.entries.nbytes for checkpoint in memory.all_checkpoints)
    assert size == memory.checkpoints.nbytes <= settings.checkpoints.max_bytes
    assert sum(job.swapped_state.nbytes for job in engine._waiting if job.swapped_state) <= settings.swap_bytes
    assert engine.backend._used() <= engine.backend.total_cells
    for checkpoint in memory.all_checkpoints:
        same = [one for one in memory.all_checkpoints if one.salt == checkpoint.salt]
        path = [one for one in same if common_prefix_length(one.entries, checkpoint.entries) == one.position]
        assert len(path) <= settings.checkpoints.max_checkpoints, f"checkpoints at {[one.position for one in path]}"
