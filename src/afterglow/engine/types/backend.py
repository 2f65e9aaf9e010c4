"""The seam between the engine and whatever computes. `LlamaBackend` and `FakeBackend` stand behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.constraints import TokenBytes
from afterglow.engine.types.entries import Entries
from afterglow.engine.types.media import MediaEncoder
from afterglow.llama.projector import MediaEmbedding, Modality
from afterglow.llama.sampling import Sampling

StateScope = Literal["full", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the backend's memory is like: known at load, never learned by failing."""

    memory_kind: Literal["attention", "window", "recurrent", "hybrid"]
    sequences: int
    cells_per_sequence: int  # of one sequence
    batch_cells: int  # of one decode
    ubatch_cells: int  # computed at once
    max_outputs: int  # rows of one decode that may give logits
    kv_unified: bool  # unified: sequences share the cells, and a copy costs nothing
    interruptible: bool  # a decode can be stopped in the middle
    media: frozenset[Modality] = frozenset()  # what prompts may hold beside tokens
    max_rollback: int = 0  # newest entries that a sequence can drop again right after a decode
    can_replay: bool = False  # it can go back to a partial state that was saved before a decode

    @property
    def has_partial_state(self) -> bool:
        """Checkpoints smaller than the whole state exist."""
        return self.memory_kind != "attention"

    @property
    def can_fork_anywhere(self) -> bool:
        """A copy can be cut at any entry where its source could. Otherwise only whole sequences can be copied."""
        return self.memory_kind == "attention" or (self.memory_kind == "window" and self.kv_unified)

    @property
    def checkpoints_need_cells(self) -> bool:
        """A partial state is complete only over attention cells that are still there."""
        return self.memory_kind != "recurrent"

    @property
    def has_attention_cells(self) -> bool:
        """There are attention cells, which can be cut anywhere."""
        return self.memory_kind != "recurrent"

    @property
    def survives_abort(self) -> bool:
        """A decode that was stopped leaves the other sequences in its batch whole."""
        return self.memory_kind in ("attention", "window")


class BackendState(Protocol):
    """A saved sequence."""

    @property
    def nbytes(self) -> int: ...


class BackendCells(Protocol):
    """The attention cells of a saved sequence, in the order of its entries."""

    layout: bytes  # what `join` needs to know of them
    cell_bytes: int  # bytes of one

    def __len__(self) -> int: ...
    def copy_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Cells [start, stop) as a copy, a row of bytes each."""


class Sampler(Protocol):
    """Chooses tokens. `take` draws, from the `allowed` ones where that is given, and moves its state on; `accept` only
    moves it on, with a token that somebody else chose."""

    def sample_and_accept(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int: ...
    def accept(self, token: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class DecodeSpan:
    """Consecutive entries of one sequence in one decode; the last `outputs` of them give logits.

    They are tokens, or one picture or sound, which then has a decode for itself.
    """

    sequence: int
    entries: Entries | list[int]
    position: int
    outputs: int
    embedding: MediaEmbedding | None = None  # of the picture or sound: its rows, or the next of them
    completes_entry: bool = True  # these are its last

    @property
    def rows(self) -> int:
        """Rows that a decode computes for it."""
        return len(self.entries) if self.embedding is None else len(self.embedding.rows)


class Backend(Protocol):
    """Memory for sequences and the decode that fills it. One thread; no policy."""

    capabilities: Capabilities
    vocabulary_size: int  # tokens there are
    eog_tokens: frozenset[int]  # those that end an answer
    token_bytes: TokenBytes  # what they are made of
    projector: MediaEncoder | None  # what encodes pictures and sounds, on another thread

    @property
    def state_key(self) -> bytes:
        """Equal keys: bytes that were taken out of memory there mean the same here."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        """Compute all spans in one decode. MemoryFull: nothing was applied. Cancelled, DecodeFailed: ask `held`."""

    def get_logits(self, span: int, row: int) -> NDArray[np.float32]:
        """The logits after a row of a span of the last decode: a view."""

    def create_sampler(self, sampling: Sampling) -> Sampler: ...
    def token_to_piece(self, token: int) -> bytes: ...
    def get_position_range(self, sequence: int) -> tuple[int, int] | None:
        """The first and last position in memory."""

    def can_resume_at(self, sequence: int, position: int) -> bool:
        """Could this sequence drop everything from `position` on and continue there, exactly?"""

    def truncate(self, sequence: int, position: int) -> None:
        """Drop everything from `position` on. Only where `resumable`."""

    def rewind_for_drafter(self, sequence: int, position: int) -> bool:
        """Drop the entry before `position`, where whatever guesses has to see it computed once more to go on from
        there; whether it did."""

    def copy(self, source: int, target: int, stop: int) -> int:
        """Give the empty `target` the positions before `stop` of `source`; the bytes that were moved."""

    def get_state_size(self, sequence: int, scope: StateScope) -> int:
        """The bytes that `save` would take."""

    def save(self, sequence: int, scope: StateScope, *, long_lived: bool = False) -> BackendState:
        """What a sequence holds; to `keep`, or for a moment, which is faster."""

    def load(self, sequence: int, state: BackendState) -> None: ...
    def extract_cells(self, state: BackendState, partial: BackendState | None) -> BackendCells | None:
        """The cells in a full state, given the partial state of the same moment; None where they cannot be told."""

    def assemble_state(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: BackendState | None, position: int
    ) -> BackendState:
        """A full state of these rows of cells and a partial state, whose next entry stands at `position`."""

    def serialize_state(self, partial: BackendState) -> list[bytes | memoryview]:
        """A partial state as bytes, from any thread."""

    def deserialize_state(self, data: memoryview) -> BackendState:
        """The reverse; `InvalidState` where it is none."""

    def clear(self, sequence: int) -> None: ...
    def interrupt(self) -> None:
        """Stop the decode that runs, from any thread."""

    def clear_interrupt(self) -> None:
        """Let the next decode run, should an interruption have come too late."""

    def close(self) -> None: ...
