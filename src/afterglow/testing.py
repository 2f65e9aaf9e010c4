"""`FakeBackend`: the engine's memory without a model, exact and unforgiving, for tests of engines and of programs.

Every computed entry depends on everything that memory held when it was computed, as in a real model: one wrong,
missing or doubled cell changes the tokens that come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Capabilities, Scope, Span, State
from afterglow.errors import InvalidState, MemoryFull
from afterglow.llama.sampling import Sampling

Kind = Literal["attention", "window", "recurrent", "hybrid"]
WINDOW = 24


def mix(*values: int) -> int:
    """A 62-bit hash of numbers."""
    data = b"".join(value.to_bytes(9, "little", signed=True) for value in values)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, eq=False, slots=True)
class Cell:
    """One computed entry: `content` depends on all that was visible when it was computed."""

    position: int
    content: int


@dataclass(slots=True)
class FakeMemory:
    """What one sequence holds: attention cells, the cells of windowed layers, a recurrent state."""

    cells: list[Cell] = field(default_factory=list)
    window: list[Cell] = field(default_factory=list)
    state: int = 0
    position: int = 0  # of the next entry
    rows: int = 0  # of the last decode: how far a rollback could go


@dataclass(frozen=True, slots=True)
class FakeState:
    scope: Scope
    memory: FakeMemory
    nbytes: int


class FakeSampler:
    """Draws from the softmax with the request's seed; at temperature 0 takes the largest."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.drawn = 0
        self.accepted: list[int] = []
        self.closed = False

    def sample(self, logits: NDArray[np.float32]) -> int:
        if self.sampling.greedy:
            return int(logits.argmax())
        noise = np.random.default_rng([self.sampling.seed or 0, self.drawn]).gumbel(size=len(logits))
        self.drawn += 1
        return int((logits / self.sampling.temperature + noise).argmax())

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def close(self) -> None:
        self.closed = True


