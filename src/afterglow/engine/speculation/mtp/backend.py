"""A llama.cpp context with the MTP heads of its model beside it: one backend, whose two memories move together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.scheduling.job import Job
from afterglow.engine.speculation.mtp.cells import PairedCells, read_first_position, split_cells
from afterglow.engine.speculation.mtp.session import MtpSession
from afterglow.engine.speculation.speculator import INITIAL_ACCEPTANCE_RATE, DraftRequest
from afterglow.engine.types.backend import BackendCells, BackendState, DecodeSpan, StateScope
from afterglow.errors import AfterglowError, InvalidState
from afterglow.llama import kv_layout as llama_layout
from afterglow.llama import state as llama_state
from afterglow.llama.context import LlamaContext
from afterglow.llama.projector import Projector

MAX_FREE_CATCH_UP_ENTRIES = 16  # entries that are computed along with a guess
HEAD_STATE_HEADER = struct.Struct(
    "<II"
)  # bytes of the hidden state and of the heads' window that come with a partial state


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpState(llama_state.SavedState):
    """A saved sequence, what the heads know of it (of a partial one: the window of heads that have one), and the
    hidden state at its end.

    In a file of a snapshot only the first part goes: the heads then begin anew, and guess worse for a while.
    """

    head_state: llama_state.SavedState | None = None
    hidden_state: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        more = (0 if self.head_state is None else self.head_state.nbytes) + (
            0 if self.hidden_state is None else self.hidden_state.nbytes
        )
        return self.data.nbytes + more

    def to_bytes(self) -> bytes:
        return _strip_head_state(self).to_bytes()


class MtpBackend(LlamaBackend):
    """The engine's memory on llama.cpp, with heads that see everything it computes."""

    def __init__(
        self,
        context: LlamaContext,
        head_context: LlamaContext,
        sequences: int | None = None,
        *,
        n_draft_max: int,
        projector: Projector | None = None,
    ) -> None:
        super().__init__(context, sequences, projector=projector)
        self.head_context = head_context
        # How the heads' cells are written, once some were saved; empty where they cannot be told from their state.
        self._head_layout: bytes | None = None
        self._heads_have_window = (
            head_context.memory.kind == "window"
        )  # the heads forget: a checkpoint has to bring what they see
        self.session = MtpSession(
            context,
            head_context,
            sequences=self.capabilities.sequences,
            n_draft_max=n_draft_max,
            restores_states=not self.capabilities.max_rollback,
        )

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
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
        self.session.truncate(sequence, position)

    def rewind_for_drafter(self, sequence: int, position: int) -> bool:
        """The first of the heads' cells behind a hit needs the hidden state before it, which is not kept for every
        entry of a sequence: one entry more is computed. The heads keep what they know of it."""
        if self.session.get_hidden_state(sequence, position) is not None or not self.can_resume_at(
            sequence, position - 1
        ):
            return False
        super().truncate(sequence, position - 1)
        self.session.expect_recompute(sequence, position - 1)
        return True

    def copy(self, source: int, target: int, stop: int) -> int:
        nbytes = super().copy(source, target, stop)
        self.session.begin(target)
        self.session.catch_up([source])
        held = self.get_position_range(target)
        end = held[1] + 1 if held else 0
        nbytes += self.head_context.memory.copy(source, target, stop=end)
        self.session.set_hidden_state(target, end, self.session.get_hidden_state(source, end))
        return nbytes

    def save(self, sequence: int, scope: StateScope, *, long_lived: bool = False) -> BackendState:
        state = self.context.state.save(sequence, scope, long_lived=long_lived)
        end = 0 if state.positions is None else state.positions[1] + 1
        # The heads' cells stay where attention cells do; only a state that is complete has to bring them along.
        heads = None
        if scope == "full" or self._heads_have_window:
            self.session.catch_up([sequence])
            heads = self.head_context.state.save(sequence, scope, long_lived=long_lived)
        return MtpState(
            key=state.key,
            scope=state.scope,
            positions=state.positions,
            data=state.data,
            head_state=heads,
            hidden_state=self.session.get_hidden_state(sequence, end),
        )

    def load(self, sequence: int, state: BackendState) -> None:
        assert isinstance(state, llama_state.SavedState)
        super().load(sequence, _strip_head_state(state))
        end = 0 if state.positions is None else state.positions[1] + 1
        heads, row = _get_head_state(state)
        if state.scope == "full":
            self.session.begin(sequence)
            self._load_heads(sequence, heads)
        else:
            self._rewind_heads(sequence, end, heads)
        self.session.set_hidden_state(sequence, end, row)

    def _rewind_heads(self, sequence: int, end: int, head_state: llama_state.SavedState | None) -> None:
        """Make the heads know what they knew at `end`. Their cells are still there; what is not, a `window` brings."""
        if head_state is not None:
            self.session.catch_up([sequence])
            held = self.head_context.memory.get_position_range(sequence)
            if held is not None and held[1] + 1 >= end:
                self._load_heads(sequence, head_state)
        self.session.truncate(sequence, end)

    def _load_heads(self, sequence: int, head_state: llama_state.SavedState | None) -> None:
        try:
            if head_state is not None:
                self.head_context.state.load(sequence, head_state)
        except AfterglowError:  # the heads only guess: what they do not know they learn again
            self.session.begin(sequence)

    def get_state_size(self, sequence: int, scope: StateScope) -> int:
        heads = 0
        if scope == "full" or self._heads_have_window:
            self.session.catch_up([sequence])
            heads = self.head_context.state.size(sequence, scope)
        return super().get_state_size(sequence, scope) + heads + 4 * self.context.model.embedding_width

    # --- what is stored: the heads' cells lie beside the model's; a checkpoint brings the hidden state at its end, and
    # --- the window of heads that have one

    @property
    def state_key(self) -> bytes:
        return self.context.state.key + b" with heads and window " + self.head_context.state.key

    def extract_cells(self, state: BackendState, partial: BackendState | None) -> BackendCells | None:
        assert isinstance(state, MtpState)
        assert partial is None or isinstance(partial, llama_state.SavedState)
        own = llama_layout.parse_cells(
            state.data, 0 if partial is None else len(partial.data) - llama_layout.HEADER_BYTES
        )
        known = state.head_state is not None and state.head_state.positions is not None
        window, _ = _get_head_state(partial)
        rest = 0 if window is None else len(window.data) - llama_layout.HEADER_BYTES
        heads = (
            llama_layout.parse_cells(state.head_state.data, rest) if state.head_state is not None and known else None
        )
        if self._head_layout is None and known:
            self._head_layout = b"" if heads is None else heads.layout
        return None if own is None or self._head_layout is None else PairedCells(own, heads, self._head_layout)

    def assemble_state(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: BackendState | None, position: int
    ) -> BackendState:
        assert partial is None or isinstance(partial, llama_state.SavedState)
        own, cells, beside, rows = split_cells(layout, blocks)
        state = super().assemble_state(own, cells, None if partial is None else _strip_head_state(partial), position)
        assert isinstance(state, llama_state.SavedState)
        window, row = _get_head_state(partial)
        heads = None
        if rows and (window is not None or not self._heads_have_window):
            rest = None if window is None else window.data
            data = llama_layout.join_cells(llama_layout.KVLayout.unpack(beside), rows, rest)
            span = read_first_position(rows[0]), position - 1
            heads = llama_state.SavedState(key=self.head_context.state.key, scope="full", positions=span, data=data)
        return MtpState(
            key=self.context.state.key,
            scope=state.scope,
            positions=state.positions,
            data=state.data,
            head_state=heads,
            hidden_state=row,
        )

    def serialize_state(self, partial: BackendState) -> list[bytes | memoryview]:
        assert isinstance(partial, llama_state.SavedState)
        heads, row = _get_head_state(partial)
        packed = b"" if row is None else row.tobytes()
        window = [] if heads is None else super().serialize_state(heads)
        return [
            HEAD_STATE_HEADER.pack(len(packed), sum(map(len, window))),
            packed,
            *window,
            *super().serialize_state(_strip_head_state(partial)),
        ]

    def deserialize_state(self, data: memoryview) -> BackendState:
        row, window = HEAD_STATE_HEADER.unpack_from(data) if len(data) >= HEAD_STATE_HEADER.size else (0, 0)
        end = HEAD_STATE_HEADER.size + row
        if len(data) < end + window or row % 4:
            raise InvalidState("a partial state is cut off")
        state = super().deserialize_state(data[end + window :])
        heads = super().deserialize_state(data[end : end + window]) if window else None
        assert isinstance(state, llama_state.SavedState)
        assert isinstance(heads, llama_state.SavedState | None)
        return MtpState(
            key=self.context.state.key,
            scope="partial",
            positions=state.positions,
            data=state.data,
            head_state=None if heads is None else replace(heads, key=self.head_context.state.key),
            hidden_state=np.frombuffer(data[HEAD_STATE_HEADER.size : end], dtype=np.float32).copy() if row else None,
        )

    def clear(self, sequence: int) -> None:
        super().clear(sequence)
        self.session.begin(sequence)


