"""A llama.cpp context with the MTP heads of its model beside it: one backend, whose two memories move together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Cells, Scope, Span, State
from afterglow.engine.drafting import FIRST_ESTIMATE, Wish
from afterglow.engine.job import Job
from afterglow.engine.llama import LlamaBackend
from afterglow.engine.mtp import MtpSession
from afterglow.engine.paired import PairedCells, divide, first_position
from afterglow.errors import AfterglowError, InvalidState
from afterglow.llama import layout as llama_layout
from afterglow.llama import state as llama_state
from afterglow.llama.context import Context
from afterglow.llama.projector import Projector

FEW = 16  # entries that are computed along with a guess
BESIDE = struct.Struct("<II")  # bytes of the hidden state and of the heads' window that come with a partial state


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpState(llama_state.State):
    """A saved sequence, what the heads know of it (of a partial one: the window of heads that have one), and the
    hidden state at its end.

    In a file of a snapshot only the first part goes: the heads then begin anew, and guess worse for a while.
    """

    heads: llama_state.State | None = None
    row: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        more = (0 if self.heads is None else self.heads.nbytes) + (0 if self.row is None else self.row.nbytes)
        return self.data.nbytes + more

    def to_bytes(self) -> bytes:
        return _plain(self).to_bytes()


class MtpBackend(LlamaBackend):
    """The engine's memory on llama.cpp, with heads that see everything it computes."""

    def __init__(
        self,
        context: Context,
        heads: Context,
        sequences: int | None = None,
        *,
        n_draft_max: int,
        projector: Projector | None = None,
    ) -> None:
        super().__init__(context, sequences, projector=projector)
        self.heads = heads
        # How the heads' cells are written, once some were saved; empty where they cannot be told from their state.
        self._heads_layout: bytes | None = None
        self._windowed = heads.memory.kind == "window"  # the heads forget: a checkpoint has to bring what they see
        self.session = MtpSession(
            context,
            heads,
            sequences=self.capabilities.sequences,
            n_draft_max=n_draft_max,
            replays=not self.capabilities.max_rollback,
        )

    def decode(self, spans: Sequence[Span]) -> None:
        super().decode(spans)
        if spans[0].embedding is not None:  # the heads read tokens: they begin anew behind it
            return self.session.begin(spans[0].sequence)
        try:
            self.session.process()
        except AfterglowError:  # the heads only guess: what they do not know they learn again
            for span in spans:
                self.session.begin(span.sequence)

    def truncate(self, sequence: int, position: int) -> None:
        super().truncate(sequence, position)
        self.session.truncated(sequence, position)

    def rewind(self, sequence: int, position: int) -> bool:
        """The first of the heads' cells behind a hit needs the hidden state before it, which is not kept for every
        entry of a sequence: one entry more is computed. The heads keep what they know of it."""
        if self.session.row(sequence, position) is not None or not self.resumable(sequence, position - 1):
            return False
        super().truncate(sequence, position - 1)
        self.session.repeats(sequence, position - 1)
        return True

    def copy(self, source: int, target: int, stop: int) -> int:
        nbytes = super().copy(source, target, stop)
        self.session.begin(target)
        self.session.compute([source])
        held = self.held(target)
        end = held[1] + 1 if held else 0
        nbytes += self.heads.memory.copy(source, target, stop=end)
        self.session.remember(target, end, self.session.row(source, end))
        return nbytes

    def save(self, sequence: int, scope: Scope, *, keep: bool = False) -> State:
        state = self.context.state.save(sequence, scope, keep=keep)
        end = 0 if state.positions is None else state.positions[1] + 1
        # The heads' cells stay where attention cells do; only a state that is complete has to bring them along.
        heads = None
        if scope == "full" or self._windowed:
            self.session.compute([sequence])
            heads = self.heads.state.save(sequence, scope, keep=keep)
        return MtpState(
            key=state.key,
            scope=state.scope,
            positions=state.positions,
            data=state.data,
            heads=heads,
            row=self.session.row(sequence, end),
        )

    def load(self, sequence: int, state: State) -> None:
        assert isinstance(state, llama_state.State)
        super().load(sequence, _plain(state))
        end = 0 if state.positions is None else state.positions[1] + 1
        heads, row = _beside(state)
        if state.scope == "full":
            self.session.begin(sequence)
            self._load_heads(sequence, heads)
        else:
            self._take_back(sequence, end, heads)
        self.session.remember(sequence, end, row)

    def _take_back(self, sequence: int, end: int, window: llama_state.State | None) -> None:
        """Make the heads know what they knew at `end`. Their cells are still there; what is not, a `window` brings."""
        if window is not None:
            self.session.compute([sequence])
            held = self.heads.memory.positions(sequence)
            if held is not None and held[1] + 1 >= end:
                self._load_heads(sequence, window)
        self.session.truncated(sequence, end)

    def _load_heads(self, sequence: int, state: llama_state.State | None) -> None:
        try:
            if state is not None:
                self.heads.state.load(sequence, state)
        except AfterglowError:  # the heads only guess: what they do not know they learn again
            self.session.begin(sequence)

    def size(self, sequence: int, scope: Scope) -> int:
        heads = 0
        if scope == "full" or self._windowed:
            self.session.compute([sequence])
            heads = self.heads.state.size(sequence, scope)
        return super().size(sequence, scope) + heads + 4 * self.context.model.embedding_width

    # --- what is stored: the heads' cells lie beside the model's; a checkpoint brings the hidden state at its end, and
    # --- the window of heads that have one

    @property
    def key(self) -> bytes:
        return self.context.state.key + b" with heads and window " + self.heads.state.key

    def cells(self, state: State, partial: State | None) -> Cells | None:
        assert isinstance(state, MtpState)
        assert partial is None or isinstance(partial, llama_state.State)
        own = llama_layout.cut(state.data, 0 if partial is None else len(partial.data) - llama_layout.HEADER)
        known = state.heads is not None and state.heads.positions is not None
        window, _ = _beside(partial)
        rest = 0 if window is None else len(window.data) - llama_layout.HEADER
        heads = llama_layout.cut(state.heads.data, rest) if state.heads is not None and known else None
        if self._heads_layout is None and known:
            self._heads_layout = b"" if heads is None else heads.layout
        return None if own is None or self._heads_layout is None else PairedCells(own, heads, self._heads_layout)

    def join(self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: State | None, position: int) -> State:
        assert partial is None or isinstance(partial, llama_state.State)
        own, cells, beside, rows = divide(layout, blocks)
        state = super().join(own, cells, None if partial is None else _plain(partial), position)
        assert isinstance(state, llama_state.State)
        window, row = _beside(partial)
        heads = None
        if rows and (window is not None or not self._windowed):
            rest = None if window is None else window.data
            data = llama_layout.join(llama_layout.Layout.unpack(beside), rows, rest)
            span = first_position(rows[0]), position - 1
            heads = llama_state.State(key=self.heads.state.key, scope="full", positions=span, data=data)
        return MtpState(
            key=self.context.state.key,
            scope=state.scope,
            positions=state.positions,
            data=state.data,
            heads=heads,
            row=row,
        )

    def pack(self, partial: State) -> list[bytes | memoryview]:
        assert isinstance(partial, llama_state.State)
        heads, row = _beside(partial)
        packed = b"" if row is None else row.tobytes()
        window = [] if heads is None else super().pack(heads)
        return [BESIDE.pack(len(packed), sum(map(len, window))), packed, *window, *super().pack(_plain(partial))]

    def unpack(self, data: memoryview) -> State:
        row, window = BESIDE.unpack_from(data) if len(data) >= BESIDE.size else (0, 0)
        end = BESIDE.size + row
        if len(data) < end + window or row % 4:
            raise InvalidState("a partial state is cut off")
        state = super().unpack(data[end + window :])
        heads = super().unpack(data[end : end + window]) if window else None
        assert isinstance(state, llama_state.State)
        assert isinstance(heads, llama_state.State | None)
        return MtpState(
            key=self.context.state.key,
            scope="partial",
            positions=state.positions,
            data=state.data,
            heads=None if heads is None else replace(heads, key=self.heads.state.key),
            row=np.frombuffer(data[BESIDE.size : end], dtype=np.float32).copy() if row else None,
        )

    def clear(self, sequence: int) -> None:
        super().clear(sequence)
        self.session.begin(sequence)


