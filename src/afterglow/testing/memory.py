"""What a fake's sequence holds, and what is saved of it. Every number depends on all that was there before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Scope

Kind = Literal["attention", "window", "recurrent", "hybrid"]
WINDOW = 24
PAST = 8  # entries before the window that are still there


def mix(*values: int) -> int:
    """A 62-bit hash of numbers."""
    data = b"".join([value.to_bytes(9, "little", signed=True) for value in values])
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, eq=False, slots=True)
class Cell:
    """One computed entry: `content` depends on all that was visible when it was computed."""

    position: int
    content: int
    weight: int = field(init=False, repr=False)  # what it adds to the sum that later entries see

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", mix(self.position, self.content))


@dataclass(slots=True)
class FakeMemory:
    """What one sequence holds: attention cells, the cells of windowed layers, a recurrent state."""

    cells: list[Cell] = field(default_factory=list)
    window: list[Cell] = field(default_factory=list)
    state: int = 0
    position: int = 0  # of the next entry
    rows: int = 0  # of the last decode: a rollback has to be shorter
    ahead: int = 0  # rows of a picture that is not complete yet
    before: int = 0  # the state before them
    past: list[int] = field(default_factory=list)  # states 1, 2, … entries ago; stale beyond `rows`

    def contents(self) -> tuple[object, ...]:
        """Everything that later entries depend on: equal for equal pasts, however they came."""
        cells = [(cell.position, cell.content) for cell in self.cells]
        window = [(cell.position, cell.content) for cell in self.window]
        assert cells[len(cells) - len(window) :] == window, "a window is the end of its sequence"
        visible = [cell for cell in window if cell[0] > self.position - WINDOW]
        return self.position, cells, visible, self.before if self.ahead else self.state


@dataclass(frozen=True, slots=True)
class FakeState:
    scope: Scope
    memory: FakeMemory
    nbytes: int


@dataclass(frozen=True, slots=True)
class FakeCells:
    """The cells of a saved sequence: position and content of each."""

    cells: list[Cell]
    layout: bytes = b"fake"
    width: int = 16

    def __len__(self) -> int:
        return len(self.cells)

    def rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        numbers = np.array([(cell.position, cell.content) for cell in self.cells[start:stop]], dtype=np.int64)
        return numbers.reshape(stop - start, 2).view(np.uint8)


def fold(cells: Sequence[Cell]) -> int:
    """One number for all cells; another one as soon as any differs, lacks or is there twice."""
    return sum([cell.weight for cell in cells]) % 2**61


def duplicate(memory: FakeMemory, *, fresh: bool) -> FakeMemory:
    """A copy, which cannot be rolled back; `fresh` cells are new ones, others are shared."""
    assert not memory.ahead, "half a picture is nobody's to copy or to save"
    cells = [replace(cell) for cell in memory.cells] if fresh else list(memory.cells)
    return FakeMemory(cells, list(memory.window), memory.state, memory.position)


def picture_number(digest: bytes) -> int:
    """What a picture is to the fake: a negative number for each."""
    return -1 - int.from_bytes(blake2b(digest, digest_size=7).digest(), "little")
