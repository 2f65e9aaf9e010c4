"""`LlamaBackend`: a llama.cpp context behind the `Backend` protocol. Builds batches from spans; contains no policy."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backends.logits_hold import LogitsHold
from afterglow.engine.backends.padding import RowPadding, build_row_padding, build_row_tile
from afterglow.engine.backends.threads import AdaptiveThreads, is_dynamic_allowed
from afterglow.engine.types.adapters import AdapterSet, LoadedAdapter
from afterglow.engine.types.backend import BackendCells, BackendState, Capabilities, DecodeSpan, Sampler
from afterglow.engine.types.constraints import TokenBytes
from afterglow.engine.types.entries import strip_label, strip_labels
from afterglow.engine.types.media import MediaEncoder
from afterglow.errors import AfterglowError, InvalidState, UnsupportedOperation
from afterglow.llama import kv_layout as llama_layout
from afterglow.llama import state as llama_state
from afterglow.llama.batch import EmbeddingBatch
from afterglow.llama.context import LlamaContext
from afterglow.llama.kv_probe import confirm_memory_kind
from afterglow.llama.library.devices import list_devices
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.projector import MediaEmbedding, Projector
from afterglow.llama.sampler import SamplerChain, sample_rows
from afterglow.llama.sampling import Sampling
from afterglow.llama.state import StateScope

POSITION_RANGE_STRUCT = struct.Struct("<ii")  # first and last position of a partial state
MIN_SEQUENCES_FOR_GROUPED_ADD = 6  # from this many single-row spans on, one grouped add is faster


class LlamaBackend:
    """Backend on llama.cpp. It closes the model only if `owns_model` is set; otherwise its creator does."""

    owns_model = False
    allows_device_copies = True  # llama.cpp's own copies between streams, which it defers to the next decode

    def __init__(
        self,
        context: LlamaContext,
        *,
        projector: Projector | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
    ) -> None:
        """With a `projector`, prompts may contain images or audio. Requests may use the `adapters` by name."""
        confirm_memory_kind(context)
        kind, settings = context.memory.kind, context.settings
        if kind == "none":  # an encoder, which computes embeddings only
            kind = context.model.info.memory_kind
        assert kind != "none"
        self.context = context
        context.memory.copies_on_device = self.allows_device_copies and _has_cells_on_gpu(context)
        if _is_on_gpu(context):
            context.enable_top_logits()
        has_gpu = any(device.kind != "cpu" for device in list_devices())
        computes_on_cpu = not has_gpu or not context.model.settings.gpu_layers
        self.capabilities = Capabilities(
            memory_kind=kind,
            sequences=context.sequences,
            cells_per_sequence=context.cells_per_sequence,
            batch_cells=context.batch.capacity,
            ubatch_cells=context.ubatch,
            max_outputs=context.max_outputs,
            kv_unified=settings.kv_unified,
            interruptible=computes_on_cpu,
            media=frozenset() if projector is None else projector.modalities,
            max_rollback=_compute_max_rollback(context),
            computes_ahead=_is_on_gpu(context),
            copies_on_device=context.memory.copies_on_device,
            can_replay=kind in ("recurrent", "hybrid"),
            decode_threads=settings.threads if computes_on_cpu else 1,
            row_tile=build_row_tile(context) if computes_on_cpu else None,
        )
        self.vocabulary_size = context.model.vocabulary.size
        self.eog_tokens = context.model.vocabulary.eog_tokens
        self.token_bytes: TokenBytes = context.model.vocabulary
        self.projector: MediaEncoder | None = projector
        self._loras = dict(adapters or {})
        self.adapters: Mapping[str, LoadedAdapter] = {
            name: LoadedAdapter(digest=lora.fingerprint, invocation_tokens=lora.invocation_tokens)
            for name, lora in self._loras.items()
        }
        self._applied_adapters: AdapterSet = ()
        # The prefix cache keeps the states of different adapters apart.
        self.state = llama_state.StateSerializer(context, ignore_adapters=True)
        self._first_rows: list[int] = []
        self._logits_hold = LogitsHold(context)
        self._adaptive_threads: AdaptiveThreads | None = None
        self.row_padding: RowPadding | None = None

    def pad_rows(self) -> None:
        """Pad small prefills on a CPU if that takes less time. It changes logits slightly."""
        self.row_padding = build_row_padding(self.context, self.capabilities.row_tile)

    def adapt_threads(self) -> None:
        """Decode with fewer threads while other programs use the cores. The number of threads changes logits slightly.

        Does nothing if a GPU computes or `OMP_DYNAMIC` is false.
        """
        if self.capabilities.interruptible and self.context.settings.threads > 1 and is_dynamic_allowed():
            self._adaptive_threads = AdaptiveThreads(self._list_contexts())

    @property
    def adapts_threads(self) -> bool:
        return self._adaptive_threads is not None

    def _list_contexts(self) -> list[LlamaContext]:
        return [self.context]

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        if spans[0].adapters != self._applied_adapters:
            self.context.set_adapters(self.select_adapters(spans[0].adapters))
            self._applied_adapters = spans[0].adapters
        if spans[0].embedding is not None:
            assert len(spans) == 1, "a media entry has a decode of its own"
            return self._decode_embedding(spans[0], spans[0].embedding)
        self._logits_hold.prepare_decode(spans)
        batch = self.context.batch
        batch.clear()
        padding = self._plan_padding(spans)
        # Ordered by sequence: llama.cpp computes streams together only if their ids are consecutive in the batch. On a
        # GPU, 8 streams in another order took 4 times as long.
        order = sorted(range(len(spans)), key=[span.sequence for span in spans].__getitem__)
        self._first_rows = [0] * len(spans)
        # A list has generated tokens, which have no labels.
        are_single = [len(span.entries) == 1 and isinstance(span.entries, list) for span in spans]
        if len(spans) >= MIN_SEQUENCES_FOR_GROUPED_ADD and all(are_single):
            ordered = [spans[index] for index in order]
            batch.add_rows(
                [span.entries[0] for span in ordered],
                positions=[span.position for span in ordered],
                sequences=[span.sequence for span in ordered],
                outputs=[span.outputs for span in ordered],
            )
            for row, index in enumerate(order):
                self._first_rows[index] = row
        else:
            for index in order:
                span = spans[index]
                self._first_rows[index] = batch.count
                if len(span.entries) == 1:
                    token, output = strip_label(int(span.entries[0])), bool(span.outputs)
                    batch.add_row(token, position=span.position, sequence=span.sequence, output=output)
                else:
                    tokens = strip_labels(np.asarray(span.entries, dtype=np.int64)).astype(np.int32)
                    batch.add(tokens, position=span.position, sequence=span.sequence, outputs=span.outputs)
                    if rows := padding.get(span.sequence):
                        position = span.position + len(tokens)
                        batch.add(np.zeros(rows, dtype=np.int32), position=position, sequence=span.sequence)
        try:
            self._decode_batch(batch.count)
        finally:
            for span in spans if padding else ():
                if span.sequence in padding:
                    self.context.memory.remove(span.sequence, start=span.position + len(span.entries))

    def _plan_padding(self, spans: Sequence[DecodeSpan]) -> dict[int, int]:
        """Return the padding rows of each sequence. All must fit into one ubatch, and into their sequences."""
        padding = {} if self.row_padding is None else self.row_padding.plan(spans)
        if not padding:
            return padding
        ends = [span.position + len(span.entries) + padding.get(span.sequence, 0) for span in spans]
        rows = sum([len(span.entries) for span in spans]) + sum(padding.values())
        if rows > self.capabilities.ubatch_cells or max(ends) > self.capabilities.cells_per_sequence:
            return {}
        assert self.row_padding is not None
        self.row_padding.padded_decodes += 1
        return padding

    def _decode_batch(self, rows: int) -> None:
        if self._adaptive_threads is None:
            return self.context.decode()
        self._adaptive_threads.prepare_decode(rows)
        self.context.decode()
        self._adaptive_threads.record_decode(rows)

    def can_roll_back_after(self, spans: Sequence[DecodeSpan]) -> bool:
        if not self.capabilities.can_replay:
            return True
        rows = {span.sequence: len(span.entries) for span in spans}
        return self.context.memory.keeps_snapshots(dict(sorted(rows.items())))  # the order of `decode`

    def _decode_embedding(self, span: DecodeSpan, embedding: MediaEmbedding) -> None:
        """Decode rows of a media entry."""
        positions = span.position + embedding.position_offsets
        batch = EmbeddingBatch(
            embedding.rows,
            positions.T if self.context.model.info.uses_mrope else positions[:, 0],
            sequence=span.sequence,
            output=span.outputs > 0,
        )
        self.context.decode_embeddings(batch, causal=not embedding.non_causal)
        self._first_rows = [batch.count - 1]

    def get_logits(self, span: int, row: int) -> NDArray[np.float32]:
        self._logits_hold.read_rows += 1
        return self.context.get_logits(self._first_rows[span] + row)

    def sample_rows(self, draws: Sequence[tuple[int, int, Sampler]]) -> list[int | AfterglowError]:
        logits = self.context.get_all_logits()
        indices = [self.context.get_output_index(self._first_rows[span] + row) for span, row, _ in draws]
        chains: list[SamplerChain | None] = [None] * len(logits)
        for index, (_, _, sampler) in zip(indices, draws, strict=True):
            assert isinstance(sampler, SamplerChain)
            chains[index] = sampler
        needed = max(
            [chain.row_mode for chain in chains if chain is not None and chain.row_mode is not None], default=0
        )
        top = self.context.get_top_logits(needed)
        if top is None:
            self._logits_hold.read_rows += len(logits)
        tokens = sample_rows(chains, logits, top)
        return [token for index in indices if (token := tokens[index]) is not None]

    def create_sampler(self, sampling: Sampling) -> Sampler:
        return SamplerChain(self.context.model, replace(sampling, grammar=""))  # the engine enforces grammars

    def token_to_piece(self, token: int) -> bytes:
        return self.context.model.vocabulary.token_to_piece(token, special=False)

    def get_position_range(self, sequence: int) -> tuple[int, int] | None:
        return self.context.memory.get_position_range(sequence)

    def can_resume_at(self, sequence: int, position: int) -> bool:
        return self.context.memory.can_resume(sequence, position)

    def truncate(self, sequence: int, position: int) -> None:
        if not self.context.memory.remove(sequence, start=position):
            raise UnsupportedOperation("a truncation", f"sequence {sequence} cannot resume at position {position}")

    def rewind_for_drafter(self, sequence: int, position: int) -> bool:
        return False  # there is no drafter

    def copy(self, source: int, target: int, stop: int) -> int:
        return self.context.memory.copy(source, target, stop=stop if self.capabilities.can_fork_anywhere else None)

    def get_state_size(self, sequence: int, scope: StateScope) -> int:
        return self.state.size(sequence, scope)

    def save(self, sequence: int, scope: StateScope, *, long_lived: bool = False) -> BackendState:
        return self.state.save(sequence, scope, long_lived=long_lived)

    def load(self, sequence: int, state: BackendState) -> None:
        assert isinstance(state, llama_state.SavedState)
        self.state.load(sequence, state)

    def select_adapters(self, adapters: AdapterSet) -> dict[LoraAdapter, float]:
        """Return the loaded adapters of a set with their scales."""
        return {self._loras[name]: scale for name, scale in adapters}

    @property
    def state_key(self) -> bytes:
        return self.state.key

    def extract_cells(self, state: BackendState, partial: BackendState | None) -> BackendCells | None:
        assert isinstance(state, llama_state.SavedState)
        partial_bytes = 0 if partial is None else partial.nbytes - llama_layout.HEADER_BYTES
        return llama_layout.parse_cells(state.data, partial_bytes)

    def assemble_state(
        self, layout: bytes, blocks: Sequence[NDArray[np.uint8]], partial: BackendState | None, position: int
    ) -> BackendState:
        assert partial is None or isinstance(partial, llama_state.SavedState)
        partial_data = None if partial is None else partial.data
        data = llama_layout.join_cells(llama_layout.KVLayout.unpack(layout), blocks, partial_data)
        return llama_state.SavedState(key=self.state_key, scope="full", positions=(0, position - 1), data=data)

    def serialize_state(self, partial: BackendState) -> list[bytes | memoryview]:
        assert isinstance(partial, llama_state.SavedState)
        return [POSITION_RANGE_STRUCT.pack(*(partial.positions or (-1, -1))), partial.data.data]

    def deserialize_state(self, data: memoryview) -> BackendState:
        if len(data) < POSITION_RANGE_STRUCT.size:
            raise InvalidState("a partial state is truncated")
        first, last = POSITION_RANGE_STRUCT.unpack_from(data)
        content = np.frombuffer(data[POSITION_RANGE_STRUCT.size :], dtype=np.uint8)
        return llama_state.SavedState(key=self.state_key, scope="partial", positions=(first, last), data=content)

    def clear(self, sequence: int) -> None:
        self.context.memory.remove(sequence)

    def interrupt(self) -> None:
        self.context.interrupt()

    def clear_interrupt(self) -> None:
        self.context.clear_interrupt()

    def close(self) -> None:
        if self.owns_model:
            self.context.model.close()


def _is_on_gpu(context: LlamaContext) -> bool:
    """Return whether a GPU computes all layers, the output layer included."""
    layers = context.model.settings.gpu_layers
    return (layers < 0 or layers > context.model.info.layer_count) and any(
        "gpu" in device.kind for device in list_devices()
    )


def _has_cells_on_gpu(context: LlamaContext) -> bool:
    """Return whether all cells of attention or window memory, in streams, are in the memory of a GPU."""
    return context.memory.kind in ("attention", "window") and not context.settings.kv_unified and _is_on_gpu(context)


def _compute_max_rollback(context: LlamaContext) -> int:
    """Return the entries that a sequence can drop after a decode. A window keeps the cells of one ubatch more."""
    match context.memory.kind:
        case "attention":
            return context.cells_per_sequence
        case "window":
            return context.cells_per_sequence if context.settings.swa_full else context.ubatch
    # In unified memory, a decode with a prefill chunk beside draft tokens loses the snapshots.
    return 0 if context.memory.is_unknown or context.settings.kv_unified else context.max_rollback
