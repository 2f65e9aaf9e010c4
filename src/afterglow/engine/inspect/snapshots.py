"""Sequences kept under a name or in a file, and put back so that the next request uses them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache
from afterglow.engine.kvcache.planner import Fresh
from afterglow.engine.kvcache.sequence import SavedSequence
from afterglow.errors import EngineError, InvalidArgument, InvalidState, KVCacheFull, UnsupportedOperation
from afterglow.llama import state as llama_state
from afterglow.llama.atomic_write import write_atomically

MAGIC = b"afterglow snapshot\x02"
HEADER = struct.Struct("<QQQQ")  # entries, those on the deterministic grid, bytes of the salt and of the state


def save(engine: Engine, sequence: int) -> SavedSequence:
    """A copy of an idle sequence."""
    if not 0 <= sequence < len(engine.prefix_cache.slots):
        raise InvalidArgument("sequence", f"must be from 0 to {len(engine.prefix_cache.slots) - 1}")
    slot = engine.prefix_cache.slots[sequence]
    if slot.busy or not len(slot):
        raise InvalidArgument("sequence", f"{sequence} is {'in use' if slot.busy else 'empty'}")
    return slot.save()


def load(engine: Engine, snapshot: SavedSequence, sequence: int | None = None) -> int:
    """Load a snapshot into a slot, the least valuable where none is named; the next request finds it there."""
    reuse = engine.prefix_cache.plan(snapshot.entries, use_prefix_cache=False, slot=sequence, salt=snapshot.salt)
    if not isinstance(reuse, Fresh):
        raise KVCacheFull(len(snapshot.entries), engine.backend.capabilities.cells_per_sequence)
    slot, _ = engine.prefix_cache.acquire(reuse, snapshot.salt)
    try:
        slot.load(snapshot.entries, snapshot.state, snapshot.aligned)
    except (EngineError, InvalidState):
        slot.clear()
        raise
    finally:
        engine.prefix_cache.release(slot)
    return slot.seq_id


def fork(engine: Engine, sequence: int) -> int:
    """A second sequence that holds what this idle one does."""
    return load(engine, save(engine, sequence))


def find_latest(engine: Engine) -> int:
    """The idle sequence that was used last."""
    idle = [slot for slot in engine.prefix_cache.slots if not slot.busy and len(slot)]
    if not idle:
        raise InvalidArgument("sequence", "there is none in memory yet")
    return max(idle, key=lambda slot: slot.last_used).seq_id


def clear(engine: Engine, sequence: int | None = None) -> None:
    """Forget an idle sequence; or everything, wherever it is kept."""
    if sequence is None:
        return cache.clear(engine)
    for slot in engine.prefix_cache.slots:
        if slot.seq_id == sequence and not slot.busy:
            engine.prefix_cache.discard(slot)


def write_file(snapshot: SavedSequence, path: Path) -> None:
    """Put a snapshot in a file: whole or not at all."""
    assert isinstance(snapshot.state, llama_state.SavedState)
    if len(snapshot.entries) and int(snapshot.entries.min()) < 0:
        raise UnsupportedOperation("a snapshot in a file", "it holds a picture: keep it under its name only")
    body, salt = snapshot.state.to_bytes(), snapshot.salt.encode()
    header = HEADER.pack(len(snapshot.entries), snapshot.aligned, len(salt), len(body))
    write_atomically(path, [MAGIC, header, snapshot.entries.tobytes(), salt, body])


def read_file(path: Path) -> SavedSequence:
    """A snapshot out of a file; `InvalidState` where it is not one, or damaged."""
    data = memoryview(path.read_bytes())
    start = len(MAGIC) + HEADER.size
    if len(data) < start or bytes(data[: len(MAGIC)]) != MAGIC:
        raise InvalidState(f"{path} is not an afterglow snapshot of this version")
    count, aligned, salted, nbytes = HEADER.unpack_from(data, len(MAGIC))
    if len(data) != start + 8 * count + salted + nbytes:
        raise InvalidState(f"{path} is not as long as it says")
    ids = np.frombuffer(data[start : start + 8 * count], dtype=np.int64)
    salt = bytes(data[start + 8 * count : start + 8 * count + salted]).decode("utf-8", "replace")
    state = llama_state.SavedState.from_bytes(data[start + 8 * count + salted :])
    if state.positions is None or state.positions[1] + 1 != count:
        raise InvalidState(f"{path} has {count} entries and another number of positions")
    return SavedSequence(ids, state, aligned, salt)
