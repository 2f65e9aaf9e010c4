"""`FakeBackend`: a backend of any memory kind, in arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Capabilities, Scope, Span, State
from afterglow.engine.constraint import Words
from afterglow.engine.entries import Ledger
from afterglow.engine.pictures import Encodes
from afterglow.errors import Cancelled, InvalidArgument, InvalidState, MemoryFull
from afterglow.llama.projector import Embedding
from afterglow.llama.sampling import Sampling
from afterglow.testing.memory import (
    PAST,
    WINDOW,
    Cell,
    FakeCells,
    FakeMemory,
    FakeState,
    Kind,
    duplicate,
    fold,
    mix,
    picture_number,
)
from afterglow.testing.sampler import FakeSampler, FakeWords

GUESSES = 16  # that one decode can verify


def fake_capabilities(
    memory: Kind, sequences: int, cells: int, batch_cells: int, rollback: int, *, shared: bool, replays: bool
) -> Capabilities:
    """What a memory of this kind can do, as llama.cpp would say of it."""
    return Capabilities(
        memory=memory,
        sequences=sequences,
        cells=cells,
        batch_cells=batch_cells,
        ubatch_cells=batch_cells,
        outputs=sequences + GUESSES,
        shared=shared,
        interruptible=True,
        media=frozenset({"image", "audio"}),
        max_rollback={"attention": cells, "window": PAST}.get(memory, rollback),
        replays=replays and memory in ("recurrent", "hybrid"),
    )


class FakeBackend:
    """A backend of any memory kind in a few hundred lines of arithmetic.

    `rollback` is how many earlier states a recurrent memory keeps, as llama.cpp's `n_rs_seq`, and `replays` whether it
    can go back to a saved one. With `rounding` the shape of a decode moves what its rows come to, as floating point
    does. Prompts may hold media once `ledger` is the engine's; with a `projector` (`FakeProjector`) what is computed of
    them is what it encoded.

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
        rollback: int = 0,
        replays: bool = True,
        rounding: bool = False,
        identity: str = "fake",
        projector: Encodes | None = None,
    ) -> None:
        self.capabilities = fake_capabilities(
            memory, sequences, cells, batch_cells, rollback, shared=shared, replays=replays
        )
        self.identity = identity  # of the model: states of another one mean nothing here
        self.projector = projector
        self.ends = frozenset({0})
        self.words: Words = FakeWords(tuple(self.piece(token) for token in range(vocabulary)))
        self.vocabulary = vocabulary
        self.total_cells = total_cells if total_cells is not None else cells * sequences
        self.rollback = rollback
        self.rounding = rounding
        self.ledger: Ledger | None = None
        self.history: list[list[tuple[int, int]]] = []  # (sequence, rows) of every span of every decode
        self.faults: list[Exception] = []  # raised by the coming decodes, one each
        self.closed = False
        self._memory = [FakeMemory() for _ in range(sequences)]
        self._logits: list[list[int]] = []
        self._interrupted = False

    # --- computing

    def decode(self, spans: Sequence[Span]) -> None:
        self._check(spans)
        if self._interrupted:
            self._fail(Cancelled("the decode was interrupted"), spans)
        if self.faults:
            self._fail(self.faults.pop(0), spans)
        self._find_room(spans)
        self.history.append([(span.sequence, len(span.ids)) for span in spans])
        shape = mix(*[len(span.ids) for span in spans]) if self.rounding else 0
        self._logits = [self._compute(span, shape) if span.ends else self._begin(span) for span in spans]

    def _check(self, spans: Sequence[Span]) -> None:
        """What llama.cpp would refuse, or abort on."""
        assert 0 < sum(span.rows for span in spans) <= self.capabilities.batch_cells
        assert sum(span.outputs for span in spans) <= self.capabilities.outputs
        assert len({span.sequence for span in spans}) == len(spans), "one span of a sequence in a decode"
        for span in spans:
            assert span.position == self._memory[span.sequence].position, "positions follow one another"
            if max(span.ids) >= self.vocabulary or (min(span.ids) < 0 and self.ledger is None):
                raise InvalidArgument("tokens", f"must be from 0 to {self.vocabulary - 1}")
            if self.projector is not None and min(span.ids) < 0:
                assert len(span.ids) == len(spans) == 1, "a picture has a decode for itself"
                assert span.embedding is not None, "a picture has to be encoded first"

    def _find_room(self, spans: Sequence[Span]) -> None:
        needed = {span.sequence: sum(self._size(int(number))[0] for number in span.ids) for span in spans}
        if self.capabilities.memory == "recurrent":
            return  # a state does not grow
        if self._used() + sum(needed.values()) > self.total_cells:
            raise MemoryFull(sum(needed.values()), self.total_cells)
        for sequence, cells in needed.items():
            if not self.capabilities.shared and len(self._memory[sequence].cells) + cells > self.capabilities.cells:
                raise MemoryFull(cells, self.capabilities.cells)

    def _size(self, number: int) -> tuple[int, int]:
        """The cells and the positions of an entry."""
        if number >= 0 or self.ledger is None:
            return 1, 1
        media = self.ledger.media(number)
        return media.cells, media.positions

    def _fail(self, fault: Exception, spans: Sequence[Span]) -> None:
        """As llama.cpp does: full memory changes nothing; an aborted decode leaves half of its rows behind, and
        recurrent neighbours in ruins."""
        if not isinstance(fault, MemoryFull):
            for span in spans:
                if span.embedding is not None:
                    self._begin(replace(span, embedding=span.embedding.cut(0, span.rows // 2)))
                else:
                    self._compute(replace(span, ids=span.ids[: len(span.ids) // 2]))
                if self.capabilities.memory in ("recurrent", "hybrid"):
                    self._memory[span.sequence].state ^= 0xBAD
        raise fault

    def _complete(self, memory: FakeMemory, span: Span) -> None:
        """The last rows of a picture: memory becomes what it would be, had all come at once."""
        media = self.ledger.media(int(span.ids[0])) if self.ledger is not None and span.ids[0] < 0 else None
        assert media is not None, "half a picture is in memory, and something else comes"
        assert memory.ahead + span.rows == media.cells, "its rows come in order, each once"
        memory.state, memory.ahead = memory.before, 0

    def _begin(self, span: Span) -> list[int]:
        """Take rows of a picture of which more come."""
        memory = self._memory[span.sequence]
        memory.before = memory.state if not memory.ahead else memory.before
        memory.ahead += span.rows
        if self.capabilities.memory in ("recurrent", "hybrid"):
            memory.state = mix(memory.state, memory.ahead)
        return []

    def _compute(self, span: Span, shape: int = 0) -> list[int]:
        """Take the entries into memory; what each of them came to."""
        memory = self._memory[span.sequence]
        if memory.ahead:
            self._complete(memory, span)
        states: list[int] = []
        contents: list[int] = []
        for number in span.ids:
            states = [] if number < 0 else [memory.state, *states]
            seen = self._seen(int(number), span.embedding)
            contents.append(self._take(memory, int(number), seen, shape and mix(shape, len(contents))))
        kept = states[:-1][: self.rollback]  # the newest first; what the first row found is not among them
        memory.past[: len(kept)] = kept
        memory.rows = len(states)
        return contents

    def _seen(self, number: int, embedding: Embedding | None) -> int:
        """What an entry is by itself: of a picture, what was encoded, or else its name."""
        if number >= 0 or self.ledger is None:
            return number
        if embedding is not None:
            return int(np.ascontiguousarray(embedding.rows[0]).view(np.int64)[0])
        return picture_number(self.ledger.media(number).digest)

    def _take(self, memory: FakeMemory, number: int, what: int, shape: int) -> int:
        kind = self.capabilities.memory
        seen = [memory.position, what, shape]
        if kind != "recurrent":
            seen += [len(memory.cells), fold(memory.cells)]
        if kind == "window":
            visible = [cell for cell in memory.window if cell.position > memory.position - WINDOW]
            seen += [len(visible), fold(visible)]
        if kind in ("recurrent", "hybrid"):
            seen.append(memory.state)
        content = mix(*seen)
        count, positions = self._size(number)
        cells = [Cell(memory.position + min(i, positions - 1), content + i) for i in range(count)]
        memory.position += positions
        if kind != "recurrent":
            memory.cells += cells
        if kind == "window":
            memory.window = [cell for cell in memory.window + cells if cell.position >= memory.position - WINDOW - PAST]
        if kind in ("recurrent", "hybrid"):
            memory.state = content
        return content

    def logits(self, span: int, row: int) -> NDArray[np.float32]:
        noise = np.random.default_rng(self._logits[span][row]).normal(size=self.vocabulary)
        noise[0] -= 2.5  # answers end, but not at once
        return noise.astype(np.float32)

    def _used(self) -> int:
        return len({id(cell) for memory in self._memory for cell in memory.cells})

    # --- memory

    def contents(self, sequence: int) -> tuple[object, ...]:
        return self._memory[sequence].contents()

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
        if position and memory.ahead and self.capabilities.memory in ("recurrent", "hybrid"):
            return False
        if position == 0 or position == memory.position:
            return position <= memory.position
        if position > memory.position:
            return False
        if self.capabilities.memory in ("recurrent", "hybrid"):
            return memory.position - position <= min(self.rollback, memory.rows - 1)
        if self.capabilities.memory == "window":
            return memory.window[0].position <= max(0, position - WINDOW)
        return True

    def rewind(self, sequence: int, position: int) -> bool:
        return False

    def truncate(self, sequence: int, position: int) -> None:
        if position == 0:
            self._memory[sequence] = FakeMemory()
            return
        memory = self._memory[sequence]
        memory.ahead = 0
        if back := memory.position - position:
            memory.state = memory.past[back - 1] if back <= len(memory.past) else memory.state
            memory.rows = 0  # one rollback for each decode
        memory.cells = [cell for cell in memory.cells if cell.position < position]
        memory.window = [cell for cell in memory.window if cell.position < position]
        memory.position = position

    def copy(self, source: int, target: int, stop: int) -> int:
        assert self._memory[target].position == 0, "a copy needs an empty target"
        memory = self._memory[target] = duplicate(self._memory[source], fresh=not self.capabilities.shared)
        if not self.capabilities.shared:  # a window arrives without what lies before it
            memory.window = [cell for cell in memory.window if cell.position >= memory.position - WINDOW]
        if stop < memory.position:
            self.truncate(target, stop)
        return 0 if self.capabilities.shared else 100 * stop

    def size(self, sequence: int, scope: Scope) -> int:
        return 64 if scope == "partial" else 64 + 100 * len(self._memory[sequence].cells)

    def save(self, sequence: int, scope: Scope, *, keep: bool = False) -> FakeState:
        return FakeState(scope, duplicate(self._memory[sequence], fresh=False), self.size(sequence, scope))

    def load(self, sequence: int, state: State) -> None:
        if not isinstance(state, FakeState):
            raise InvalidState("it is not a fake state")
        saved, memory = duplicate(state.memory, fresh=state.scope == "full"), self._memory[sequence]
        if state.scope == "partial":  # the attention cells are those that are there, whatever they are
            saved.cells = [cell for cell in memory.cells if cell.position < saved.position]
        self._memory[sequence] = FakeMemory()
        limit = self.total_cells - self._used() if self.capabilities.shared else self.capabilities.cells
        if len(saved.cells) > limit:
            raise MemoryFull(len(saved.cells), limit)
        self._memory[sequence] = saved

    @property
    def key(self) -> bytes:
        return f"{self.identity} {self.capabilities.memory} {self.capabilities.shared}".encode()

    def cells(self, state: State, partial: State | None) -> FakeCells:
        assert isinstance(state, FakeState)
        assert state.scope == "full"
        return FakeCells(state.memory.cells)

    def join(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: State | None, position: int
    ) -> FakeState:
        if layout != b"fake" or not all(block.ndim == 2 and block.shape[1] == 16 for block in blocks):
            raise InvalidState("they are not cells of a fake")
        if partial is not None and not isinstance(partial, FakeState):
            raise InvalidState("it is not a fake state")
        numbers = np.concatenate([np.ascontiguousarray(block).view(np.int64) for block in blocks])
        cells = [Cell(int(place), int(content)) for place, content in numbers]
        memory = FakeMemory(cells, position=position)
        if partial is not None:
            memory.window, memory.state = list(partial.memory.window), partial.memory.state
        return FakeState("full", memory, 64 + 100 * len(cells))

    def pack(self, partial: State) -> list[bytes | memoryview]:
        assert isinstance(partial, FakeState)
        memory = partial.memory
        numbers = [memory.position, memory.state]
        for cell in memory.window:
            numbers += [cell.position, cell.content]
        return [struct.pack(f"<{len(numbers)}q", *numbers)]

    def unpack(self, data: memoryview) -> FakeState:
        if len(data) % 16 or not data:
            raise InvalidState("it is not a fake state")
        (position, state), *window = struct.iter_unpack("<qq", data)
        memory = FakeMemory([], [Cell(*one) for one in window], state, position)
        return FakeState("partial", memory, 64)

    def clear(self, sequence: int) -> None:
        self._memory[sequence] = FakeMemory()

    # --- the rest

    def sampler(self, sampling: Sampling) -> FakeSampler:
        return FakeSampler(sampling)

    def piece(self, token: int) -> bytes:
        return bytes([97 + token % 26])

    def interrupt(self) -> None:
        self._interrupted = True

    def uninterrupt(self) -> None:
        self._interrupted = False

    def close(self) -> None:
        self.closed = True