def _strip_head_state(state: llama_state.SavedState) -> llama_state.SavedState:
    """The part of a state that the target's context saved."""
    return llama_state.SavedState(key=state.key, scope=state.scope, positions=state.positions, data=state.data)


def _get_head_state(
    state: llama_state.SavedState | None,
) -> tuple[llama_state.SavedState | None, NDArray[np.float32] | None]:
    """What a state brings for the heads, and the hidden state at its end; one out of a file has neither."""
    return (state.head_state, state.hidden_state) if isinstance(state, MtpState) else (None, None)


class MtpDrafter:
    """Lets the heads guess for all jobs in one batch."""

    name = "mtp"

    def __init__(self, session: MtpSession) -> None:
        self._session = session

    def can_draft(self, job: Job) -> bool:
        return True

    def get_draft_kind(self, job: Job) -> str:
        return self.name

    def estimate_acceptance(self, job: Job) -> float:
        return INITIAL_ACCEPTANCE_RATE

    def estimate_catch_up_entries(self, job: Job) -> float:
        assert job.sequence is not None
        info = self._session.target.model.info
        waiting = self._session.count_backlog(job.sequence.seq_id)
        return waiting * info.mtp_layer_count / max(info.layer_count, 1) if waiting > MAX_FREE_CATCH_UP_ENTRIES else 0.0

    def catch_up(self, jobs: Sequence[Job]) -> None:
        self._session.catch_up([job.sequence.seq_id for job in jobs if job.sequence is not None])

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        most = self._session.settings.n_draft_max
        last: dict[int, int] = {}
        limits: dict[int, int] = {}
        for job, limit in draft_requests:
            assert job.sequence is not None
            last[job.sequence.seq_id] = job.generated[-1]
            limits[job.sequence.seq_id] = min(limit, most)
        return list(self._session.draft(last, limits).values())

    def release(self, job: Job) -> None:
        """Nothing is kept of a job: memory belongs to sequences."""

    def run_idle_task(self) -> bool:
        return False

    def close(self) -> None:
        self._session.draft_context.close()
