"""Invariants of an engine on the fake backend. They hold between any two steps.

The checks trust neither the recorded entries nor the engine: the KV cache is compared with one that computed the same
entries from scratch, and tokens with those of a backend without an engine.
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
from afterglow.engine.types.entries import Entries, Entry, EntryInterner, common_prefix_length, round_down_to_grid
from afterglow.engine.types.request import Request
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support.play import GREEDY, Answer, collect

MAX_CACHED_BACKENDS = 64
MAX_CACHED_ROWS = 8192  # of blocks
MAX_EXTENDED_ENTRIES = 4  # a cached backend is extended by at most this many entries


def check_all(engine: Engine) -> None:
    """Check every invariant that is visible between two steps."""
    check_jobs(engine)
    check_sequences(engine)
    check_trees(engine)
    check_checkpoints(engine)
    check_budgets(engine)
    check_stored(engine)
    check_last_logits(engine)


def run_checked(engine: Engine, *requests: Request, limit: int = 2000) -> dict[str, Answer]:
    """Run requests and check all invariants after every step."""
    answers: dict[str, Answer] = {}
    for submitted in requests:
        engine.submit(submitted)
    finish_checked(engine, answers, limit)
    return answers


def finish_checked(engine: Engine, answers: dict[str, Answer], limit: int = 2000) -> None:
    """Step until the engine is idle and check all invariants after every step."""
    for _ in range(limit):
        if not engine.is_busy:
            break
        collect(answers, engine)
        check_all(engine)
    assert not engine.is_busy, "the requests do not end"


def compute_tokens(kind: str, request: Request, **options: object) -> list[int]:
    """Return the tokens of a request, computed without an engine."""
    tokens, _, _ = compute_completion(
        kind,
        request.entries,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        **options,
    )
    return tokens


def compute_completion(
    kind: str,
    entries: Sequence[Entry],
    *,
    cells_per_sequence: int = 1024,
    sampling: Sampling = GREEDY,
    max_tokens: int | None = 12,
    stop: tuple[bytes, ...] = (),
    ignore_eos: bool = False,
) -> tuple[list[int], str, bytes | int | None]:
    """Return the tokens, the finish reason and the stop reason, computed without an engine, token by token."""
    backend = make_backend(kind)
    sampler, tokens, text = backend.create_sampler(sampling), [], b""
    free_cells = cells_per_sequence - backend.interner.count_cells(backend.interner.intern(entries))
    pending = backend.interner.intern(entries)
    while max_tokens != 0:
        positions = backend.get_position_range(0)
        backend.decode([DecodeSpan(0, pending, positions[1] + 1 if positions else 0, outputs=1)])
        tokens.append(sampler.sample(backend.get_logits(0, len(pending) - 1)))
        text += backend.token_to_piece(tokens[-1])
        if tokens[-1] in backend.eog_tokens and not ignore_eos:
            return tokens, "stop", tokens[-1]
        if matches := [stop_text for stop_text in stop if text.endswith(stop_text)]:
            return tokens, "stop", max(matches, key=len)
        if len(tokens) == max_tokens or len(tokens) > free_cells:
            return tokens, "length", None
        pending = tokens[-1:]
    return [], "length", None


def make_backend(kind: str) -> FakeBackend:
    backend = FakeBackend(kind, sequences=1, cells_per_sequence=10**6, batch_cells=10**6)  # type: ignore[arg-type]
    backend.interner = EntryInterner()
    return backend


def check_sequences(engine: Engine) -> None:
    """Check that the KV cache of each slot equals a cold computation of its recorded entries."""
    for slot in engine.prefix_cache.slots:
        positions = engine.backend.get_position_range(slot.seq_id)
        end = positions[1] + 1 if positions else 0
        assert end == slot.position, f"slot {slot.seq_id}: KV cache {positions}, recorded end {slot.position}"
        if not engine.backend.simulate_rounding:
            is_equal = engine.backend.visible_state(slot.seq_id) == compute_state(engine, slot.entries)
            assert is_equal, f"slot {slot.seq_id}: the KV cache differs from the recorded entries"
        assert slot.partial_media_rows or engine.backend.can_resume_at(slot.seq_id, slot.position), (
            f"slot {slot.seq_id} cannot be continued"
        )
        assert slot.busy or not slot.partial_media_rows, f"idle slot {slot.seq_id} holds part of a media entry"
        assert slot.cell_count == engine.interner.count_cells(slot.entries)
        assert slot.busy or is_on_grid(engine, slot.entries), f"idle slot {slot.seq_id} does not end on the grid"


def is_on_grid(engine: Engine, entries: Entries) -> bool:
    """Return whether entries end with a full chunk, as everything that deterministic mode reuses."""
    return round_down_to_grid(len(entries), entries, engine.prefix_cache.grid) == len(entries)


def compute_state(engine: Engine, entries: Entries) -> tuple[object, ...]:
    """Return the KV cache after these entries were computed in one decode, with nothing before and nothing beside."""
    numbers = entries.tolist()
    if numbers and min(numbers) < 0:
        numbers = [number if number >= 0 else engine.interner.get_media(number) for number in numbers]
    return compute_portable_state(engine.backend.capabilities.memory_kind, tuple(numbers))


@lru_cache(maxsize=8192)
def compute_portable_state(kind: str, entries: tuple[Entry, ...]) -> tuple[object, ...]:
    """Return the same for portable entries. Extend a cached backend that has computed all but the last few entries."""
    shorter = ((kind, entries[:-count]) for count in range(1, MAX_EXTENDED_ENTRIES + 1))
    cached = next((key for key in shorter if key in cached_backends), None)
    backend = cached_backends.pop(cached) if cached else make_backend(kind)
    computed = len(cached[1]) if cached else 0
    if len(entries) > computed:
        position = backend.get_position_range(0)[1] + 1 if computed else 0
        backend.decode([DecodeSpan(0, backend.interner.intern(entries[computed:]), position, outputs=1)])
    cached_backends[kind, entries] = backend
    while len(cached_backends) > MAX_CACHED_BACKENDS:
        del cached_backends[next(iter(cached_backends))]
    return backend.visible_state(0)


cached_backends: dict[tuple[str, tuple[Entry, ...]], FakeBackend] = {}


def check_jobs(engine: Engine) -> None:
    """Check that each job is in one place, each busy slot has one job, and a slot holds only known entries."""
    running, waiting = engine._running, list(engine._waiting)
    assert Counter(map(id, engine._jobs.values())) == Counter(id(state.job) for state in running + waiting)
    assert not engine._decoding_jobs
    slots = [state.sequence.number for state in running]
    assert sorted(slots) == [slot.number for slot in engine.prefix_cache.slots if slot.busy]
    assert sorted(slot.seq_id for slot in engine.prefix_cache.slots) == list(range(len(engine.prefix_cache.slots)))
    assert all(state.job.request.sequence in (None, state.sequence.number) for state in running)
    holders = [(state.job, state.sequence) for state in running]
    holders += [(state.job, state.swapped_state) for state in waiting if state.swapped_state is not None]
    for job, holder in holders:
        known = job.known_entries
        assert len(holder.entries) < len(known), f"{job.request.id}: no entry is left to compute"
        assert common_prefix_length(holder.entries, known) == len(holder.entries), (
            f"{job.request.id}: its sequence holds other entries"
        )
    assert not any(job.sampler.closed for job in engine._jobs.values())


def check_trees(engine: Engine) -> None:
    """Check that the trees hold each idle sequence and each checkpoint exactly once, under its entries."""
    cache = engine.prefix_cache
    idle = {slot: slot.entries for slot in cache.slots if not slot.busy and len(slot)}
    check_tree(cache._idle_tree, idle)
    check_tree(cache.checkpoints.tree, {checkpoint: checkpoint.entries for checkpoint in cache.all_checkpoints})
    distinct = {(checkpoint.namespace, checkpoint.entries.tobytes()) for checkpoint in cache.all_checkpoints}
    assert len(distinct) == len(cache.all_checkpoints)
    assert set(cache._idle_slots) == {slot for slot in cache.slots if not slot.busy}


def check_tree(tree: RadixTree, expected: dict) -> None:
    anchors = {}
    for root in tree._roots.values():
        check_node(root, np.zeros(0, dtype=np.int64), anchors)
    assert set(anchors) == set(expected) == set(tree._nodes)
    for anchor, entries in expected.items():
        assert np.array_equal(anchors[anchor], entries), f"{anchor} is in the tree under other entries"


def check_node(node: RadixNode, prefix: Entries, anchors: dict) -> int:
    """Check a subtree, add its anchors to `anchors` and return their number."""
    entries = np.concatenate([prefix, node.edge])
    assert node.depth == len(entries)
    assert node.parent is None or node.anchors or len(node.children) > 1, "a node without anchor has a single child"
    for anchor in node.anchors:
        assert anchor not in anchors, "an anchor is in the tree twice"
        anchors[anchor] = entries
    below = 0
    for first, child in node.children.items():
        assert child.parent is node
        assert child.edge[0] == first
        below += check_node(child, entries, anchors)
    assert node.count == below + len(node.anchors)
    return node.count


def check_checkpoints(engine: Engine) -> None:
    """Check that each checkpoint is the state after its entries, and that the cells before it exist."""
    cache = engine.prefix_cache
    for checkpoint in cache.all_checkpoints:
        if isinstance(checkpoint.state, Damaged) or engine.backend.simulate_rounding:
            continue
        is_equal = checkpoint.state.kv_cache.visible_state() == compute_state(engine, checkpoint.entries)
        assert is_equal, "a checkpoint differs from the state after its entries"
        if engine.backend.capabilities.checkpoints_need_cells:
            on_device = [
                common_prefix_length(slot.entries, checkpoint.entries) == checkpoint.position for slot in cache.slots
            ]
            stored = cache.store.find_stored_prefix(checkpoint.entries, checkpoint.namespace)
            assert any(on_device) or stored.length == checkpoint.position, "a checkpoint without its cells"


def check_stored(engine: Engine) -> None:
    """Check that stored blocks equal computed cells, have all blocks before them, and are counted in bytes."""
    store = engine.prefix_cache.store
    blocks, budget = list(store.ram), store.ram.budget
    block_bytes = sum(block.rows.nbytes for block in blocks)
    stored = [*store.tree, *store.checkpoints.all_checkpoints, *store.ram.logits]
    stored += [] if store.disk_tier is None else store.disk_tier.list_checkpoints()
    stored += [] if store.disk_tier is None else store.disk_tier.list_logits()
    assert budget.get("tables") == sum(data.table_bytes for data in stored)
    assert block_bytes == budget.get("blocks")
    assert sum(budget.by_kind.values()) == budget.used_bytes <= budget.limit
    assert budget.get("swapped") == sum(job.swapped_state.nbytes for job in engine._waiting if job.swapped_state)
    assert {block.key for block in store.tree if not block.is_on_disk} <= {block.key for block in blocks}
    for block in blocks:
        assert block.start == 0 or store.tree.get(block.parent) is not None, "a block lost its predecessor"
        if not engine.backend.simulate_rounding:
            check_block(engine, block)


def check_last_logits(engine: Engine) -> None:
    """Check that the logits of each prompt are those after its entries, are found once, and within their bytes."""
    store = engine.prefix_cache.store.ram.logits
    check_tree(store._tree, {last_logits: last_logits.entries for last_logits in store})
    assert len({(last_logits.namespace, last_logits.entries.tobytes()) for last_logits in store}) == len(store)
    nbytes = sum(last_logits.nbytes for last_logits in store)
    assert nbytes == engine.prefix_cache.store.ram.budget.get("logits") <= store.limit
    if not (engine.backend.simulate_rounding or engine.backend.adapters):
        for last_logits in store:
            assert last_logits.logits.tobytes() == compute_logits(engine, last_logits.entries), "other logits"


def compute_logits(engine: Engine, entries: Entries) -> bytes:
    """Return the logits after these entries after a cold computation."""
    kind = engine.backend.capabilities.memory_kind
    key = kind, engine.backend.vocabulary_size, engine.interner.to_portable_entries(entries).tobytes()
    if key not in expected_logits:
        if len(expected_logits) == MAX_CACHED_ROWS:
            expected_logits.clear()
        backend = FakeBackend(
            kind,
            sequences=1,
            cells_per_sequence=1 << 20,
            batch_cells=1 << 20,
            vocabulary_size=engine.backend.vocabulary_size,
            projector=engine.backend.projector,
        )
        backend.interner = engine.interner
        backend.projector = None  # media count by their digest
        backend.decode([DecodeSpan(0, entries, 0, 1)])
        expected_logits[key] = backend.get_logits(0, len(entries) - 1).tobytes()
    return expected_logits[key]


expected_logits: dict[tuple[str, int, bytes], bytes] = {}  # by memory kind, vocabulary and portable entries


def check_block(engine: Engine, block: Block) -> None:
    """Check that the cells of a block equal those of a cold computation."""
    path = [block]
    while path[0].start:
        previous = engine.prefix_cache.store.tree.get(path[0].parent)
        assert previous.end == path[0].start, "a block does not follow its parent"
        path.insert(0, previous)
    key = engine.backend.capabilities.memory_kind, block.start, b"".join([part.entries.tobytes() for part in path])
    if key not in expected_rows:
        if len(expected_rows) == MAX_CACHED_ROWS:
            expected_rows.clear()
        expected_rows[key] = compute_rows(engine, path)
    assert block.rows.tobytes() == expected_rows[key], "a block holds other cells"


expected_rows: dict[tuple[str, int, bytes], bytes] = {}  # by memory kind, start and portable entries


def compute_rows(engine: Engine, path: list[Block]) -> bytes:
    """Return the cells of the last block of a path after a cold computation."""
    media_ids = {
        int(engine.interner.to_portable_entries(np.array([-number]))[0]): -number
        for number in range(1, len(engine.interner._media_by_id) + 1)
    }
    entries = np.array([media_ids.get(int(entry), int(entry)) for part in path for entry in part.entries])
    cells_before = engine.interner.count_cells(entries[: path[-1].start])
    return np.array(compute_state(engine, entries)[1][cells_before:], dtype=np.int64).tobytes()


class Damaged:
    """A state that does not load."""

    def __init__(self, nbytes: int = 1) -> None:
        self.nbytes = nbytes


def check_budgets(engine: Engine) -> None:
    """Check the bytes of checkpoints, checkpoints per path, swapped bytes and used cells against their limits."""
    settings, cache = engine.settings, engine.prefix_cache
    checkpoint_bytes = sum(checkpoint.state.nbytes + checkpoint.entries.nbytes for checkpoint in cache.all_checkpoints)
    assert checkpoint_bytes == cache.checkpoints.nbytes <= settings.checkpoints.max_bytes
    assert sum(job.swapped_state.nbytes for job in engine._waiting if job.swapped_state) <= settings.swap_bytes
    assert engine.backend._count_used_cells() <= engine.backend.total_cells
    for checkpoint in cache.all_checkpoints:
        positions = [
            ancestor.position
            for ancestor in cache.all_checkpoints
            if ancestor.namespace == checkpoint.namespace
            and common_prefix_length(ancestor.entries, checkpoint.entries) == ancestor.position
        ]
        assert len(positions) <= settings.checkpoints.max_checkpoints, f"checkpoints at {positions}"