class FakeBackend:
    """A backend of any memory kind in a few hundred lines of arithmetic.

    >>> backend = FakeBackend("hybrid", sequences=2)
    >>> backend.decode([Span(0, [1, 2, 3], position=0, outputs=1)])
    >>> backend.logits(0, 2).shape
    (64,)
    """

    def __init__(
        self,
        memory: Kind = "attention",
        *,
        sequences: int = 4,
        cells: int = 1024,
        batch_cells: int = 64,
        shared: bool = False,
        vocabulary: int = 64,
        total_cells: int | None = None,
    ) -> None:
        self.capabilities = Capabilities(
            memory=memory,
            sequences=sequences,
            cells=cells,
            batch_cells=batch_cells,
            ubatch_cells=batch_cells,
            outputs=sequences,
            shared=shared,
            interruptible=True,
        )
        self.ends = frozenset({0})
        self.vocabulary = vocabulary
        self.total_cells = total_cells if total_cells is not None else cells * sequences
        self.history: list[list[tuple[int, int]]] = []  # (sequence, rows) of every span of every decode
        self.faults: list[Exception] = []  # raised by the coming decodes, one each
        self.closed = False
        self._memory = [FakeMemory() for _ in range(sequences)]
        self._logits: list[list[int]] = []

    # --- computing

    def decode(self, spans: Sequence[Span]) -> None:
        rows = sum(len(span.ids) for span in spans)
        assert 0 < rows <= self.capabilities.batch_cells
        assert len({span.sequence for span in spans}) == len(spans), "one span of a sequence in a decode"
        if self.faults:
            self._fail(self.faults.pop(0), spans)
        if self._used() + rows > self.total_cells:
            raise MemoryFull(rows, self.total_cells)
        self.history.append([(span.sequence, len(span.ids)) for span in spans])
        self._logits = [[self._compute(span.sequence, int(number)) for number in span.ids] for span in spans]
        for span in spans:
            self._memory[span.sequence].rows = len(span.ids)

    def _fail(self, fault: Exception, spans: Sequence[Span]) -> None:
        """As llama.cpp does: full memory changes nothing; an aborted decode leaves half of its rows behind, and
        recurrent neighbours in ruins."""
        if not isinstance(fault, MemoryFull):
            for span in spans:
                for number in span.ids[: len(span.ids) // 2]:
                    self._compute(span.sequence, int(number))
                self._memory[span.sequence].state ^= 0xBAD
        raise fault

    def _compute(self, sequence: int, number: int) -> int:
        memory, kind = self._memory[sequence], self.capabilities.memory
        seen = [memory.position, number]
        if kind != "recurrent":
            seen += [len(memory.cells), fold(memory.cells)]
        if kind == "window":
            visible = [cell for cell in memory.window if cell.position > memory.position - WINDOW]
            seen += [len(visible), fold(visible)]
        if kind in ("recurrent", "hybrid"):
            seen.append(memory.state)
        content = mix(*seen)
        cell = Cell(memory.position, content)
        if kind != "recurrent":
            memory.cells.append(cell)
        if kind == "window":
            memory.window = [*memory.window, cell][-WINDOW - 8 :]
        if kind in ("recurrent", "hybrid"):
            memory.state = content
        memory.position += 1
        return content

    def logits(self, span: int, row: int) -> NDArray[np.float32]:
        noise = np.random.default_rng(self._logits[span][row]).normal(size=self.vocabulary)
        noise[0] -= 2.5  # answers end, but not at once
        return noise.astype(np.float32)

    def _used(self) -> int:
        return len({id(cell) for memory in self._memory for cell in memory.cells})

    # --- memory

    def held(self, sequence: int) -> tuple[int, int] | None:
        memory = self._memory[sequence]
        if memory.position == 0:
            return None
        first = {"recurrent": memory.position - 1, "hybrid": memory.position - 1}.get(self.capabilities.memory, 0)
        if self.capabilities.memory == "window":
            first = memory.window[0].position
        return first, memory.position - 1

    def resumable(self, sequence: int, position: int) -> bool:
        memory = self._memory[sequence]
        if position == 0 or position == memory.position:
            return position <= memory.position
        if position > memory.position or self.capabilities.memory in ("recurrent", "hybrid"):
            return False
        if self.capabilities.memory == "window":
            return memory.window[0].position <= max(0, position - WINDOW)
        return True

    def truncate(self, sequence: int, position: int) -> None:
        if position == 0:
            self._memory[sequence] = FakeMemory()
            return
        memory = self._memory[sequence]
        memory.cells = [cell for cell in memory.cells if cell.position < position]
        memory.window = [cell for cell in memory.window if cell.position < position]
        memory.position = min(memory.position, position)

    def copy(self, source: int, target: int, stop: int) -> int:
        assert self._memory[target].position == 0, "a copy needs an empty target"
        self._memory[target] = duplicate(self._memory[source], fresh=not self.capabilities.shared)
        if self.capabilities.forks_anywhere:
            self.truncate(target, stop)
        elif self.capabilities.memory == "window":
            memory = self._memory[target]
            memory.window = memory.window[-WINDOW:]
        return 0 if self.capabilities.shared else 100 * stop

    def save(self, sequence: int, scope: Scope) -> FakeState:
        memory = duplicate(self._memory[sequence], fresh=False)
        return FakeState(scope, memory, 64 if scope == "partial" else 64 + 100 * len(memory.cells))

    def load(self, sequence: int, state: State) -> None:
        if not isinstance(state, FakeState):
            raise InvalidState("it is not a fake state")
        saved, memory = duplicate(state.memory, fresh=state.scope == "full"), self._memory[sequence]
        if state.scope == "partial":  # the attention cells are those that are there, whatever they are
            saved.cells = [cell for cell in memory.cells if cell.position < saved.position]
        saved.rows = 0
        self._memory[sequence] = saved

    def clear(self, sequence: int) -> None:
        self._memory[sequence] = FakeMemory()

    # --- the rest

    def sampler(self, sampling: Sampling) -> FakeSampler:
        return FakeSampler(sampling)

    def piece(self, token: int) -> bytes:
        return bytes([97 + token % 26])

    def interrupt(self) -> None: ...

    def uninterrupt(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def fold(cells: Sequence[Cell]) -> int:
    """One number for all cells; another one as soon as any differs, lacks or is there twice."""
    total = 0
    for cell in cells:
        total += mix(cell.position, cell.content)
    return total % 2**61


def duplicate(memory: FakeMemory, *, fresh: bool) -> FakeMemory:
    """A copy; `fresh` cells are new ones, others are shared."""
    cells = [Cell(cell.position, cell.content) for cell in memory.cells] if fresh else list(memory.cells)
    return FakeMemory(cells, list(memory.window), memory.state, memory.position, memory.rows)
