"""`MtpBackend`: a llama.cpp context together with the context of its MTP heads, whose KV caches move together."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.speculation.mtp.cells import PairedCells, read_first_position, split_cells
from afterglow.engine.speculation.mtp.session import MtpSession
from afterglow.engine.speculation.speculator import INITIAL_ACCEPTANCE_RATE, DraftRequest
from afterglow.engine.types.backend import BackendCells, BackendState, DecodeSpan
from afterglow.errors import AfterglowError, InvalidState
from afterglow.llama import kv_layout as llama_layout
from afterglow.llama import state as llama_state
from afterglow.llama.context import LlamaContext
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.projector import Projector
from afterglow.llama.state import StateScope

MAX_FREE_CATCH_UP_ENTRIES = 16  # computed along with a draft without being counted as catching up
HEAD_STATE_HEADER = struct.Struct("<II")  # of a partial state: bytes of the hidden state and of the heads' window


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpState(llama_state.SavedState):
    """A saved sequence with the state of its heads and the hidden state at its end.

    Of a partial state, the head state is the window of heads that have one. Snapshot files hold only the target's part:
    after loading one, the heads start empty and draft worse for a while.
    """

    head_state: llama_state.SavedState | None = None
    hidden_state: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        head_bytes = 0 if self.head_state is None else self.head_state.nbytes
        hidden_bytes = 0 if self.hidden_state is None else self.hidden_state.nbytes
        return self.data.nbytes + head_bytes + hidden_bytes

    def to_bytes(self) -> bytes:
        return _strip_head_state(self).to_bytes()


class MtpBackend(LlamaBackend):
    """A llama.cpp backend whose MTP heads see everything it computes. The heads draft without adapters."""

    allows_device_copies = False  # the heads copy states, which does not wait for the next decode

    def __init__(
        self,
        context: LlamaContext,
        head_context: LlamaContext,
        *,
        n_draft_max: int,
        projector: Projector | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
    ) -> None:
        super().__init__(context, projector=projector, adapters=adapters)
        # Drafts need the hidden state after every decode.
        self.capabilities = replace(self.capabilities, starts_from_logits=False, computes_ahead=False)
        self.head_context = head_context
        # Layout of the heads' cells, known after the first save; empty if cells cannot be extracted from their state.
        self._head_layout: bytes | None = None
        # Heads with a sliding window drop cells, so a checkpoint has to contain their window.
        self._heads_have_window = head_context.memory.kind == "window"
        self.session = MtpSession(
            context,
            head_context,
            sequences=self.capabilities.sequences,
            n_draft_max=n_draft_max,
            restores_states=not self.capabilities.max_rollback,
        )

    def _list_contexts(self) -> list[LlamaContext]:
        return [self.context, self.head_context]

    def pad_rows(self) -> None:
        """Do nothing: the heads would compute the padding, too."""

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        super().decode(spans)
        if spans[0].embedding is not None:  # the heads read tokens only: they start again after media
            return self.session.begin(spans[0].sequence)
        try:
            self.session.process(self.context.batch)
        except AfterglowError:  # heads must not fail requests: they start again
            for span in spans:
                self.session.begin(span.sequence)

    def truncate(self, sequence: int, position: int) -> None:
        super().truncate(sequence, position)
        self.session.truncate(sequence, position)

    def rewind_for_drafter(self, sequence: int, position: int) -> bool:
        """Drop the last entry of a prefix hit if the hidden state after it is unknown, so that it is recomputed.

        The first of the heads' cells after a hit needs the hidden state before it, which is not kept for every entry.
        The heads keep their cell of the recomputed entry.
        """
        is_known = self.session.get_hidden_state(sequence, position) is not None
        if is_known or not self.can_resume_at(sequence, position - 1):
            return False
        super().truncate(sequence, position - 1)
        self.session.expect_recompute(sequence, position - 1)
        return True

    def copy(self, source: int, target: int, stop: int) -> int:
        nbytes = super().copy(source, target, stop)
        self.session.begin(target)
        catch_up(self.session, [source])
        position_range = self.get_position_range(target)
        end = position_range[1] + 1 if position_range else 0
        try:
            nbytes += self.head_context.memory.copy(source, target, stop=end)
        except AfterglowError:  # heads must not fail requests: they start again
            self.session.begin(target)
        self.session.set_hidden_state(target, end, self.session.get_hidden_state(source, end))
        return nbytes

    def save(self, sequence: int, scope: StateScope, *, long_lived: bool = False) -> BackendState:
        state = self.state.save(sequence, scope, long_lived=long_lived)
        end = 0 if state.positions is None else state.positions[1] + 1
        # The heads' cells stay in their KV cache like attention cells; only a full state, or a window, contains them.
        head_state = None
        if scope == "full" or self._heads_have_window:
            catch_up(self.session, [sequence])
            head_state = self.head_context.state.save(sequence, scope, long_lived=long_lived)
        return _add_head_state(state, state.key, head_state, self.session.get_hidden_state(sequence, end))

    def load(self, sequence: int, state: BackendState) -> None:
        assert isinstance(state, llama_state.SavedState)
        super().load(sequence, _strip_head_state(state))
        end = 0 if state.positions is None else state.positions[1] + 1
        head_state, hidden_state = _get_head_state(state)
        if state.scope == "full":
            self.session.begin(sequence)
            self._load_heads(sequence, head_state)
        else:  # the heads' cells are still present; `head_state` restores a sliding window
            if head_state is not None:
                catch_up(self.session, [sequence])
                position_range = self.head_context.memory.get_position_range(sequence)
                if position_range is not None and position_range[1] + 1 >= end:
                    self._load_heads(sequence, head_state)
            self.session.truncate(sequence, end)
        self.session.set_hidden_state(sequence, end, hidden_state)

    def _load_heads(self, sequence: int, head_state: llama_state.SavedState | None) -> None:
        try:
            if head_state is not None:
                self.head_context.state.load(sequence, head_state)
        except AfterglowError:  # heads must not fail requests: they start again
            self.session.begin(sequence)

    def get_state_size(self, sequence: int, scope: StateScope) -> int:
        head_bytes = 0
        if scope == "full" or self._heads_have_window:
            catch_up(self.session, [sequence])
            head_bytes = self.head_context.state.size(sequence, scope)
        return super().get_state_size(sequence, scope) + head_bytes + 4 * self.context.model.embedding_width

    # --- stored states: the heads' cells are stored next to the model's; a checkpoint has the hidden state at its end,
    # --- and the window of heads that have one

    @property
    def state_key(self) -> bytes:
        return self.state.key + b" with heads and window " + self.head_context.state.key

    def extract_cells(self, state: BackendState, partial: BackendState | None) -> BackendCells | None:
        assert isinstance(state, MtpState)
        assert partial is None or isinstance(partial, llama_state.SavedState)
        partial_bytes = 0 if partial is None else len(partial.data) - llama_layout.HEADER_BYTES
        model_cells = llama_layout.parse_cells(state.data, partial_bytes)
        head_cells = None
        if state.head_state is not None and state.head_state.positions is not None:
            window, _ = _get_head_state(partial)
            window_bytes = 0 if window is None else len(window.data) - llama_layout.HEADER_BYTES
            head_cells = llama_layout.parse_cells(state.head_state.data, window_bytes)
            if self._head_layout is None:
                self._head_layout = b"" if head_cells is None else head_cells.layout
        if model_cells is None or self._head_layout is None:
            return None
        return PairedCells(model_cells, head_cells, self._head_layout)

    def assemble_state(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: BackendState | None, position: int
    ) -> BackendState:
        assert partial is None or isinstance(partial, llama_state.SavedState)
        model_layout, model_rows, head_layout, head_rows = split_cells(layout, blocks)
        model_partial = None if partial is None else _strip_head_state(partial)
        state = super().assemble_state(model_layout, model_rows, model_partial, position)
        window, hidden_state = _get_head_state(partial)
        head_state = None
        if head_rows and (window is not None or not self._heads_have_window):
            window_data = None if window is None else window.data
            data = llama_layout.join_cells(llama_layout.KVLayout.unpack(head_layout), head_rows, window_data)
            positions = read_first_position(head_rows[0]), position - 1
            head_state = llama_state.SavedState(
                key=self.head_context.state.key, scope="full", positions=positions, data=data
            )
        return _add_head_state(state, self.state.key, head_state, hidden_state)

    def serialize_state(self, partial: BackendState) -> list[bytes | memoryview]:
        assert isinstance(partial, llama_state.SavedState)
        head_state, hidden_state = _get_head_state(partial)
        hidden_bytes = b"" if hidden_state is None else hidden_state.tobytes()
        window = [] if head_state is None else super().serialize_state(head_state)
        return [
            HEAD_STATE_HEADER.pack(len(hidden_bytes), sum(map(len, window))),
            hidden_bytes,
            *window,
            *super().serialize_state(_strip_head_state(partial)),
        ]

    def deserialize_state(self, data: memoryview) -> BackendState:
        hidden_bytes, window_bytes = (
            HEAD_STATE_HEADER.unpack_from(data) if len(data) >= HEAD_STATE_HEADER.size else (0, 0)
        )
        end = HEAD_STATE_HEADER.size + hidden_bytes
        if len(data) < end + window_bytes or hidden_bytes % 4:
            raise InvalidState("a partial state is truncated")
        state = super().deserialize_state(data[end + window_bytes :])
        head_state = super().deserialize_state(data[end : end + window_bytes]) if window_bytes else None
        assert isinstance(head_state, llama_state.SavedState | None)
        if head_state is not None:
            head_state = replace(head_state, key=self.head_context.state.key)
        hidden = data[HEAD_STATE_HEADER.size : end]
        hidden_state = np.frombuffer(hidden, dtype=np.float32).copy() if hidden_bytes else None
        return _add_head_state(state, self.state.key, head_state, hidden_state)

    def clear(self, sequence: int) -> None:
        super().clear(sequence)
        self.session.begin(sequence)


def catch_up(session: MtpSession, sequences: Sequence[int]) -> bool:
    """Let the heads compute what they have not yet. If they cannot, they start again: return False."""
    try:
        session.catch_up(sequences)
        return True
    except AfterglowError:
        for sequence in sequences:
            session.begin(sequence)
        return False


def _add_head_state(
    state: BackendState, key: bytes, head_state: llama_state.SavedState | None, hidden_state: NDArray[np.float32] | None
) -> MtpState:
    assert isinstance(state, llama_state.SavedState)
    return MtpState(
        key=key,
        scope=state.scope,
        positions=state.positions,
        data=state.data,
        head_state=head_state,
        hidden_state=hidden_state,
    )


def _strip_head_state(state: llama_state.SavedState) -> llama_state.SavedState:
    """Return the part of a state that the target's context saved."""
    return llama_state.SavedState(key=state.key, scope=state.scope, positions=state.positions, data=state.data)


