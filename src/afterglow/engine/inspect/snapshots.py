"""Snapshots of sequences: save, load, fork, and snapshot files. Later requests use a loaded snapshot as a prefix."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache
from afterglow.engine.kvcache.planner import Fresh
from afterglow.engine.kvcache.sequence import SavedSequence
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.types.entries import TOKEN_MASK
from afterglow.errors import EngineError, InvalidArgument, InvalidState, KVCacheFull, UnsupportedOperation
from afterglow.llama import state as llama_state
from afterglow.llama.atomic_write import write_atomically
from afterglow.llama.checks import check_integer

MAGIC = b"afterglow snapshot\x03"
HEADER = struct.Struct("<QQQQ")  # number of entries, grid, bytes of namespace, bytes of state


def save(engine: Engine, sequence: int | None = None) -> SavedSequence:
    """Return a copy of an idle sequence. None copies the most recently used one."""
    sequence = find_latest(engine) if sequence is None else sequence
    slot = get_idle_slot(engine, sequence)
    if not len(slot):
        raise InvalidArgument("sequence", f"{sequence} is empty")
    return replace(slot.save(), grid=engine.prefix_cache.grid)


def get_idle_slot(engine: Engine, sequence: int) -> Slot:
    """Return an idle sequence by its number. Raises `InvalidArgument` if there is none, or if a request uses it."""
    slots = engine.prefix_cache.slots
    if not 0 <= check_integer("sequence", sequence) < len(slots):
        raise InvalidArgument("sequence", f"must be from 0 to {len(slots) - 1}, not {sequence}")
    if slots[sequence].busy:
        raise InvalidArgument("sequence", f"{sequence} is in use by a request: wait for its end, or cancel it")
    return slots[sequence]


def load(engine: Engine, snapshot: SavedSequence, sequence: int | None = None) -> int:
    """Load a snapshot into an idle sequence and return its number. None chooses the least valuable sequence."""
    if sequence is not None:
        get_idle_slot(engine, sequence)
    grid = engine.prefix_cache.grid
    if grid and snapshot.grid != grid:
        saved_with = f"grid {snapshot.grid}" if snapshot.grid else "deterministic mode off"
        raise InvalidState(f"it was saved with {saved_with}: deterministic mode with grid {grid} cannot reuse it")
    plan = engine.prefix_cache.plan(
        snapshot.entries, use_prefix_cache=False, slot=sequence, namespace=snapshot.namespace
    )
    if not isinstance(plan, Fresh):
        raise KVCacheFull(len(snapshot.entries), engine.backend.capabilities.cells_per_sequence)
    slot, _ = engine.prefix_cache.acquire(plan, snapshot.namespace)
    try:
        engine.prefix_cache.load_evicting(slot, lambda: slot.load(snapshot.entries, snapshot.state))
        slot.prompt_length = len(slot)
    except (EngineError, InvalidState):
        slot.clear()
        raise
    finally:
        engine.prefix_cache.release(slot)
    return slot.number


def fork(engine: Engine, sequence: int | None = None) -> int:
    """Copy an idle sequence and return the number of the copy. None copies the most recently used one."""
    return load(engine, save(engine, sequence))


def find_latest(engine: Engine) -> int:
    """Return the most recently used idle sequence."""
    idle = [slot for slot in engine.prefix_cache.slots if not slot.busy and len(slot)]
    if not idle:
        grid = engine.prefix_cache.grid
        reason = f": deterministic mode keeps full chunks of {grid} entries" if grid else ""
        raise InvalidArgument("sequence", f"must be given: no idle sequence has entries{reason}")
    return max(idle, key=lambda slot: slot.last_used).number


def clear(engine: Engine, sequence: int | None = None) -> None:
    """Clear an idle sequence, or all cached state in all tiers if `sequence` is None."""
    if sequence is None:
        return cache.clear(engine)
    engine.prefix_cache.discard(get_idle_slot(engine, sequence))


def write_file(snapshot: SavedSequence, path: Path) -> None:
    """Write a snapshot to a file, atomically."""
    assert isinstance(snapshot.state, llama_state.SavedState)
    if len(snapshot.entries) and int(snapshot.entries.min()) < 0:
        raise UnsupportedOperation("a snapshot file", "the snapshot contains media: use it by name only")
    if len(snapshot.entries) and int(snapshot.entries.max()) > TOKEN_MASK:
        raise UnsupportedOperation("a snapshot file", "an activated adapter computed the snapshot: use it by name only")
    body, namespace = snapshot.state.to_bytes(), snapshot.namespace.encode()
    header = HEADER.pack(len(snapshot.entries), snapshot.grid, len(namespace), len(body))
    write_atomically(path, [MAGIC, header, snapshot.entries.tobytes(), namespace, body])


def read_file(path: Path) -> SavedSequence:
    """Read a snapshot from a file. Raises `InvalidState` if the file is not a snapshot or is damaged."""
    data = memoryview(path.read_bytes())
    start = len(MAGIC) + HEADER.size
    if len(data) < start or bytes(data[: len(MAGIC)]) != MAGIC:
        raise InvalidState(f"{path} is not an afterglow snapshot of this version")
    count, grid, namespace_bytes, state_bytes = HEADER.unpack_from(data, len(MAGIC))
    if len(data) != start + 8 * count + namespace_bytes + state_bytes:
        raise InvalidState(f"the size of {path} does not match its header")
    namespace_start = start + 8 * count
    entries = np.frombuffer(data[start:namespace_start], dtype=np.int64)
    namespace = bytes(data[namespace_start : namespace_start + namespace_bytes]).decode("utf-8", "replace")
    state = llama_state.SavedState.from_bytes(data[namespace_start + namespace_bytes :])
    if state.positions is None or state.positions[1] + 1 != count:
        raise InvalidState(f"{path} has {count} entries and another number of positions")
    return SavedSequence(entries, state, namespace, grid)
