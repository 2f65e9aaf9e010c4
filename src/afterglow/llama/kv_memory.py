"""Sequence operations on a context's KV memory, for every memory kind, with streams and unified.

llama.cpp aborts on some arguments and silently computes wrong results after some operations; this module rejects
both. If an operation raises or returns False, nothing was changed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument, InvalidState, UnsupportedOperation
from afterglow.llama.checks import INT32_MAX, check_integer
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, MemoryKind
from afterglow.llama.settings import ContextSettings


class StateCopier(Protocol):
    def copy(self, source: int, target: int, scope: Literal["full", "partial"] = "full") -> int: ...


class MemoryOwner(Protocol):
    """The part of a context that `KVMemory` uses."""

    model: LlamaModel
    settings: ContextSettings
    sequences: int
    ubatch: int
    max_rollback: int
    is_mtp: bool

    @property
    def pointer(self) -> Any: ...

    @property
    def state(self) -> StateCopier: ...


class KVMemory:
    """Operations on sequences as ranges of positions [start, stop); None is an open end.

    >>> size = context.memory.copy(0, 1)       # sequence 1 is now a copy of sequence 0
    >>> context.memory.remove(1, start=10)     # and drops everything from position 10 on
    True
    """

    def __init__(self, context: MemoryOwner) -> None:
        self._context = context
        self._symbols = get_library().symbols
        self._pointer = self._symbols.llama_get_memory(context.pointer)
        # Rows of each sequence in the last decode: they bound how far it can be rolled back.
        self._decoded_rows: NDArray[np.int64] = np.zeros(context.sequences, dtype=np.int64)
        # Sequences that were rolled back and not decoded since: their state is one of their snapshots.
        self._rolled_back: NDArray[np.bool_] = np.zeros(context.sequences, dtype=np.bool_)
        self.pending_shift = False  # positions were shifted; the next decode rotates the keys
        # Copy streams with llama.cpp's own copy, within the device. The next decode applies it, and it copies whole
        # streams: on a GPU that takes a few milliseconds, on a CPU far longer than copying the state of a few cells.
        self.copies_on_device = False
        self.pending_copies: set[int] = set()  # sequences of copies that the next decode applies
        # After a failed decode of several recurrent sequences, cells without a sequence may not be zeroed on their next
        # use: llama.cpp marks those between the cells of the decode as zeroed before it zeroes them.
        self._has_stale_cells = False
        self.is_unknown = False  # it behaves as no known kind: only whole states are trusted
        self.rejects_shift = False  # shifted positions were found to give wrong results

    @property
    def kind(self) -> MemoryKind:
        """`attention`, `window`, `recurrent`, `hybrid`, or `none` (an encoder without memory).

        MTP heads use attention even if the model is recurrent or hybrid. A memory of unknown behaviour is treated as
        `recurrent`, the weakest kind: it is continued at its end, copied and restored as a whole.
        """
        if self._pointer == get_library().ffi.NULL:
            return "none"
        if self.is_unknown:
            return "recurrent"
        kind = self._context.model.info.memory_kind
        return "attention" if self._context.is_mtp and kind in ("recurrent", "hybrid") else kind

    @property
    def can_shift(self) -> bool:
        """Whether positions can be shifted: not with M-RoPE, a sliding window, or keys in BF16."""
        if self.kind == "none" or self._context.model.info.uses_mrope or self.is_unknown or self.rejects_shift:
            return False
        if self._context.settings.cache_type_k == "bf16":  # llama.cpp cannot rotate them and aborts
            return False
        return bool(self._symbols.llama_memory_can_shift(self._get_pointer("can_shift")))

    def get_position_range(self, sequence: int) -> tuple[int, int] | None:
        """Return the smallest and the largest position, or None if the sequence is empty or does not exist.

        Sliding windows and recurrent states have only the newest positions: their smallest is not 0.
        """
        if not 0 <= check_integer("sequence", sequence) < self._context.sequences or self.kind == "none":
            return None
        memory = self._get_pointer("positions")
        last = self._symbols.llama_memory_seq_pos_max(memory, sequence)
        return None if last < 0 else (self._symbols.llama_memory_seq_pos_min(memory, sequence), last)

    def can_resume(self, sequence: int, position: int) -> bool:
        """Return whether the sequence can drop everything from `position` on and continue there exactly.

        Full attention: always. Sliding window: while the whole window before `position` is in memory. Recurrent and
        hybrid: at the end, or r entries before it if the last decode had more than r rows of this sequence and the
        context has r snapshots; once per decode, and not after the sequence was copied or others were decoded. In
        unified memory also not if the last decode had sequences with different numbers of rows.
        """
        current = self.get_position_range(sequence)
        position = check_integer("position", position, 0)
        if position == 0:
            return True
        if current is None or position > current[1] + 1:
            return False
        dropped = current[1] + 1 - position
        match self.kind:
            case "window":
                # llama.cpp recycles what the next token does not see; with shared cells, at any time.
                return current[0] <= max(0, position - self._context.model.info.sliding_window + 1)
            case "recurrent" | "hybrid":
                snapshots = 0 if self.is_unknown else self._context.max_rollback
                return dropped <= max(0, min(snapshots, int(self._decoded_rows[sequence]) - 1))
        return True

    def remove(self, sequence: int | None = None, *, start: int | None = None, stop: int | None = None) -> bool:
        """Remove positions [start, stop) of one sequence, or of all sequences.

        Returns False if this memory cannot remove exactly these; nothing is changed then. A whole sequence can always
        be removed.
        """
        sequences = range(self._context.sequences) if sequence is None else [self.check_sequence(sequence)]
        first, last = self._check_range(start, stop)
        memory = self._get_pointer("remove")
        if not all(self._can_remove(number, first, last) for number in sequences):
            return False
        return all([self._remove_range(memory, number, first, last) for number in sequences])

    def _remove_range(self, memory: Any, sequence: int, first: int, last: int) -> bool:
        before = self.get_position_range(sequence)
        removed = bool(self._symbols.llama_memory_seq_rm(memory, sequence, first, -1 if last == INT32_MAX else last))
        after = self.get_position_range(sequence)
        if removed and after != before:
            self._decoded_rows[sequence] = 0  # a second rollback before the next decode would be wrong
            self._rolled_back[sequence] = after is not None
        if self._has_stale_cells and all(
            self.get_position_range(number) is None for number in range(self._context.sequences)
        ):
            self.clear(data=False)
        return removed

    def _can_remove(self, sequence: int, first: int, last: int) -> bool:
        current = self.get_position_range(sequence)
        if current is None or first > current[1] or last == 0:
            return True
        if last > current[1]:
            return self.can_resume(sequence, first)
        return self.kind == "attention" or (self.kind == "window" and self._context.settings.swa_full)

    def copy(self, source: int, target: int, *, start: int | None = None, stop: int | None = None) -> int:
        """Copy positions [start, stop) of `source` to `target`; return the number of bytes copied.

        The target must be empty from `start` on. If unified, the cells are shared and no bytes are copied. With
        streams, the bytes are copied immediately, or by the next decode if `copies_on_device`.
        """
        self.check_sequence(source, "source")
        self.check_sequence(target, "target")
        first, last = self._check_range(start, stop)
        source_range = self.get_position_range(source)
        if source == target or source_range is None or first > source_range[1]:
            return 0
        self._check_copy(source_range, source, target, first, last)
        if self._context.settings.kv_unified and not self.is_unknown:
            return self._share_cells(source, target, first, last)
        nbytes = self._copy_stream(source, target)
        kept_end = last > source_range[1] or self._remove_range(self._get_pointer("copy"), target, last, INT32_MAX)
        kept_start = first == 0 or self._remove_range(self._get_pointer("copy"), target, 0, first)
        if not (kept_end and kept_start):
            self.remove(target)
            raise UnsupportedOperation("this copy", f"llama.cpp did not remove what is outside of [{first}, {last})")
        return nbytes

    def _copy_stream(self, source: int, target: int) -> int:
        if not self.copies_on_device or self.kind not in ("attention", "window"):
            return self._context.state.copy(source, target)
        self._symbols.llama_memory_seq_cp(self._get_pointer("copy"), source, target, -1, -1)
        self.pending_copies |= {source, target}
        return 0

    def _share_cells(self, source: int, target: int, first: int, last: int) -> int:
        """Let `target` use the cells of `source`. The two also share a recurrent state, until either is decoded."""
        self._symbols.llama_memory_seq_cp(self._get_pointer("copy"), source, target, first, last)
        self._decoded_rows[[source, target]] = 0  # llama.cpp rolls no shared state back
        if self._rolled_back[source] and self.kind in ("recurrent", "hybrid"):
            # The shared state is the newest one. Give the target the one that the source was rolled back to.
            return self._context.state.copy(source, target, "partial")
        return 0

    def _check_copy(self, source_range: tuple[int, int], source: int, target: int, first: int, last: int) -> None:
        existing = self.get_position_range(target)
        if existing is not None and (existing[1] >= first or not self._context.settings.kv_unified):
            raise InvalidArgument("target", f"sequence {target} already has positions up to {existing[1]}: remove them")
        if self.kind in ("recurrent", "hybrid") and (first > 0 or last <= source_range[1]):
            raise UnsupportedOperation("a partial copy", f"{self.kind} memory has only its newest state")
        # A copied window ends at the end of its sequence: the bytes do not contain what comes before it.
        copies_window = self.kind == "window" and not self._context.settings.kv_unified
        if last <= source_range[1] and (copies_window or not self.can_resume(source, last)):
            raise UnsupportedOperation("this copy", f"the window before position {last} would not be copied")
        if self.pending_shift and not self._context.settings.kv_unified:
            raise UnsupportedOperation("a copy", "positions were shifted; decode first to apply the shift")

    def keep_only(self, sequence: int) -> None:
        """Remove every other sequence."""
        self.check_sequence(sequence)
        for other in range(self._context.sequences):
            if other != sequence:
                self.remove(other)

    def clear(self, *, data: bool = True) -> None:
        """Remove all sequences; with `data`, also overwrite the cells."""
        self._symbols.llama_memory_clear(self._get_pointer("clear"), data)
        self._has_stale_cells = False
        self._decoded_rows[:] = 0
        self._rolled_back[:] = False
        self.pending_shift = False

    def shift(self, sequence: int, delta: int, *, start: int | None = None, stop: int | None = None) -> None:
        """Add `delta` to the positions [start, stop). The next decode applies it to the keys."""
        first, last = self._check_shift("shift", sequence, start, stop)
        current = self.get_position_range(sequence)
        delta = check_integer("delta", delta)
        if current is None or delta == 0:
            return
        if not max(first, current[0]) + delta >= 0 or current[1] + delta >= INT32_MAX:
            raise InvalidArgument("delta", f"{delta} would move a position out of range")
        self._symbols.llama_memory_seq_add(self._get_pointer("shift"), sequence, first, last, delta)
        self.pending_shift = True

    def divide(self, sequence: int, divisor: int, *, start: int | None = None, stop: int | None = None) -> None:
        """Divide the positions [start, stop) by `divisor`, 1 to 255. The next decode applies it to the keys.

        Shifts one position at a time: `llama_memory_seq_div` would rotate the keys in the wrong direction.
        """
        first, last = self._check_shift("divide", sequence, start, stop)
        divisor = check_integer("divisor", divisor, 1, 255)
        current = self.get_position_range(sequence)
        if divisor == 1 or current is None:
            return
        pointer, add = self._get_pointer("divide"), self._symbols.llama_memory_seq_add
        for position in range(max(first, current[0], 1), min(last, current[1] + 1)):
            add(pointer, sequence, position, position + 1, position // divisor - position)
        self.pending_shift = True

    def record_decode(self, sequences: NDArray[np.int32]) -> None:
        """Record the sequence of each row of a decode: the row count bounds how far a sequence can be rolled back.

        Other sequences cannot be rolled back any more: a decode may move their recurrent states without the snapshots.
        """
        if not self._context.max_rollback:
            return
        self._decoded_rows = np.bincount(sequences, minlength=len(self._decoded_rows))
        self._rolled_back[self._decoded_rows > 0] = False
        if not self.keeps_snapshots(Counter(sequences.tolist())):
            self._decoded_rows[:] = 0

    def record_failed_decode(self) -> None:
        """Record a decode that failed or was aborted after llama.cpp had assigned cells to its rows."""
        self._has_stale_cells = self.kind in ("recurrent", "hybrid")

    def keeps_snapshots(self, rows: Mapping[int, int]) -> bool:
        """Return whether all snapshots are right after a decode of this many rows of each sequence, in this order.

        They are if the decode is of one sequence or one ubatch. A later ubatch may move the states of the sequences
        before it, without their snapshots. In streams, an ubatch has equally many rows of consecutive sequences.
        """
        if len(rows) == 1:
            return True
        are_together = self._context.settings.kv_unified or all(b == a + 1 for a, b in itertools.pairwise(rows))
        return are_together and len(set(rows.values())) == 1 and sum(rows.values()) <= self._context.ubatch

    def record_embedding_decode(self, sequence: int) -> None:
        """Record a decode of media rows: they cannot be rolled back individually."""
        self._decoded_rows[:] = 0
        self._rolled_back[sequence] = False

    def record_state_load(self, sequence: int, last: int) -> None:
        """Record that a saved state that ends at position `last` was loaded into the sequence.

        A partial state does not replace attention cells: remove those after its end, which would be visible again.
        """
        self._decoded_rows[sequence] = 0  # no rollback before a decode
        self._rolled_back[sequence] = False
        if self.kind not in ("window", "hybrid"):  # the others were replaced as a whole
            return
        if not self._symbols.llama_memory_seq_rm(self._get_pointer("load"), sequence, last + 1, -1):
            self.remove(sequence)
            raise InvalidState(f"llama.cpp did not remove the cells after its end, {last}")

    def check_sequence(self, sequence: int, name: str = "sequence") -> int:
        return check_integer(name, sequence, 0, self._context.sequences - 1)

    def _check_shift(self, operation: str, sequence: int, start: int | None, stop: int | None) -> tuple[int, int]:
        self.check_sequence(sequence)
        first, last = self._check_range(start, stop)
        if not self.can_shift:
            raise UnsupportedOperation(operation, "the positions of this memory cannot be shifted")
        return first, last

    def _check_range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        first = 0 if start is None else check_integer("start", start, 0)
        last = INT32_MAX if stop is None else check_integer("stop", stop, 0)
        if first > last:
            raise InvalidArgument("start", f"{first} is after `stop`, {last}")
        return first, last

    def _get_pointer(self, operation: str) -> Any:
        assert self._context.pointer  # raises Closed after the context was closed
        if self._pointer == get_library().ffi.NULL:
            raise UnsupportedOperation(operation, "this model has no memory")
        return self._pointer