def _get_head_state(
    state: llama_state.SavedState | None,
) -> tuple[llama_state.SavedState | None, NDArray[np.float32] | None]:
    """Return the head state and the hidden state of a saved state. A state from a snapshot file has neither."""
    return (state.head_state, state.hidden_state) if isinstance(state, MtpState) else (None, None)


class MtpDrafter:
    """Drafter that runs the MTP heads, for all jobs in one batch."""

    name = "mtp"

    def __init__(self, session: MtpSession) -> None:
        self._session = session

    def can_draft(self, running: RunningJob) -> bool:
        return True

    def get_draft_kind(self, running: RunningJob) -> str:
        return self.name

    def estimate_acceptance(self, running: RunningJob) -> float:
        return INITIAL_ACCEPTANCE_RATE

    def estimate_catch_up_entries(self, running: RunningJob) -> float:
        info = self._session.target.model.info
        backlog = self._session.count_backlog(running.sequence.seq_id)
        return backlog * info.mtp_layer_count / max(info.layer_count, 1) if backlog > MAX_FREE_CATCH_UP_ENTRIES else 0.0

    def catch_up(self, jobs: Sequence[RunningJob]) -> None:
        catch_up(self._session, [running.sequence.seq_id for running in jobs])

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        n_draft_max = self._session.settings.n_draft_max
        last_tokens: dict[int, int] = {}
        limits: dict[int, int] = {}
        for running, limit in draft_requests:
            last_tokens[running.sequence.seq_id] = running.job.generated[-1]
            limits[running.sequence.seq_id] = min(limit, n_draft_max)
        try:
            return list(self._session.draft(last_tokens, limits).values())
        except AfterglowError:  # e.g. no cells are free
            for sequence in last_tokens:
                self._session.begin(sequence)
            return [[] for _ in draft_requests]

    def release(self, job: Job) -> None:
        """Do nothing: the heads' KV cache belongs to sequences, not to jobs."""

    def run_idle_task(self) -> bool:
        return False

    def close(self) -> None:
        self._session.draft_context.close()
