"""KV cache and saved states of `FakeBackend`. Every number depends on everything before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.state import StateScope

FakeMemoryKind = Literal["attention", "window", "recurrent", "hybrid"]
WINDOW_ENTRIES = 24
WINDOW_MARGIN_ENTRIES = 8  # entries before the window that are still in memory


def hash_integers(*values: int) -> int:
    """Return a 62-bit hash of the numbers."""
    data = b"".join([value.to_bytes(9, "little", signed=True) for value in values])
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, eq=False, slots=True)
class FakeCell:
    """One computed entry: `content` depends on everything that was visible when it was computed."""

    position: int
    content: int
    weight: int = field(init=False, repr=False)  # summand in `hash_cells`

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", hash_integers(self.position, self.content))


@dataclass(slots=True)
class FakeKVCache:
    """KV cache of one sequence: attention cells, cells of sliding-window layers, recurrent state."""

    cells: list[FakeCell] = field(default_factory=list)
    window: list[FakeCell] = field(default_factory=list)
    recurrent_state: int = 0
    position: int = 0  # of the next entry
    last_decode_rows: int = 0  # a rollback must be shorter
    partial_media_rows: int = 0  # rows of an image or audio clip that is not complete yet
    state_before_media: int = 0  # recurrent state before these rows
    # States 1, 2, … entries ago; stale beyond `last_decode_rows`.
    state_snapshots: list[int] = field(default_factory=list)

    def visible_state(self) -> tuple[object, ...]:
        """Return everything that later entries depend on: equal for equal prompts, however they were computed."""
        cells = [(cell.position, cell.content) for cell in self.cells]
        window = [(cell.position, cell.content) for cell in self.window]
        assert cells[len(cells) - len(window) :] == window, "a window is the tail of its sequence"
        visible = [cell for cell in window if cell[0] > self.position - WINDOW_ENTRIES]
        state = self.state_before_media if self.partial_media_rows else self.recurrent_state
        return self.position, cells, visible, state


@dataclass(frozen=True, slots=True)
class FakeState:
    scope: StateScope
    kv_cache: FakeKVCache
    nbytes: int


@dataclass(frozen=True, slots=True)
class FakeCells:
    """Cells of a saved sequence: position and content of each."""

    cells: list[FakeCell]
    layout: bytes = b"fake"
    cell_bytes: int = 16

    def __len__(self) -> int:
        return len(self.cells)

    def copy_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        numbers = np.array([(cell.position, cell.content) for cell in self.cells[start:stop]], dtype=np.int64)
        return numbers.reshape(stop - start, 2).view(np.uint8)


def hash_cells(cells: Sequence[FakeCell]) -> int:
    """Return one number for all cells, which changes if any cell differs, is missing or is duplicate."""
    return sum([cell.weight for cell in cells]) % 2**61


def copy_kv_cache(kv_cache: FakeKVCache, *, copy_cells: bool) -> FakeKVCache:
    """Copy a KV cache; the copy cannot be rolled back. Cells are shared unless `copy_cells` is set."""
    assert not kv_cache.partial_media_rows, "incomplete media cannot be copied or saved"
    cells = [replace(cell) for cell in kv_cache.cells] if copy_cells else list(kv_cache.cells)
    return FakeKVCache(cells, list(kv_cache.window), kv_cache.recurrent_state, kv_cache.position)


def hash_media_digest(digest: bytes) -> int:
    """Return the negative number that stands for an image or audio clip."""
    return -1 - int.from_bytes(blake2b(digest, digest_size=7).digest(), "little")
