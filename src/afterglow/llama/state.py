"""Saves and loads the state of sequences: as raw bytes within the process, in a checksummed envelope outside it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.errors import InvalidState, KVCacheFull, UnsupportedOperation
from afterglow.llama import page_buffers
from afterglow.llama.atomic_write import write_atomically
from afterglow.llama.checks import check_integer
from afterglow.llama.kv_memory import KVMemory
from afterglow.llama.library.loader import get_library
from afterglow.llama.library.memory_registration import register_memory
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import YARN_FACTORS, ContextSettings

StateScope = Literal["full", "partial"]
PARTIAL_ONLY = 1  # flag of llama.cpp's state functions
MAGIC = b"afterglow state\x01"
NO_ADAPTERS_KEY = "[]"
ENVELOPE = struct.Struct(f"<{len(MAGIC)}s32s32s?iiQ")  # magic, checksum, key, partial, first and last position, size


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The saved state of one sequence. A partial state has only what cannot be split: recurrent states, windows."""

    key: bytes  # hash of everything that determines whether another context can load these bytes
    scope: StateScope
    positions: tuple[int, int] | None
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def to_bytes(self) -> bytes:
        """Serialize the state to an envelope that `from_bytes` can verify."""
        first, last = self.positions or (-1, -1)
        header = ENVELOPE.pack(MAGIC, b"", self.key, self.scope == "partial", first, last, self.nbytes)
        body = header[len(MAGIC) + 32 :] + self.data.tobytes()
        return MAGIC + blake3(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SavedState:
        """Deserialize a state; raise `InvalidState` if `data` is truncated, damaged or not a state."""
        view = memoryview(data)
        if len(view) < ENVELOPE.size or bytes(view[: len(MAGIC)]) != MAGIC:
            raise InvalidState("it is not an afterglow state of this version")
        _, checksum, key, partial, first, last, size = ENVELOPE.unpack_from(view)
        if len(view) != ENVELOPE.size + size:
            raise InvalidState(f"it has {len(view) - ENVELOPE.size} bytes instead of {size}")
        if blake3(view[len(MAGIC) + 32 :]).digest() != checksum:
            raise InvalidState("its checksum is wrong")
        positions = None if last < 0 else (first, last)
        scope: StateScope = "partial" if partial else "full"
        return cls(key=key, scope=scope, positions=positions, data=np.frombuffer(view[ENVELOPE.size :], dtype=np.uint8))


class StateOwner(Protocol):
    """The part of a context that `StateSerializer` uses."""

    model: LlamaModel
    settings: ContextSettings
    memory: KVMemory
    sequences: int
    cells_per_sequence: int
    is_mtp: bool
    adapter_key: str  # the applied adapters and their scales

    def apply_copies(self, sequence: int) -> None: ...

    @property
    def pointer(self) -> Any: ...


class StateSerializer:
    """Saves and loads sequences of one context.

    >>> state = context.state.save(0)
    >>> context.state.load(1, state)
    """

    def __init__(self, context: StateOwner, *, ignore_adapters: bool = False) -> None:
        """With `ignore_adapters`, the caller makes sure that states are loaded with the adapters of their save."""
        self._context = context
        self._ignore_adapters = ignore_adapters
        self._library = get_library()

    @property
    def key(self) -> bytes:
        """Hash of everything that a state depends on: states can be loaded by contexts with the same key."""
        settings = self._context.settings
        parts = (
            self._library.build,
            self._context.model.fingerprint,
            settings.cache_type_k,
            settings.cache_type_v,
            settings.flash_attention,
            1 if settings.kv_unified else settings.sequences,
            settings.swa_full,
            settings.recurrent_snapshots,
            settings.rope_scaling,
            settings.rope_freq_base,
            settings.rope_freq_scale,
            settings.yarn_orig_ctx,
            *(getattr(settings, name) for name in YARN_FACTORS),
            self._context.is_mtp,
            NO_ADAPTERS_KEY if self._ignore_adapters else self._context.adapter_key,
        )
        return blake3(repr(parts).encode()).digest()

    def size(self, sequence: int, scope: StateScope = "full") -> int:
        """Return the number of bytes that `save` would produce."""
        self._context.memory.check_sequence(sequence)
        self._check_scope(scope)
        symbols = self._library.symbols
        return int(symbols.llama_state_seq_get_size_ext(self._context.pointer, sequence, self._get_flags(scope)))

    def save(self, sequence: int, scope: StateScope = "full", *, long_lived: bool = False) -> SavedState:
        """Copy the state of a sequence. Set `long_lived` for a copy that is stored; a short-lived copy is faster."""
        memory = self._context.memory
        self._context.apply_copies(sequence)
        size = self.size(sequence, scope)
        if memory.pending_shift:
            raise UnsupportedOperation("a save", "positions were shifted; decode first to apply the shift")
        symbols, pointer, flags = self._library.symbols, self._context.pointer, self._get_flags(scope)
        data = page_buffers.allocate_zeros(size) if long_lived else page_buffers.allocate_touched(size)
        target = self._library.ffi.from_buffer("uint8_t[]", data)
        written = symbols.llama_state_seq_get_data_ext(pointer, target, data.nbytes, sequence, flags)
        assert written == data.nbytes, f"llama.cpp wrote {written} of {data.nbytes} bytes"
        return SavedState(key=self.key, scope=scope, positions=memory.get_position_range(sequence), data=data)

    def load(self, sequence: int, state: SavedState) -> None:
        """Restore a sequence from a saved state.

        A partial state restores only its part: the attention cells before its end must be present and unchanged. Those
        after its end are removed.
        """
        memory = self._context.memory
        memory.check_sequence(sequence)
        self._check_scope(state.scope)
        if state.key != self.key:
            raise InvalidState("it was saved by another model, build, adapter or kind of context")
        if state.positions is None:
            memory.remove(sequence)
            return
        self._context.apply_copies(sequence)
        last = state.positions[1]
        if last >= self._context.cells_per_sequence:
            raise KVCacheFull(last + 1, self._context.cells_per_sequence)
        source = self._library.ffi.from_buffer("uint8_t[]", state.data)
        with register_memory(state.data):
            read = self._library.symbols.llama_state_seq_set_data_ext(
                self._context.pointer, source, state.nbytes, sequence, self._get_flags(state.scope)
            )
        if read != state.nbytes:  # the key matches, so cells are missing: other sequences use them
            memory.remove(sequence)
            raise KVCacheFull(last + 1, self._context.cells_per_sequence)
        memory.record_state_load(sequence, last)

    def copy(self, source: int, target: int, scope: StateScope = "full") -> int:
        """Copy `source` to `target` immediately, with streams or unified; return the number of bytes copied."""
        state = self.save(source, scope)
        self.load(target, state)
        return state.nbytes

    def save_file(self, path: Path, sequence: int | None = None) -> None:
        """Write one sequence, or all, to a file atomically."""
        sequences = range(self._context.sequences) if sequence is None else [sequence]
        blobs = [(number, self.save(number).to_bytes()) for number in sequences]
        chunks = [chunk for number, blob in blobs for chunk in (struct.pack("<iQ", number, len(blob)), blob)]
        write_atomically(Path(path), chunks)

    def load_file(self, path: Path, sequence: int | None = None) -> list[int]:
        """Load a file of `save_file` and return the loaded sequences. With `sequence`, load its only state into that.

        All states are checked before the first is loaded.
        """
        states = _read_states(path)
        if sequence is not None:
            if len(states) != 1:
                raise InvalidState(f"the file has {len(states)} sequences, not one")
            states = {check_integer("sequence", sequence): next(iter(states.values()))}
        for number, state in states.items():
            self._context.memory.check_sequence(number)
            if state.key != self.key:
                raise InvalidState("it was saved by another model, build, adapter or kind of context")
        for number, state in states.items():
            self.load(number, state)
        return list(states)

    def _get_flags(self, scope: StateScope) -> int:
        """Return llama.cpp's flags. The partial state of a recurrent memory, known or not, is its whole state."""
        return PARTIAL_ONLY if scope == "partial" and self._context.memory.kind != "recurrent" else 0

    def _check_scope(self, scope: StateScope) -> None:
        kind = self._context.memory.kind
        if kind == "none":
            raise UnsupportedOperation("a state", "this model has no memory")
        # Some builds write everything here and some nothing: full attention has no smaller part.
        if scope == "partial" and kind == "attention":
            raise UnsupportedOperation("a partial state", "full attention has no recurrent state and no window")


def _read_states(path: Path) -> dict[int, SavedState]:
    data, states, start = memoryview(Path(path).read_bytes()), {}, 0
    header = struct.Struct("<iQ")
    while start < len(data):
        if len(data) - start < header.size:
            raise InvalidState("the file ends inside a header")
        sequence, size = header.unpack_from(data, start)
        start += header.size
        states[sequence] = SavedState.from_bytes(data[start : start + size])
        start += size
    return states
