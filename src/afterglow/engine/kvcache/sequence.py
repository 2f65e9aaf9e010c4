"""Sequence of the backend's KV cache together with the entries in it. The only code that changes the KV cache."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass

from afterglow.engine.kvcache.blocks import BlockHasher
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.entries import Entries, EntryBuffer, EntryInterner
from afterglow.errors import UnsupportedOperation

ADAPTER_SEPARATOR = "\0"  # in a namespace, between the salt and the adapters
MAX_REUSE_LENGTHS = 64  # latest prompts that reused a sequence, which are recorded


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """Full copy of a sequence outside the KV cache."""

    entries: Entries
    state: BackendState
    namespace: str = ""
    grid: int = 0  # of a snapshot: `PrefixCache.grid` of its engine

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.entries.nbytes


class Sequence:
    """One sequence (slot) of the KV cache. Invariant: `entries` are what the KV cache holds, entry for entry."""

    def __init__(self, number: int, backend: Backend, interner: EntryInterner) -> None:
        self.number = number  # of the slot, as clients see it
        self.seq_id = number  # of the backend's sequence; `move_to` changes it
        self.entry_buffer = EntryBuffer()
        self.namespace = ""  # salt and adapters; requests with another namespace never reuse its contents
        self.busy = False
        self.is_transient = False  # no later prompt continues it: it is evicted first and not stored
        self.prompt_length = 0  # if it is busy: the entries after these were decoded one at a time
        self.last_used = time.monotonic()
        self._backend = backend
        self._interner = interner
        self.position = 0  # of the next entry; with media this is not the number of entries
        self.cell_count = 0
        self.loss_count = 0  # number of times that entries were dropped
        self.partial_media_rows = 0  # rows of the next entry, a media entry, that the KV cache already holds
        self.reuse_lengths: deque[int] = deque(maxlen=MAX_REUSE_LENGTHS)  # entries that later prompts reused here
        self._block_keys: list[bytes] = []  # of its full blocks, as far as they were needed
        self._key_distance = 1  # entries per key

    def __len__(self) -> int:
        return self.entry_buffer.length

    @property
    def entries(self) -> Entries:
        return self.entry_buffer.entries

    @property
    def salt(self) -> str:
        """Salt of the tenant, without the adapters."""
        return self.namespace.partition(ADAPTER_SEPARATOR)[0]

    def hash_blocks(self, hasher: BlockHasher, limit: int) -> bool:
        """Hash at most `limit` of its full blocks that were not hashed yet; return whether all are."""
        size, entries, keys = hasher.block_size, self.entries, self._block_keys
        self._key_distance = size
        for start in range(len(keys) * size, len(self) - len(self) % size, size)[:limit]:
            parent = keys[-1] if keys else hasher.get_root_key(self.namespace)
            keys.append(hasher.hash_block(parent, entries[start : start + size]))
        return len(keys) >= len(self) // size

    def get_block_keys(self, hasher: BlockHasher) -> list[bytes]:
        """Return the key before its first block and those of its full blocks."""
        self.hash_blocks(hasher, len(self))
        return [hasher.get_root_key(self.namespace), *self._block_keys]

    def position_at(self, length: int) -> int:
        """Return the position of the entry with index `length`."""
        return self.position if length == len(self) else self._interner.count_positions(self.entries[:length])

    def can_resume_at(self, length: int) -> bool:
        """Return whether the sequence can continue after its first `length` entries."""
        # At its end it always can. The backend may not know the end: the last position of an image may have no cell.
        is_end = length == len(self) and not self.partial_media_rows
        return is_end or self._backend.can_resume_at(self.seq_id, self.position_at(length))

    def append_decoded(self, entries: Entries | list[int]) -> None:
        """Record entries that the backend has decoded. A list contains only tokens: one cell and one position each."""
        self.partial_media_rows = 0
        if isinstance(entries, list):
            for token in entries:
                self.entry_buffer.append(token)
            self.position += len(entries)
            self.cell_count += len(entries)
        else:
            self.entry_buffer.extend(entries)
            self.position += self._interner.count_positions(entries)
            self.cell_count += self._interner.count_cells(entries)

    def drop_partial_media(self) -> None:
        """Drop the rows of an incomplete media entry, if there is one."""
        if self.partial_media_rows:
            self.repair(is_intact=True)

    def repair(self, *, is_intact: bool) -> None:
        """Make the KV cache match `entries` again, or clear it.

        The KV cache may hold more than `entries`; if it is not `is_intact`, its contents are undefined.
        """
        if is_intact and self._backend.can_resume_at(self.seq_id, self.position):
            with contextlib.suppress(UnsupportedOperation):
                self._backend.truncate(self.seq_id, self.position)
                self.partial_media_rows = 0
                return
        self.clear()

    def truncate(self, length: int) -> None:
        """Drop all after the first `length` entries, if `can_resume_at`. `UnsupportedOperation`: nothing changed."""
        if length < len(self):
            self._backend.truncate(self.seq_id, self.position_at(length))
            self._set_length(length)

    def rewind_for_drafter(self) -> None:
        """Drop the last token if the drafter must see it decoded again."""
        if len(self) > 1 and self.entries[-1] >= 0 and self._backend.rewind_for_drafter(self.seq_id, self.position):
            self._set_length(len(self) - 1)

    def clear(self) -> None:
        self._backend.clear(self.seq_id)
        self._set_length(0)

    def copy_from(self, source: Sequence, length: int) -> int:
        """Replace the contents with the first `length` entries of `source`; return the number of bytes moved."""
        self.clear()
        nbytes = self._backend.copy(source.seq_id, self.seq_id, source.position_at(length))
        self.append_decoded(source.entries[:length].copy())
        return nbytes

    def move_to(self, empty: Sequence) -> None:
        """Exchange the backend's sequence with that of an empty one. What both hold and record stays the same."""
        assert not len(empty), "the contents of the target would be lost"
        if len(self):
            self._backend.copy(self.seq_id, empty.seq_id, self.position)
            self._backend.clear(self.seq_id)
        self.seq_id, empty.seq_id = empty.seq_id, self.seq_id

    @property
    def nbytes(self) -> int:
        """Number of bytes that `save` would return."""
        return self._backend.get_state_size(self.seq_id, "full") + self.entries.nbytes

    def save(self) -> SavedSequence:
        state = self._backend.save(self.seq_id, "full", long_lived=True)
        return SavedSequence(self.entries.copy(), state, self.namespace)

    def load(self, entries: Entries, state: BackendState) -> None:
        """Replace the contents with a full state that was saved after these entries."""
        self._set_length(0)
        self._backend.load(self.seq_id, state)
        self.append_decoded(entries)

    def restore(self, length: int, state: BackendState) -> None:
        """Return to the first `length` entries with a partial state. The cells before it are still in the KV cache."""
        self._backend.load(self.seq_id, state)
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        self.loss_count += length < len(self)
        self.partial_media_rows = 0
        if self._block_keys:
            del self._block_keys[length // self._key_distance :]
        if self.reuse_lengths and max(self.reuse_lengths) > length:
            kept = (min(reused, length) for reused in self.reuse_lengths)
            self.reuse_lengths = deque((reused for reused in kept if reused), maxlen=MAX_REUSE_LENGTHS)
        self.entry_buffer.truncate(length)
        self.position = self._interner.count_positions(self.entry_buffer.entries)
        self.cell_count = self._interner.count_cells(self.entry_buffer.entries)