def _plain(state: llama_state.State) -> llama_state.State:
    """The part of a state that the target's context saved."""
    return llama_state.State(key=state.key, scope=state.scope, positions=state.positions, data=state.data)


def _beside(state: llama_state.State | None) -> tuple[llama_state.State | None, NDArray[np.float32] | None]:
    """What a state brings for the heads, and the hidden state at its end; one out of a file has neither."""
    return (state.heads, state.row) if isinstance(state, MtpState) else (None, None)


class MtpDrafter:
    """Lets the heads guess for all jobs in one batch."""

    name = "mtp"

    def __init__(self, session: MtpSession) -> None:
        self._session = session

    def ready(self, job: Job) -> bool:
        return True

    def kind(self, job: Job) -> str:
        return self.name

    def estimate(self, job: Job) -> float:
        return FIRST_ESTIMATE

    def behind(self, job: Job) -> float:
        assert job.sequence is not None
        info = self._session.target.model.info
        waiting = self._session.waiting(job.sequence.number)
        return waiting * info.mtp_layers / max(info.layers, 1) if waiting > FEW else 0.0

    def catch_up(self, jobs: Sequence[Job]) -> None:
        self._session.compute([job.sequence.number for job in jobs if job.sequence is not None])

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        most = self._session.settings.n_draft_max
        last: dict[int, int] = {}
        limits: dict[int, int] = {}
        for job, limit in wishes:
            assert job.sequence is not None
            last[job.sequence.number] = job.generated[-1]
            limits[job.sequence.number] = min(limit, most)
        return list(self._session.draft(last, limits).values())

    def forget(self, job: Job) -> None:
        """Nothing is kept of a job: memory belongs to sequences."""

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        self._session.draft_context.close()
