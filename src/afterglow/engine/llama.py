"""Makes a llama.cpp context the engine's backend: rows out of spans, and the sequence operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Capabilities, Sampler, Scope, Span, State
from afterglow.engine.constraint import Words
from afterglow.llama import state as llama_state
from afterglow.llama.context import Context
from afterglow.llama.devices import devices
from afterglow.llama.sampler import SamplerChain
from afterglow.llama.sampling import Sampling


class LlamaBackend:
    """The engine's memory on llama.cpp. Unless it is made to own its model, whoever made the context closes it."""

    owning = False

    def __init__(self, context: Context, sequences: int | None = None) -> None:
        """Use the first `sequences` of the context, or all."""
        info, settings = context.model.info, context.settings
        assert info.memory != "none"
        self.context = context
        self.capabilities = Capabilities(
            memory=info.memory,
            sequences=context.sequences if sequences is None else sequences,
            cells=context.cells_per_sequence,
            batch_cells=context.batch.capacity,
            ubatch_cells=context.ubatch,
            outputs=context.max_outputs,
            shared=settings.unified,
            interruptible=all(device.kind == "cpu" for device in devices()) or not context.model.settings.gpu_layers,
            max_rollback=_max_rollback(context),
        )
        self.vocabulary = context.model.vocabulary.size
        self.ends = context.model.vocabulary.ends
        self.words: Words = context.model.vocabulary
        self._first_rows: list[int] = []

    def decode(self, spans: Sequence[Span]) -> None:
        batch = self.context.batch
        batch.clear()
        self._first_rows = []
        for span in spans:
            self._first_rows.append(batch.count)
            if len(span.ids) == 1:
                batch.add_one(
                    int(span.ids[0]), position=span.position, sequence=span.sequence, output=bool(span.outputs)
                )
            else:
                batch.add(
                    np.asarray(span.ids, dtype=np.int32),
                    position=span.position,
                    sequence=span.sequence,
                    outputs=span.outputs,
                )
        self.context.decode()

    def logits(self, span: int, row: int) -> NDArray[np.float32]:
        return self.context.logits(self._first_rows[span] + row)

    def sampler(self, sampling: Sampling) -> Sampler:
        return SamplerChain(self.context.model, sampling)

    def piece(self, token: int) -> bytes:
        return self.context.model.vocabulary.piece(token, special=False)

    def held(self, sequence: int) -> tuple[int, int] | None:
        return self.context.memory.positions(sequence)

    def resumable(self, sequence: int, position: int) -> bool:
        return self.context.memory.resumable(sequence, position)

    def truncate(self, sequence: int, position: int) -> None:
        removed = self.context.memory.remove(sequence, start=position)
        assert removed, f"sequence {sequence} was not resumable at {position}"

    def copy(self, source: int, target: int, stop: int) -> int:
        return self.context.memory.copy(source, target, stop=stop if self.capabilities.forks_anywhere else None)

    def save(self, sequence: int, scope: Scope) -> State:
        return self.context.state.save(sequence, scope)

    def load(self, sequence: int, state: State) -> None:
        assert isinstance(state, llama_state.State)
        self.context.state.load(sequence, state)

    def clear(self, sequence: int) -> None:
        self.context.memory.remove(sequence)

    def interrupt(self) -> None:
        self.context.interrupt()

    def uninterrupt(self) -> None:
        self.context.uninterrupt()

    def close(self) -> None:
        if self.owning:
            self.context.model.close()


def _max_rollback(context: Context) -> int:
    """Entries that a sequence can drop after a decode. A window keeps what one ubatch more would need."""
    match context.model.info.memory:
        case "attention":
            return context.cells_per_sequence
        case "window":
            return context.cells_per_sequence if context.settings.full_window else context.ubatch
    return context.max_rollback
