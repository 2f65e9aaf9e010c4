"""Makes a llama.cpp context the engine's backend: rows out of spans, and the sequence operations."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Capabilities, Cells, Sampler, Scope, Span, State
from afterglow.engine.constraint import Words
from afterglow.engine.pictures import Encodes
from afterglow.errors import InvalidState
from afterglow.llama import layout as llama_layout
from afterglow.llama import pages
from afterglow.llama import state as llama_state
from afterglow.llama.batch import EmbeddingBatch
from afterglow.llama.context import Context
from afterglow.llama.devices import devices
from afterglow.llama.projector import Embedding, Projector
from afterglow.llama.sampler import SamplerChain
from afterglow.llama.sampling import Sampling

POSITIONS = struct.Struct("<ii")  # the first and the last of a partial state
MANY = 6  # sequences of one row each that are sooner added together


class LlamaBackend:
    """The engine's memory on llama.cpp. Unless it is made to own its model, whoever made the context closes it."""

    owning = False

    def __init__(self, context: Context, sequences: int | None = None, *, projector: Projector | None = None) -> None:
        """Use the first `sequences` of the context, or all. With a `projector`, prompts may hold pictures or sound."""
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
            media=frozenset() if projector is None else projector.kinds,
            max_rollback=_max_rollback(context),
            replays=info.memory in ("recurrent", "hybrid"),
        )
        self.vocabulary = context.model.vocabulary.size
        self.ends = context.model.vocabulary.ends
        self.words: Words = context.model.vocabulary
        self.projector: Encodes | None = projector
        self._first_rows: list[int] = []

    def decode(self, spans: Sequence[Span]) -> None:
        if spans[0].embedding is not None:
            assert len(spans) == 1, "a picture has a decode for itself"
            return self._decode_embedding(spans[0], spans[0].embedding)
        self.context.batch.clear()
        # By sequence: llama.cpp computes streams together only where their numbers follow each other in the batch.
        # On a GPU, 8 streams in another order took 4 times as long.
        order = sorted(range(len(spans)), key=lambda index: spans[index].sequence)
        if len(spans) >= MANY and all([len(span.ids) == 1 for span in spans]):
            self._add_each(spans, order)
        else:
            self._add(spans, order)
        self.context.decode()

    def _add(self, spans: Sequence[Span], order: list[int]) -> None:
        batch = self.context.batch
        self._first_rows = [0] * len(spans)
        for index in order:
            span = spans[index]
            self._first_rows[index] = batch.count
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

    def _add_each(self, spans: Sequence[Span], order: list[int]) -> None:
        ordered = [spans[index] for index in order]
        self.context.batch.add_each(
            [int(span.ids[0]) for span in ordered],
            positions=[span.position for span in ordered],
            sequences=[span.sequence for span in ordered],
            outputs=[span.outputs for span in ordered],
        )
        self._first_rows = [0] * len(spans)
        for row, index in enumerate(order):
            self._first_rows[index] = row

    def _decode_embedding(self, span: Span, embedding: Embedding) -> None:
        """Compute rows of a picture or a sound."""
        places = span.position + embedding.offsets
        batch = EmbeddingBatch(
            embedding.rows,
            places.T if self.context.model.info.mrope else places[:, 0],
            sequence=span.sequence,
            output=span.outputs > 0,
        )
        self.context.decode_rows(batch, causal=not embedding.whole)
        self._first_rows = [batch.count - 1]

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

    def rewind(self, sequence: int, position: int) -> bool:
        return False  # nobody guesses here

    def copy(self, source: int, target: int, stop: int) -> int:
        return self.context.memory.copy(source, target, stop=stop if self.capabilities.forks_anywhere else None)

    def size(self, sequence: int, scope: Scope) -> int:
        return self.context.state.size(sequence, scope)

    def save(self, sequence: int, scope: Scope, *, keep: bool = False) -> State:
        return self.context.state.save(sequence, scope, keep=keep)

    def load(self, sequence: int, state: State) -> None:
        assert isinstance(state, llama_state.State)
        self.context.state.load(sequence, state)

    @property
    def key(self) -> bytes:
        return self.context.state.key

    def cells(self, state: State, partial: State | None) -> Cells | None:
        assert isinstance(state, llama_state.State)
        return llama_layout.cut(state.data, 0 if partial is None else partial.nbytes - llama_layout.HEADER)

    def join(self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: State | None, position: int) -> State:
        assert partial is None or isinstance(partial, llama_state.State)
        data = llama_layout.join(llama_layout.Layout.unpack(layout), blocks, None if partial is None else partial.data)
        return llama_state.State(key=self.key, scope="full", positions=(0, position - 1), data=data)

    def pack(self, partial: State) -> list[bytes | memoryview]:
        assert isinstance(partial, llama_state.State)
        return [POSITIONS.pack(*(partial.positions or (-1, -1))), partial.data.data]

    def unpack(self, data: memoryview) -> State:
        if len(data) < POSITIONS.size:
            raise InvalidState("a partial state is cut off")
        first, last = POSITIONS.unpack_from(data)
        content = pages.copied(np.frombuffer(data[POSITIONS.size :], dtype=np.uint8))
        return llama_state.State(key=self.key, scope="partial", positions=(first, last), data=content)

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
