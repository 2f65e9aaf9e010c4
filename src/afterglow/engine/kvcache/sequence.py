"""A slot of memory and the record of what is in it. The only object that changes memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.entries import Entries, EntryBuffer, EntryInterner


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """A whole sequence, taken out of memory."""

    entries: Entries
    state: BackendState
    aligned: int
    salt: str = ""

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.entries.nbytes


class Sequence:
    """Invariant: `record` is exactly what memory holds, entry for entry."""

    def __init__(self, seq_id: int, backend: Backend, interner: EntryInterner) -> None:
        self.seq_id = seq_id
        self.entry_buffer = EntryBuffer()
        self.aligned = 0  # leading entries computed in whole chunks of the deterministic grid
        self.salt = ""  # whose it is: others never see what it holds
        self.busy = False
        self.last_used = time.monotonic()
        self._backend = backend
        self._interner = interner
        self.position = 0  # of the next entry; with media not the number of entries
        self.cell_count = 0  # that its entries fill
        self.loss_count = 0  # how often it held more than afterwards
        self.partial_media_rows = (
            0  # rows of the next entry, a picture, that memory holds already and the record does not
        )

    def __len__(self) -> int:
        return self.entry_buffer.length

    @property
    def entries(self) -> Entries:
        return self.entry_buffer.entries

    def position_at(self, length: int) -> int:
        """The position of the entry with index `length`."""
        return self.position if length == len(self) else self._interner.count_positions(self.entries[:length])

    def can_resume_at(self, length: int) -> bool:
        """Whether the sequence could go on after its first `length` entries."""
        # At its end it can. Memory does not always know where that is: a picture's last position may not be held.
        return (length == len(self) and not self.partial_media_rows) or self._backend.can_resume_at(
            self.seq_id, self.position_at(length)
        )

    def append_decoded(self, entries: Entries | list[int]) -> None:
        """Note that memory took these entries."""
        self.partial_media_rows = 0
        if isinstance(entries, list):  # tokens: each has one cell, and one position
            for number in entries:
                self.entry_buffer.append(number)
            self.position += len(entries)
            self.cell_count += len(entries)
        else:
            self.entry_buffer.extend(entries)
            self.position += self._interner.count_positions(entries)
            self.cell_count += self._interner.count_cells(entries)

    def drop_partial_media(self) -> None:
        """Let half a picture go, where there is one."""
        if self.partial_media_rows:
            self.repair(is_intact=True)

    def repair(self, *, is_intact: bool) -> None:
        """Make memory what the record says, or empty: it may hold more, and, where it is not `whole`, anything."""
        if is_intact and self._backend.can_resume_at(self.seq_id, self.position):
            self._backend.truncate(self.seq_id, self.position)
            self.partial_media_rows = 0
        else:
            self.clear()

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` entries; only where `resumable`."""
        if length < len(self):
            self._backend.truncate(self.seq_id, self.position_at(length))
            self._set_length(length)

    def rewind_for_drafter(self) -> None:
        """Let the last entry be computed again, where whatever guesses has to see that."""
        if len(self) > 1 and self.entries[-1] >= 0 and self._backend.rewind_for_drafter(self.seq_id, self.position):
            self._set_length(len(self) - 1)

    def clear(self) -> None:
        self._backend.clear(self.seq_id)
        self._set_length(0)

    def copy_from(self, source: Sequence, length: int) -> int:
        """Become the first `length` entries of `source`. The bytes that were moved."""
        self.clear()
        nbytes = self._backend.copy(source.seq_id, self.seq_id, source.position_at(length))
        self.append_decoded(source.entries[:length].copy())
        self.aligned = min(source.aligned, length)
        return nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of what `save` would return."""
        return self._backend.get_state_size(self.seq_id, "full") + self.entries.nbytes

    def save(self) -> SavedSequence:
        state = self._backend.save(self.seq_id, "full", long_lived=True)
        return SavedSequence(self.entries.copy(), state, self.aligned, self.salt)

    def load(self, entries: Entries, state: BackendState, aligned: int) -> None:
        """Become what `state` held when it was saved with these entries."""
        self._set_length(0)
        self._backend.load(self.seq_id, state)
        self.append_decoded(entries)
        self.aligned = aligned

    def restore(self, length: int, state: BackendState, aligned: int) -> None:
        """Go back to the first `length` entries with a partial state; the cells before it are still here."""
        self._backend.load(self.seq_id, state)
        self._set_length(length)
        self.aligned = min(aligned, length)

    def _set_length(self, length: int) -> None:
        self.loss_count += length < len(self)
        self.partial_media_rows = 0
        self.entry_buffer.truncate(length)
        self.position = self._interner.count_positions(self.entry_buffer.entries)
        self.cell_count = self._interner.count_cells(self.entry_buffer.entries)
        self.aligned = min(self.aligned, length)
