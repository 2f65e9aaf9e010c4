"""A llama.cpp context with the MTP heads of its model beside it: one backend, whose two memories move together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Cells, Scope, Span, State
from afterglow.engine.drafting import Wish
from afterglow.engine.job import Job
from afterglow.engine.llama import LlamaBackend
from afterglow.engine.mtp import MtpSession
from afterglow.errors import AfterglowError
from afterglow.llama import state as llama_state
from afterglow.llama.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpState(llama_state.State):
    """A saved sequence, what the heads know of it, and the hidden state at its end.

    Wherever it goes as bytes only the first part goes: the heads then begin anew, and guess worse for a while.
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

    def __init__(self, context: Context, heads: Context, sequences: int | None = None, *, n_draft_max: int) -> None:
        super().__init__(context, sequences)
        self.heads = heads
        self.session = MtpSession(
            context,
            heads,
            sequences=self.capabilities.sequences,
            n_draft_max=n_draft_max,
            replays=not self.capabilities.max_rollback,
        )

    def decode(self, spans: Sequence[Span]) -> None:
        super().decode(spans)
        try:
            self.session.process()
        except AfterglowError:  # the heads only guess: what they do not know they learn again
            for span in spans:
                self.session.begin(span.sequence)

    def truncate(self, sequence: int, position: int) -> None:
        super().truncate(sequence, position)
        self.session.truncated(sequence, position)

    def copy(self, source: int, target: int, stop: int) -> int:
        nbytes = super().copy(source, target, stop)
        self.session.begin(target)
        self.session.compute([source])
        held = self.held(target)
        end = held[1] + 1 if held else 0
        nbytes += self.heads.memory.copy(source, target, stop=end)
        self.session.remember(target, end, self.session.row(source, end))
        return nbytes

    def save(self, sequence: int, scope: Scope) -> State:
        state = self.context.state.save(sequence, scope)
        end = 0 if state.positions is None else state.positions[1] + 1
        # The heads' cells stay where attention cells do; only a state that is complete has to bring them along.
        heads = None
        if scope == "full":
            self.session.compute([sequence])
            heads = self.heads.state.save(sequence)
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
        if state.scope == "partial":
            self.session.truncated(sequence, end)
        else:
            self.session.begin(sequence)
        if isinstance(state, MtpState):
            if state.heads is not None:
                self.heads.state.load(sequence, state.heads)
            self.session.remember(sequence, end, state.row)

    def size(self, sequence: int, scope: Scope) -> int:
        heads = 0
        if scope == "full":
            self.session.compute([sequence])
            heads = self.heads.state.size(sequence, "full")
        return super().size(sequence, scope) + heads + 4 * self.context.model.embedding_width

    def cells(self, state: State, partial: State | None) -> Cells | None:
        assert isinstance(state, llama_state.State)
        assert partial is None or isinstance(partial, llama_state.State)
        return super().cells(_plain(state), None if partial is None else _plain(partial))

    def clear(self, sequence: int) -> None:
        super().clear(sequence)
        self.session.begin(sequence)


def _plain(state: llama_state.State) -> llama_state.State:
    """The part of a state that the target's context saved."""
    return llama_state.State(key=state.key, scope=state.scope, positions=state.positions, data=state.data)


class MtpDrafter:
    """Lets the heads guess for all jobs in one batch."""

    name = "mtp"

    def __init__(self, session: MtpSession) -> None:
        self._session = session

    def ready(self, job: Job) -> bool:
        return True

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

    def close(self) -> None:
        self._session.draft_context.close()
