"""A slot of memory and the record of what is in it. The only object that changes memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from afterglow.engine.backend import Backend, State
from afterglow.engine.entries import Ids, Ledger, Record


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole sequence, taken out of memory."""

    ids: Ids
    state: State
    aligned: int
    salt: str = ""

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.ids.nbytes


class Sequence:
    """Invariant: `record` is exactly what memory holds, entry for entry."""

    def __init__(self, number: int, backend: Backend, ledger: Ledger) -> None:
        self.number = number
        self.record = Record()
        self.aligned = 0  # leading entries computed in whole chunks of the deterministic grid
        self.salt = ""  # whose it is: others never see what it holds
        self.busy = False
        self.last_used = time.monotonic()
        self._backend = backend
        self._ledger = ledger
        self.position = 0  # of the next entry; with media not the number of entries
        self.cells = 0  # that its entries fill
        self.losses = 0  # how often it held more than afterwards
        self.ahead = 0  # rows of the next entry, a picture, that memory holds already and the record does not

    def __len__(self) -> int:
        return self.record.length

    @property
    def ids(self) -> Ids:
        return self.record.ids

    def position_at(self, length: int) -> int:
        """The position of the entry with index `length`."""
        return self.position if length == len(self) else self._ledger.positions(self.ids[:length])

    def resumable(self, length: int) -> bool:
        """Whether the sequence could go on after its first `length` entries."""
        # At its end it can. Memory does not always know where that is: a picture's last position may not be held.
        return (length == len(self) and not self.ahead) or self._backend.resumable(
            self.number, self.position_at(length)
        )

    def decoded(self, ids: Ids | list[int]) -> None:
        """Note that memory took these entries."""
        self.ahead = 0
        if isinstance(ids, list):  # tokens: each has one cell, and one position
            for number in ids:
                self.record.append(number)
            self.position += len(ids)
            self.cells += len(ids)
        else:
            self.record.extend(ids)
            self.position += self._ledger.positions(ids)
            self.cells += self._ledger.cells(ids)

    def drop_ahead(self) -> None:
        """Let half a picture go, where there is one."""
        if self.ahead:
            self.mend(whole=True)

    def mend(self, *, whole: bool) -> None:
        """Make memory what the record says, or empty: it may hold more, and, where it is not `whole`, anything."""
        if whole and self._backend.resumable(self.number, self.position):
            self._backend.truncate(self.number, self.position)
            self.ahead = 0
        else:
            self.clear()

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` entries; only where `resumable`."""
        if length < len(self):
            self._backend.truncate(self.number, self.position_at(length))
            self._note(length)

    def rewind(self) -> None:
        """Let the last entry be computed again, where whatever guesses has to see that."""
        if len(self) > 1 and self.ids[-1] >= 0 and self._backend.rewind(self.number, self.position):
            self._note(len(self) - 1)

    def clear(self) -> None:
        self._backend.clear(self.number)
        self._note(0)

    def copy_from(self, source: Sequence, length: int) -> int:
        """Become the first `length` entries of `source`. The bytes that were moved."""
        self.clear()
        nbytes = self._backend.copy(source.number, self.number, source.position_at(length))
        self.decoded(source.ids[:length].copy())
        self.aligned = min(source.aligned, length)
        return nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of what `save` would return."""
        return self._backend.size(self.number, "full") + self.ids.nbytes

    def save(self) -> Saved:
        state = self._backend.save(self.number, "full", keep=True)
        return Saved(self.ids.copy(), state, self.aligned, self.salt)

    def load(self, ids: Ids, state: State, aligned: int) -> None:
        """Become what `state` held when it was saved with these entries."""
        self._note(0)
        self._backend.load(self.number, state)
        self.decoded(ids)
        self.aligned = aligned

    def restore(self, length: int, state: State, aligned: int) -> None:
        """Go back to the first `length` entries with a partial state; the cells before it are still here."""
        self._backend.load(self.number, state)
        self._note(length)
        self.aligned = min(aligned, length)

    def _note(self, length: int) -> None:
        self.losses += length < len(self)
        self.ahead = 0
        self.record.truncate(length)
        self.position = self._ledger.positions(self.record.ids)
        self.cells = self._ledger.cells(self.record.ids)
        self.aligned = min(self.aligned, length)
