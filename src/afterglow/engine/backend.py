"""The seam between the engine and whatever computes. `LlamaBackend` and `FakeBackend` stand behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.constraint import Words
from afterglow.engine.entries import Ids
from afterglow.engine.pictures import Encodes
from afterglow.llama.projector import Embedding, MediaKind
from afterglow.llama.sampling import Sampling

Scope = Literal["full", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the backend's memory is like: known at load, never learned by failing."""

    memory: Literal["attention", "window", "recurrent", "hybrid"]
    sequences: int
    cells: int  # of one sequence
    batch_cells: int  # of one decode
    ubatch_cells: int  # computed at once
    outputs: int  # rows of one decode that may give logits
    shared: bool  # unified: sequences share the cells, and a copy costs nothing
    interruptible: bool  # a decode can be stopped in the middle
    media: frozenset[MediaKind] = frozenset()  # what prompts may hold beside tokens
    max_rollback: int = 0  # newest entries that a sequence can drop again right after a decode
    replays: bool = False  # it can go back to a partial state that was saved before a decode

    @property
    def partial_state(self) -> bool:
        """Checkpoints smaller than the whole state exist."""
        return self.memory != "attention"

    @property
    def forks_anywhere(self) -> bool:
        """A copy can be cut at any entry where its source could. Otherwise only whole sequences can be copied."""
        return self.memory == "attention" or (self.memory == "window" and self.shared)

    @property
    def checkpoints_need_cells(self) -> bool:
        """A partial state is complete only over attention cells that are still there."""
        return self.memory != "recurrent"

    @property
    def has_cells(self) -> bool:
        """There are attention cells, which can be cut anywhere."""
        return self.memory != "recurrent"

    @property
    def survives_abort(self) -> bool:
        """A decode that was stopped leaves the other sequences in its batch whole."""
        return self.memory in ("attention", "window")


class State(Protocol):
    """A saved sequence."""

    @property
    def nbytes(self) -> int: ...


class Cells(Protocol):
    """The attention cells of a saved sequence, in the order of its entries."""

    layout: bytes  # what `join` needs to know of them
    width: int  # bytes of one

    def __len__(self) -> int: ...
    def rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Cells [start, stop) as a copy, a row of bytes each."""


class Sampler(Protocol):
    """Chooses tokens. `take` draws, from the `allowed` ones where that is given, and moves its state on; `accept` only
    moves it on, with a token that somebody else chose."""

    def take(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int: ...
    def accept(self, token: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Span:
    """Consecutive entries of one sequence in one decode; the last `outputs` of them give logits.

    They are tokens, or one picture or sound, which then has a decode for itself.
    """

    sequence: int
    ids: Ids | list[int]
    position: int
    outputs: int
    embedding: Embedding | None = None  # of the picture or sound: its rows, or the next of them
    ends: bool = True  # these are its last

    @property
    def rows(self) -> int:
        """Rows that a decode computes for it."""
        return len(self.ids) if self.embedding is None else len(self.embedding.rows)


class Backend(Protocol):
    """Memory for sequences and the decode that fills it. One thread; no policy."""

    capabilities: Capabilities
    vocabulary: int  # tokens there are
    ends: frozenset[int]  # those that end an answer
    words: Words  # what they are made of
    projector: Encodes | None  # what encodes pictures and sounds, on another thread

    @property
    def key(self) -> bytes:
        """Equal keys: bytes that were taken out of memory there mean the same here."""

    def decode(self, spans: Sequence[Span]) -> None:
        """Compute all spans in one decode. MemoryFull: nothing was applied. Cancelled, DecodeFailed: ask `held`."""

    def logits(self, span: int, row: int) -> NDArray[np.float32]:
        """The logits after a row of a span of the last decode: a view."""

    def sampler(self, sampling: Sampling) -> Sampler: ...
    def piece(self, token: int) -> bytes: ...
    def held(self, sequence: int) -> tuple[int, int] | None:
        """The first and last position in memory."""

    def resumable(self, sequence: int, position: int) -> bool:
        """Could this sequence drop everything from `position` on and continue there, exactly?"""

    def truncate(self, sequence: int, position: int) -> None:
        """Drop everything from `position` on. Only where `resumable`."""

    def rewind(self, sequence: int, position: int) -> bool:
        """Drop the entry before `position`, where whatever guesses has to see it computed once more to go on from
        there; whether it did."""

    def copy(self, source: int, target: int, stop: int) -> int:
        """Give the empty `target` the positions before `stop` of `source`; the bytes that were moved."""

    def size(self, sequence: int, scope: Scope) -> int:
        """The bytes that `save` would take."""

    def save(self, sequence: int, scope: Scope, *, keep: bool = False) -> State:
        """What a sequence holds; to `keep`, or for a moment, which is faster."""

    def load(self, sequence: int, state: State) -> None: ...
    def cells(self, state: State, partial: State | None) -> Cells | None:
        """The cells in a full state, given the partial state of the same moment; None where they cannot be told."""

    def join(self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: State | None, position: int) -> State:
        """A full state of these rows of cells and a partial state, whose next entry stands at `position`."""

    def pack(self, partial: State) -> list[bytes | memoryview]:
        """A partial state as bytes, from any thread."""

    def unpack(self, data: memoryview) -> State:
        """The reverse; `InvalidState` where it is none."""

    def clear(self, sequence: int) -> None: ...
    def interrupt(self) -> None:
        """Stop the decode that runs, from any thread."""

    def uninterrupt(self) -> None:
        """Let the next decode run, should an interruption have come too late."""

    def close(self) -> None: ...
