"""Protocol between the engine and the code that computes. `LlamaBackend` and `FakeBackend` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.adapters import AdapterSet, LoadedAdapter
from afterglow.engine.types.constraints import TokenBytes
from afterglow.engine.types.entries import Entries
from afterglow.engine.types.media import MediaEncoder
from afterglow.engine.types.tile import RowTile
from afterglow.errors import AfterglowError
from afterglow.llama.projector import MediaEmbedding
from afterglow.llama.sampling import Sampling
from afterglow.llama.state import StateScope
from afterglow.media.policy import Modality


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Limits and abilities of a backend and its KV cache.

    They are known when the model is loaded and never change. The prefix cache and the scheduler decide by them what
    to attempt; nothing is discovered by trying an operation and failing.
    """

    # KV cells only, with a sliding window, recurrent state only, or both KV cells and recurrent state.
    memory_kind: Literal["attention", "window", "recurrent", "hybrid"]
    sequences: int  # slots
    cells_per_sequence: int  # KV cells available to one sequence
    batch_cells: int  # maximum rows of one decode
    ubatch_cells: int  # rows that are computed at once; a decode is split into pieces of this size
    max_outputs: int  # maximum rows of one decode that return logits
    kv_unified: bool  # sequences share one set of cells, so that copying a prefix is free; else each has its own stream
    interruptible: bool  # a running decode can be stopped
    media: frozenset[Modality] = frozenset()  # modalities that prompts may contain in addition to tokens
    max_rollback: int = 0  # newest entries that a sequence can drop right after a decode, e.g. rejected draft tokens
    computes_ahead: bool = False  # a decode returns before its logits are computed, so that it can be started early
    copies_on_device: bool = False  # copying a sequence takes no time: a GPU copies within its memory
    decode_threads: int = 1  # cores that a decode keeps busy
    row_tile: RowTile | None = None  # rows of a sequence that take less time together
    can_replay: bool = False  # a sequence can return to a partial state that was saved before a decode
    # The first token of an answer can be sampled from stored logits. Otherwise a drafter needs to see the last entry of
    # every prompt decoded.
    starts_from_logits: bool = True

    @property
    def has_partial_state(self) -> bool:
        """Checkpoints smaller than the full state exist, and resuming needs one."""
        return self.memory_kind != "attention"

    @property
    def can_fork_anywhere(self) -> bool:
        """A copy can end at any position at which its source can resume. Otherwise only full sequences are copied."""
        return self.memory_kind == "attention" or (self.memory_kind == "window" and self.kv_unified)

    @property
    def checkpoints_need_cells(self) -> bool:
        """A partial state is complete only together with the attention cells before it."""
        return self.memory_kind != "recurrent"

    @property
    def has_attention_cells(self) -> bool:
        """The KV cache has attention cells, which can be truncated at any entry."""
        return self.memory_kind != "recurrent"

    @property
    def survives_abort(self) -> bool:
        """A decode that was interrupted leaves the sequences of its batch as they were, or with some of its rows.

        Otherwise they are damaged; so are others if the batch had several sequences."""
        return self.memory_kind in ("attention", "window")


class BackendState(Protocol):
    """Saved state of a sequence, full or partial."""

    @property
    def nbytes(self) -> int: ...


class BackendCells(Protocol):
    """Attention cells of a saved sequence, in the order of its entries."""

    layout: bytes  # format of the cells, as `Backend.assemble_state` needs it
    cell_bytes: int  # bytes of one cell

    def __len__(self) -> int: ...
    def copy_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a copy of cells [start, stop), one row of bytes per cell."""


class Sampler(Protocol):
    """Samples tokens for one request."""

    def sample_and_accept(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        """Sample a token, from the `allowed` ones if given, and update the sampler's state with it."""

    def accept(self, token: int) -> None:
        """Update the sampler's state with a token that was chosen elsewhere."""

    def close(self) -> None: ...


@dataclass(slots=True)
class DecodeSpan:
    """Consecutive entries of one sequence in one decode. The last `outputs` of them return logits.

    The entries are tokens, or a single image or audio clip, which is decoded in a batch of its own.
    """

    sequence: int
    entries: Entries | list[int]
    position: int
    outputs: int
    embedding: MediaEmbedding | None = None  # all or the next rows of the media entry
    completes_entry: bool = True  # these are the last rows of the media entry
    adapters: AdapterSet = ()  # to compute with; all spans of a decode have the same

    @property
    def rows(self) -> int:
        """Number of batch rows of the span."""
        return len(self.entries) if self.embedding is None else len(self.embedding.rows)


