"""Sequence of the backend's KV cache together with the entries in it. The only code that changes the KV cache."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.entries import Entries, EntryBuffer, EntryInterner
from afterglow.errors import UnsupportedOperation


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """Full copy of a sequence outside the KV cache."""

    entries: Entries
    state: BackendState
    salt: str = ""
    grid: int = 0  # of a snapshot: `PrefixCache.grid` of its engine

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.entries.nbytes


class Sequence:
    """One sequence (slot) of the KV cache. Invariant: `entries` are what the KV cache holds, entry for entry."""

    def __init__(self, seq_id: int, backend: Backend, interner: EntryInterner) -> None:
        self.seq_id = seq_id
        self.entry_buffer = EntryBuffer()
        self.salt = ""  # of the tenant; requests with another salt never reuse its contents
        self.namespace = ""  # salt and adapters that its contents were computed with
        self.mixes_adapters = False  # the adapters changed meanwhile: nothing may reuse its contents
        self.busy = False
        self.prompt_length = 0  # if it is busy: the entries after these were decoded one at a time
        self.last_used = time.monotonic()
        self._backend = backend
        self._interner = interner
        self.position = 0  # of the next entry; with media this is not the number of entries
        self.cell_count = 0
        self.loss_count = 0  # number of times that entries were dropped
        self.partial_media_rows = 0  # rows of the next entry, a media entry, that the KV cache already holds

    def __len__(self) -> int:
        return self.entry_buffer.length

    @property
    def entries(self) -> Entries:
        return self.entry_buffer.entries

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

    @property
    def nbytes(self) -> int:
        """Number of bytes that `save` would return."""
        return self._backend.get_state_size(self.seq_id, "full") + self.entries.nbytes

    def save(self) -> SavedSequence:
        state = self._backend.save(self.seq_id, "full", long_lived=True)
        return SavedSequence(self.entries.copy(), state, self.salt)

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
        self.entry_buffer.truncate(length)
        self.position = self._interner.count_positions(self.entry_buffer.entries)
        self.cell_count = self._interner.count_cells(self.entry_buffer.entries)
