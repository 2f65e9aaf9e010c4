"""What must be true of an engine on the fake between any two steps, whatever happened before.

Nothing here believes a record or an engine: memory is compared with one that computed the same entries from scratch,
and an answer with what a backend says that nobody manages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from play import GREEDY

from afterglow.engine.backend import Span
from afterglow.engine.engine import Engine
from afterglow.engine.entries import Entry, Ids, Ledger, common_prefix
from afterglow.engine.prefix import Node, PrefixTree
from afterglow.engine.segments import Segment
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend


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
    sampler, tokens, text = backend.sampler(sampling), [], b""
    room = cells - backend.ledger.cells(backend.ledger.ids(entries))
    ids = backend.ledger.ids(entries)
    while max_tokens != 0:
        backend.decode([Span(0, ids, backend.held(0)[1] + 1 if backend.held(0) else 0, outputs=1)])
        tokens.append(sampler.sample(backend.logits(0, len(ids) - 1)))
        text += backend.piece(tokens[-1])
        if tokens[-1] in backend.ends and not ignore_ends:
            return tokens, "stop", tokens[-1]
        if found := [one for one in stop if text.endswith(one)]:
            return tokens, "stop", max(found, key=len)
        if len(tokens) == max_tokens or len(tokens) > room:
            return tokens, "length", None
        ids = tokens[-1:]
    return [], "length", None


def fresh(kind: str) -> FakeBackend:
    backend = FakeBackend(kind, sequences=1, cells=10**6, batch_cells=10**6)  # type: ignore[arg-type]
    backend.ledger = Ledger()
    return backend


def check_memory(engine: Engine) -> None:
    """The record equals memory: each slot holds what a cold computation of its record holds."""
    for slot in engine.memory.slots:
        held = engine.backend.held(slot.number)
        assert (held[1] + 1 if held else 0) == slot.position, f"slot {slot.number}: {held}, record {slot.position}"
        if not engine.backend.rounding:
            same = engine.backend.contents(slot.number) == cold(engine, slot.ids)
            assert same, f"slot {slot.number} is not its record"
        assert slot.ahead or engine.backend.resumable(slot.number, slot.position), f"slot {slot.number} cannot go on"
        assert slot.busy or not slot.ahead, f"slot {slot.number} is left with half a picture"
        assert slot.cells == engine.ledger.cells(slot.ids)
        assert 0 <= slot.aligned <= len(slot)


def cold(engine: Engine, ids: Ids) -> tuple[object, ...]:
    """What memory holds after these entries were computed in one go, with nothing before and nobody beside."""
    entries = tuple(int(one) if one >= 0 else engine.ledger.media(int(one)) for one in ids)
    return computed(engine.backend.capabilities.memory, entries)


@lru_cache(maxsize=8192)
def computed(kind: str, entries: tuple[Entry, ...]) -> tuple[object, ...]:
    """The same for plain entries. A backend that has computed all but the last few goes on from there."""
    shorter = next(((kind, entries[:-more]) for more in range(1, 5) if (kind, entries[:-more]) in computing), None)
    backend = computing.pop(shorter) if shorter else fresh(kind)
    done = len(shorter[1]) if shorter else 0
    if len(entries) > done:
        backend.decode([Span(0, backend.ledger.ids(entries[done:]), backend.held(0)[1] + 1 if done else 0, outputs=1)])
    computing[kind, entries] = backend
    while len(computing) > 64:
        del computing[next(iter(computing))]
    return backend.contents(0)


computing: dict[tuple[str, tuple[Entry, ...]], FakeBackend] = {}


def check_jobs(engine: Engine) -> None:
    """Every job is in one place, every busy slot has one job, and memory never runs ahead of what is known."""
    jobs, running, waiting = engine._jobs.values(), engine._running, list(engine._waiting)
    assert Counter(map(id, jobs)) == Counter(map(id, running + waiting))
    assert all(job.sequence is None for job in waiting)
    assert not engine._decoding
    slots = [job.sequence.number for job in running]
    assert sorted(slots) == [slot.number for slot in engine.memory.slots if slot.busy]
    for job in engine._jobs.values():
        known = np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)])
        named = job.request.sequence
        assert named is None or job.sequence is None or job.sequence.number == named
        for ids in [job.sequence.ids] if job.sequence else [job.parked.ids] if job.parked else []:
            assert len(ids) < len(known), f"{job.request.id}: nothing is left to compute"
            assert common_prefix(ids, known) == len(ids), f"{job.request.id} works on the memory of something else"
        assert not job.sampler.closed


def check_trees(engine: Engine) -> None:
    """What can be found is what there is: each idle sequence and each checkpoint once, under its entries."""
    memory = engine.memory
    idle = {slot: slot.ids for slot in memory.slots if not slot.busy and len(slot)}
    check_tree(memory._idle, idle)
    check_tree(memory.marks.tree, {checkpoint: checkpoint.ids for checkpoint in memory.checkpoints})
    assert len({(one.salt, one.ids.tobytes()) for one in memory.checkpoints}) == len(memory.checkpoints)
    assert set(memory._unused) == {slot for slot in memory.slots if not slot.busy}


def check_tree(tree: PrefixTree, expected: dict) -> None:
    found = {}
    for root in tree._roots.values():
        check_node(root, np.zeros(0, dtype=np.int64), found)
    assert set(found) == set(expected) == set(tree._nodes)
    for anchor, ids in expected.items():
        assert np.array_equal(found[anchor], ids), f"{anchor} is in the tree as something else"


def check_node(node: Node, above: Ids, found: dict) -> int:
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
    for checkpoint in engine.memory.checkpoints:
        if isinstance(checkpoint.state, Damaged) or engine.backend.rounding:
            continue
        assert checkpoint.state.memory.contents() == cold(engine, checkpoint.ids), "a checkpoint of something else"
        if engine.backend.capabilities.checkpoints_need_cells:
            covered = [common_prefix(slot.ids, checkpoint.ids) == checkpoint.depth for slot in engine.memory.slots]
            stored = engine.memory.tiers.cover(checkpoint.ids, checkpoint.salt).length == checkpoint.depth
            assert any(covered) or stored, "a checkpoint without its cells"


def check_stored(engine: Engine) -> None:
    """What is stored is what was computed, everything before it is stored too, and its bytes are counted."""
    tiers = engine.memory.tiers
    stored = list(tiers.ram)
    size = sum(segment.rows.nbytes + segment.ids.nbytes for segment in stored)
    assert size == tiers.ram.segment_bytes
    assert size + engine.memory.marks.nbytes + engine.memory.parked_bytes == tiers.ram.used <= tiers.ram.limit
    assert engine.memory.parked_bytes == sum(job.parked.nbytes for job in engine._jobs.values() if job.parked)
    assert {segment.key for segment in tiers.tree if not segment.on_disk} <= {segment.key for segment in stored}
    for segment in stored:
        assert segment.start == 0 or tiers.tree.get(segment.parent) is not None, "it lost its beginning"
        if not engine.backend.rounding:
            check_cells(engine, segment)


def check_cells(engine: Engine, segment: Segment) -> None:
    """The cells of a segment are those of a cold computation."""
    path = [segment]
    while path[0].start:
        before = engine.memory.tiers.tree.get(path[0].parent)
        assert before.end == path[0].start, "it lies behind something else"
        path.insert(0, before)
    known = {int(engine.ledger.stable(np.array([-n]))[0]): -n for n in range(1, len(engine.ledger._media) + 1)}
    ids = np.array([known.get(int(one), int(one)) for part in path for one in part.ids])
    before = engine.ledger.cells(ids[: segment.start])
    expected = cold(engine, ids)[1][before:]
    assert segment.rows.view(np.int64).tolist() == [list(cell) for cell in expected], "other cells are stored"


class Damaged:
    """A state that does not load."""

    nbytes = 1


def check_budgets(engine: Engine) -> None:
    """Bytes of checkpoints, checkpoints on a path, bytes of parked jobs, cells."""
    settings, memory = engine.settings, engine.memory
    size = sum(checkpoint.state.nbytes + checkpoint.ids.nbytes for checkpoint in memory.checkpoints)
    assert size == memory.marks.nbytes <= settings.checkpoints.max_bytes
    assert sum(job.parked.nbytes for job in engine._waiting if job.parked) <= settings.parked_bytes
    assert engine.backend._used() <= engine.backend.total_cells
    for checkpoint in memory.checkpoints:
        same = [one for one in memory.checkpoints if one.salt == checkpoint.salt]
        path = [one for one in same if common_prefix(one.ids, checkpoint.ids) == one.depth]
        assert len(path) <= settings.checkpoints.max_checkpoints, f"checkpoints at {[one.depth for one in path]}"