class Backend(Protocol):
    """KV cache of a fixed number of sequences and the decode that fills it.

    A backend has mechanisms only: it stores, copies, truncates and computes what it is told to. Policies such as prefix
    reuse, eviction and scheduling belong to the engine. All methods are called on the engine's thread, except those
    marked thread-safe. A sequence is identified by its number; positions count from 0 and are those of llama.cpp, which
    differ from entry counts if the sequence contains media.
    """

    capabilities: Capabilities
    vocabulary_size: int
    eog_tokens: frozenset[int]  # tokens that end a generation
    token_bytes: TokenBytes  # bytes of each token, for grammars
    projector: MediaEncoder | None  # encodes images and audio, on another thread
    adapters: Mapping[str, LoadedAdapter]  # LoRA adapters by name, in the order of their declaration

    @property
    def state_key(self) -> bytes:
        """Key of model, build and settings. Saved bytes are valid only in a backend with an equal key.

        They are also valid only with the adapters that they were computed with; the prefix cache sees to that.
        """

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        """Compute all spans in one batch, with their adapters.

        `KVCacheFull`: nothing was changed. `Cancelled`, `DecodeFailed`: the sequences may hold some of the rows; check
        `get_position_range`.
        """

    def get_logits(self, span: int, row: int) -> NDArray[np.float32]:
        """Return a view of the logits after a row of a span of the last decode."""

    def sample_rows(self, draws: Sequence[tuple[int, int, Sampler]]) -> list[int | AfterglowError]:
        """Sample and accept a token for each (span, row, sampler), like `sample_and_accept`, but faster for many.

        If sampling fails, the error takes the place of the token.
        """

    def create_sampler(self, sampling: Sampling) -> Sampler: ...
    def token_to_piece(self, token: int) -> bytes: ...
    def get_position_range(self, sequence: int) -> tuple[int, int] | None:
        """Return the first and last position in the KV cache; None if the sequence is empty."""

    def can_resume_at(self, sequence: int, position: int) -> bool:
        """Return whether the sequence can be truncated at `position` and continue there with exact results."""

    def can_roll_back_after(self, spans: Sequence[DecodeSpan]) -> bool:
        """Return whether sequences can drop up to `max_rollback` entries after a decode of these spans."""

    def truncate(self, sequence: int, position: int) -> None:
        """Drop everything from `position` on. Allowed only if `can_resume_at` is true.

        `UnsupportedOperation`: the KV cache refused and nothing was changed. The sequence cannot be used before it is
        cleared or loaded.
        """

    def rewind_for_drafter(self, sequence: int, position: int) -> bool:
        """Drop the entry before `position` if the drafter must see it decoded again; return whether it was dropped."""

    def copy(self, source: int, target: int, stop: int) -> int:
        """Copy the positions before `stop` to the empty sequence `target`; return the number of bytes moved."""

    def get_state_size(self, sequence: int, scope: StateScope) -> int:
        """Return the number of bytes that `save` would return."""

    def save(self, sequence: int, scope: StateScope, *, long_lived: bool = False) -> BackendState:
        """Save the state of a sequence. Use `long_lived` for a state that is stored; the default is faster."""

    def load(self, sequence: int, state: BackendState) -> None: ...
    def extract_cells(self, state: BackendState, partial: BackendState | None) -> BackendCells | None:
        """Return the cells in a full state, given the partial state saved with it; None if the format is not known."""

    def assemble_state(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: BackendState | None, position: int
    ) -> BackendState:
        """Build a full state from rows of cells and a partial state. Its next entry has position `position`."""

    def serialize_state(self, partial: BackendState) -> list[bytes | memoryview]:
        """Return a partial state as bytes. Thread-safe."""

    def deserialize_state(self, data: memoryview) -> BackendState:
        """Return the partial state in `data`, which it may keep; raise `InvalidState` if there is none."""

    def clear(self, sequence: int) -> None: ...
    def interrupt(self) -> None:
        """Stop the running decode. Thread-safe."""

    def clear_interrupt(self) -> None:
        """Discard an interrupt that arrived after its decode had ended, so that the next decode runs."""

    def close(self) -> None: ...
