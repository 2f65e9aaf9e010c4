"""A llama.cpp context: KV memory of sequences, and decode. Single-threaded; validates before every native call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import Cancelled, DecodeFailed, InvalidArgument, InvalidModel, KVCacheFull, UnsupportedOperation
from afterglow.llama.batch import Batch, EmbeddingBatch
from afterglow.llama.checks import check_float
from afterglow.llama.device_logits import DeviceLogits, LogitsRows, divide_rows
from afterglow.llama.handle import Handle
from afterglow.llama.kv_memory import KVMemory
from afterglow.llama.library.loader import get_library
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.llama.state import NO_ADAPTERS_KEY, StateSerializer
from afterglow.llama.top_logits import TOP_COUNT, TopLogits, TopLogitsReducer

DECODE_ABORTED = 2


class LlamaContext(Handle):
    """A context of a model: decodes batches into the memory of its sequences.

    >>> with LlamaContext(model, ContextSettings(cells=1024)) as context:
    ...     context.batch.add(tokens, position=0, sequence=0, outputs=1)
    ...     context.decode()
    ...     context.get_logits(len(tokens) - 1).argmax() < model.vocabulary.size
    np.True_
    """

    def __init__(
        self,
        model: LlamaModel,
        settings: ContextSettings,
        *,
        mtp_target: LlamaContext | None = None,
        owner: LlamaContext | None = None,
    ) -> None:
        """`owner` is a context of the same model that closes this one when it is closed."""
        self._library = get_library()
        self.model = model
        self.settings = settings = _limit_batch(model, settings)
        pointer = _create_pointer(model, settings, mtp_target)
        symbols = self._library.symbols
        super().__init__("context", pointer, symbols.llama_free, parent=mtp_target or owner or model)
        self.cells: int = symbols.llama_n_ctx(pointer)
        self.cells_per_sequence: int = symbols.llama_n_ctx_seq(pointer)
        self.sequences: int = symbols.llama_n_seq_max(pointer)
        self.max_rollback: int = symbols.llama_n_rs_seq(pointer)
        self.ubatch: int = symbols.llama_n_ubatch(pointer)
        self.pooling: int = symbols.llama_pooling_type(pointer)
        self.max_outputs = settings.max_outputs
        self.is_mtp = mtp_target is not None
        self.batch = Batch(symbols.llama_n_batch(pointer), hidden_width=model.embedding_width if self.is_mtp else 0)
        self.memory = KVMemory(self)
        self.state = StateSerializer(self)
        self.adapters: dict[LoraAdapter, float] = {}
        self.adapter_key = NO_ADAPTERS_KEY
        self.decode_count = 0
        self._row_count = 0  # of the last decode
        self._output_indices: dict[int, int] = {}  # row of the last decode -> index of its output
        self._logits: LogitsRows | None = None  # of the last decode; read on first use
        self._top_logits: TopLogitsReducer | None = None
        self._hidden_rows: Literal["none", "outputs", "every"] = "none"  # rows with a hidden state
        self._part: Batch | None = None  # of a batch that is decoded in parts; allocated on first use
        self._abort_flag = _install_abort_callback(pointer)
        self._companions: dict[str, LlamaContext] = {}  # contexts beside this one, by purpose

    def close(self) -> None:
        """Free the context and everything created from it. Closing twice is allowed."""
        self._logits = None  # a view of its memory
        super().close()

    def decode(self, batch: Batch | None = None) -> None:
        """Decode the rows of `batch`, by default this context's own, into memory.

        After `KVCacheFull` nothing was applied. After `Cancelled` (see `interrupt`) and `DecodeFailed`, rows of
        completed ubatches may have been applied: read `memory.get_position_range` and truncate accordingly. Remove all
        sequences of recurrent and hybrid memory if several were in the batch.
        """
        batch = batch or self.batch
        outputs = self._check_batch(batch)
        logits = None
        if self._top_logits is not None and self._top_logits.is_holding:
            logits = self._decode_divided(batch, self._top_logits)
        else:
            self._compute_batch(batch)
        self.memory.record_decode(batch.sequences[: batch.count])
        self._row_count, self._output_indices = batch.count, dict(zip(outputs, range(len(outputs)), strict=True))
        self._logits = logits

    def _decode_divided(self, batch: Batch, reducer: TopLogitsReducer) -> LogitsRows | None:
        """Decode a batch in parts whose outputs are in one ubatch each, and return the logits.

        Those of a single part stay on the device. None if the batch cannot be divided: llama.cpp copies all logits from
        this decode on.
        """
        parts = divide_rows(batch.sequences[: batch.count], batch.outputs[: batch.count], self.ubatch)
        if parts is None or len(parts) == 1:
            if parts is None:
                reducer.release()
            self._compute_batch(batch)
            return None if parts is None else DeviceLogits(reducer, int(np.count_nonzero(batch.outputs[: batch.count])))
        self._part = self._part or Batch(self.batch.capacity)
        logits: list[LogitsRows] = []
        for number, rows in enumerate(parts):
            if logits:
                logits[-1] = np.asarray(logits[-1])  # this part overwrites them
            self._part.clear()
            self._part.copy_rows(batch, rows)
            try:
                self._compute_batch(self._part)
            except KVCacheFull as error:
                raise DecodeFailed(1, str(error)) if number else error from None  # rows of other parts were applied
            if batch.outputs[rows[0]]:
                logits.append(DeviceLogits(reducer, len(rows)))
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def _compute_batch(self, batch: Batch) -> None:
        batch.native.n_tokens = batch.count
        self._compute(batch.native, batch.count)

    def decode_embeddings(self, batch: EmbeddingBatch, *, causal: bool = True) -> None:
        """Decode embedding rows. If not `causal`, the rows attend to one another and must fit into one ubatch.

        Errors are those of `decode`.
        """
        self._check_embedding_batch(batch, causal)
        symbols = self._library.symbols
        if not causal:
            symbols.llama_set_causal_attn(self.pointer, False)
        try:
            self._compute(batch.native, batch.count)
        finally:
            if not causal:
                symbols.llama_set_causal_attn(self.pointer, self.model.info.is_causal)
        self.memory.record_embedding_decode(batch.sequence)
        self._row_count, self._output_indices = batch.count, {batch.count - 1: 0} if batch.output else {}
        if self._top_logits is not None and self.is_holding_logits:
            self._logits = DeviceLogits(self._top_logits, int(batch.output))

    def _compute(self, native: Any, rows: int) -> None:
        """Call `llama_decode`. The outputs of the previous decode become invalid, even if this one fails."""
        self._row_count, self._output_indices, self._logits = 0, {}, None
        code = self._library.symbols.llama_decode(self.pointer, native)
        self._abort_flag[0] = b"\0"
        self.decode_count += 1
        if code != -1:  # a decode applies pending shifts and copies first
            self.memory.pending_shift = False
            self.memory.pending_copies.clear()
        if code == 0:
            return
        reason = self._library.log_bridge.take_error("no reason given")
        if code == 1:
            raise KVCacheFull(rows, self.cells_per_sequence)
        if code != -1:
            self.memory.record_failed_decode()
        if code == DECODE_ABORTED:
            raise Cancelled(f"a decode of {rows} rows was interrupted")
        if code == -1:
            raise InvalidArgument("batch", f"was rejected by llama.cpp: {reason}")
        raise DecodeFailed(code, reason)

    def apply_copies(self, sequence: int) -> None:
        """Apply the pending copies from or to a sequence, before its bytes are read or replaced.

        Only a decode applies them. It computes one row, in an empty sequence if there is one, and removes it.
        """
        memory = self.memory
        if sequence not in memory.pending_copies:
            return
        ranges = {number: memory.get_position_range(number) for number in range(self.sequences)}
        scratch = next((number for number, positions in ranges.items() if positions is None), sequence)
        positions = ranges[scratch]
        end = 0 if positions is None else positions[1] + 1
        batch = Batch(1)
        batch.add_row(0, position=end, sequence=scratch, output=False)
        with contextlib.suppress(KVCacheFull):  # the copies are applied nevertheless
            self.decode(batch)
        memory.remove(scratch, start=end)

    def _check_embedding_batch(self, batch: EmbeddingBatch, causal: bool) -> None:
        limit = self.batch.capacity if causal else min(self.batch.capacity, self.ubatch)
        if not 0 < batch.count <= limit:
            raise InvalidArgument("rows", f"must be 1 to {limit} in one decode, not {batch.count}")
        width = self._library.symbols.llama_model_n_embd_inp(self.model.pointer)
        if batch.rows.shape != (batch.count, width):
            raise InvalidArgument("rows", f"must have {width} numbers each, not the shape {batch.rows.shape}")
        axes = 4 if self.model.info.uses_mrope else 1
        if batch.positions.size != axes * batch.count or int(batch.positions.min()) < 0:
            raise InvalidArgument("positions", f"must be {axes} per row, and not negative")
        if self.is_mtp or self.settings.embeddings:
            raise UnsupportedOperation("rows", "this context accepts tokens only")
        self.memory.check_sequence(batch.sequence)

    def _check_batch(self, batch: Batch) -> Sequence[int]:
        """Reject a batch that would abort the process; return the rows with outputs."""
        count = batch.count
        if not 0 < count <= self.batch.capacity:
            raise InvalidArgument("batch", f"must have 1 to {self.batch.capacity} rows, not {count}")
        if not self.model.info.is_causal and count > self.ubatch:
            raise InvalidArgument("batch", f"must have at most {self.ubatch} rows on a non-causal model, not {count}")
        if self.is_mtp and batch.hidden_states is None:
            raise InvalidArgument("batch", "needs a hidden state for each token in an MTP context")
        outputs = range(count) if self.settings.embeddings else batch.outputs[:count].nonzero()[0].tolist()
        if len(outputs) > self.max_outputs:
            raise InvalidArgument("outputs", f"must be at most {self.max_outputs} in one decode, not {len(outputs)}")
        # As unsigned numbers, negative ones are the largest. Lists, because they are the fastest for a few rows.
        if max(batch.tokens[:count].view(np.uint32).tolist()) >= self.model.vocabulary.size:
            raise InvalidArgument("tokens", f"must be from 0 to {self.model.vocabulary.size - 1}")
        if max(batch.sequences[:count].view(np.uint32).tolist()) >= self.sequences:
            raise InvalidArgument("sequence", f"must be from 0 to {self.sequences - 1}")
        return outputs

    def interrupt(self) -> None:
        """Abort the running decode, or else the next one, with `Cancelled`. Thread-safe. CPU only."""
        self._abort_flag[0] = b"\1"

    def clear_interrupt(self) -> None:
        """Clear an interrupt that came too late for the last decode, so that the next one runs."""
        self._abort_flag[0] = b"\0"

    def get_logits(self, row: int) -> NDArray[np.float32]:
        """Return the logits after `row` of the last decode, as a view that the next decode overwrites."""
        return self.get_all_logits()[self.get_output_index(row)]

    def get_all_logits(self) -> LogitsRows:
        """Return the logits after all rows with outputs, in the order of the rows, as a view like `get_logits`.

        `DeviceLogits` if they are on the device (`hold_logits`).
        """
        if self._logits is None:  # read at once, to save native calls
            pointer = self._library.symbols.llama_get_logits(self.pointer)
            if pointer == self._library.ffi.NULL:
                raise UnsupportedOperation("logits", "this context computes no logits")
            size = self.model.vocabulary.size
            logits: LogitsRows = self._view_floats(pointer, len(self._output_indices) * size).reshape(-1, size)
            self._logits = logits
        return self._logits

    def enable_top_logits(self) -> None:
        """Find the largest logits of each row on the device that computes them, from the next decode on."""
        self._top_logits = self._top_logits or TopLogitsReducer(self.pointer, parent=self)

    def get_top_logits(self, count: int) -> TopLogits | None:
        """Return the largest logits of the last decode, in the order of `get_all_logits`; None if there are none.

        Requires `enable_top_logits`, and a decode in which every row had an output, unless logits are on the device.
        `count` logits per row are needed. If the device found fewer, it finds more in later decodes.
        """
        if self._top_logits is None:
            return None
        self._top_logits.count = 1 if count <= 1 else TOP_COUNT
        logits = self.get_all_logits()
        if isinstance(logits, DeviceLogits):
            return self._top_logits.read(len(logits))
        if len(self._output_indices) != self._row_count or self.is_holding_logits:
            return None
        top = self._top_logits.read(len(logits))
        return top if top is not None and self._top_logits.verify(top, np.asarray(logits)) else None

    @property
    def is_holding_logits(self) -> bool:
        """Whether logits stay on the device that computes them."""
        return self._top_logits is not None and self._top_logits.is_holding

    def hold_logits(self) -> bool:
        """Leave logits on the device that computes them, from the next decode on. Return whether that is possible.

        Requires `enable_top_logits`, attention or window memory in streams, and a decode whose largest logits were
        read. `get_logits` copies rows that are needed. A batch with several outputs of one sequence ends this.
        """
        reducer = self._top_logits
        can_divide = not self.settings.kv_unified and self.memory.kind in ("attention", "window")
        # A divided batch would have the hidden states of its last part only.
        if reducer is None or not reducer.is_verified or not can_divide or self._hidden_rows != "none":
            return False
        self._logits = None
        reducer.hold(self.sequences)
        return True

    def release_logits(self) -> None:
        """Copy all logits to the host, from the next decode on."""
        if self._top_logits is not None:
            self._top_logits.release()

    def get_output_index(self, row: int) -> int:
        """Return the index of `row` of the last decode in `get_all_logits`."""
        index = self._output_indices.get(row)
        if index is None:
            raise _build_missing_output_error(row)
        return index

    def get_embedding(self, *, row: int | None = None, sequence: int | None = None) -> NDArray[np.float32]:
        """Return a copy of the embedding of a row, or of a whole sequence if this context pools."""
        symbols, width = self._library.symbols, self.model.embedding_width
        if not self.settings.embeddings:
            raise UnsupportedOperation("embedding", "the context was created without `embeddings`")
        if sequence is not None:
            if self.pooling == 0:
                raise UnsupportedOperation("the embedding of a sequence", "this context does not pool")
            pointer = symbols.llama_get_embeddings_seq(self.pointer, self.memory.check_sequence(sequence))
            width = self.model.class_count if self.pooling == 4 else width
        else:
            if row not in self._output_indices:
                raise _build_missing_output_error(row)
            pointer = symbols.llama_get_embeddings_ith(self.pointer, row)
        if pointer == self._library.ffi.NULL:
            raise InvalidArgument("sequence", "has no embedding: it was not in the last decode")
        return self._view_floats(pointer, width).copy()

    def get_hidden_state(self, row: int) -> NDArray[np.float32]:
        """Return the hidden state for MTP heads after `row` of the last decode, as a view.

        Requires `enable_hidden_states`; without `every_row`, only rows with outputs have one.
        """
        if not 0 <= row < self._row_count:
            raise InvalidArgument("row", f"{row} was not in the last decode")
        self._check_hidden_states()
        if self._hidden_rows == "outputs":
            self.get_output_index(row)
        pointer = self._library.symbols.llama_get_embeddings_nextn_ith(self.pointer, row)
        return self._view_floats(pointer, self.model.embedding_width)

    def get_hidden_states(self) -> NDArray[np.float32]:
        """Return the hidden states after every row of the last decode, as a view.

        Requires `enable_hidden_states(every_row=True)`.
        """
        if not self._row_count:
            raise InvalidArgument("rows", "there are none: nothing was decoded, or the last decode failed")
        self._check_hidden_states(every_row=True)
        pointer = self._library.symbols.llama_get_embeddings_nextn(self.pointer)
        width = self.model.embedding_width
        return self._view_floats(pointer, self._row_count * width).reshape(-1, width)

    def _check_hidden_states(self, *, every_row: bool = False) -> None:
        """Reject reading what was not stored: llama.cpp would return bytes of other memory."""
        if self._hidden_rows == "none" or (every_row and self._hidden_rows == "outputs"):
            reason = "call `enable_hidden_states`, for all rows with `every_row`, before the decode"
            raise UnsupportedOperation("reading hidden states", reason)

    def set_mtp_head(self, head: int) -> None:
        """Select the MTP head that the next decode of an MTP context runs."""
        self._library.symbols.llama_set_nextn_layer_offset(self.pointer, head)

    def enable_hidden_states(self, *, every_row: bool) -> None:
        """Store the hidden states for MTP heads from the next decode on: of output rows, or of every row."""
        if not self._library.supports_mtp:
            raise UnsupportedOperation("MTP", "this build of llama.cpp does not export its functions")
        self._hidden_rows = "every" if every_row else "outputs"
        self._row_count, self._output_indices, self._logits = 0, {}, None  # the last decode has none
        self.release_logits()
        self._library.symbols.llama_set_embeddings_nextn(self.pointer, True, not every_row)

    def get_companion(self, purpose: str, create: Callable[[], LlamaContext], *, min_cells: int = 0) -> LlamaContext:
        """Return the context for `purpose` beside this one. It has adapters of its own.

        `create` is called on first use, and if the context was closed or has fewer than `min_cells` cells. It should
        make this context the `owner`.
        """
        companion = self._companions.get(purpose)
        if companion is None or companion.closed or companion.cells_per_sequence < min_cells:
            if companion is not None:
                companion.close()
            companion = self._companions[purpose] = create()
        return companion

    def set_adapters(self, adapters: Mapping[LoraAdapter, float]) -> None:
        """Apply these LoRA adapters with their scales from the next decode on; an empty mapping removes all."""
        if adapters == self.adapters:
            return
        ffi = self._library.ffi
        pointers = [adapter.get_pointer_for(self.model) for adapter in adapters]
        scales = [check_float("scale", scale) for scale in adapters.values()]
        array, native_scales = ffi.new("struct llama_adapter_lora *[]", pointers), ffi.new("float[]", scales)
        code = self._library.symbols.llama_set_adapters_lora(self.pointer, array, len(pointers), native_scales)
        if code != 0:
            raise InvalidArgument("adapters", f"were rejected by llama.cpp with code {code}")
        self.adapters = dict(adapters)
        self.adapter_key = _build_adapter_key(adapters)
        for adapter in adapters:
            adapter.users.add(self)

    def remove_adapter(self, adapter: LoraAdapter) -> None:
        """Stop applying an adapter that is being closed."""
        if not self.closed and adapter in self.adapters:
            self.set_adapters({applied: scale for applied, scale in self.adapters.items() if applied is not adapter})

    def set_threads(self, threads: int, batch_threads: int) -> None:
        """Set the threads for decodes of one row, and of several rows."""
        self._library.symbols.llama_set_n_threads(self.pointer, max(threads, 1), max(batch_threads, 1))

    def _view_floats(self, pointer: Any, count: int) -> NDArray[np.float32]:
        return np.frombuffer(self._library.ffi.buffer(pointer, count * 4), dtype=np.float32)


def _limit_batch(model: LlamaModel, settings: ContextSettings) -> ContextSettings:
    """Return settings whose decodes have one ubatch, if the model has a sliding window.

    llama.cpp finds the cells of all ubatches of a decode before it computes the first. It removes window cells that the
    last ubatch does not need, although the first one may: in unified memory, logits were off by up to 2.
    """
    batch = min(settings.batch, max(settings.ubatch, settings.sequences))
    if not model.info.sliding_window or settings.swa_full or batch == settings.batch:
        return settings
    return replace(settings, batch=batch)


def _create_pointer(model: LlamaModel, settings: ContextSettings, mtp_target: LlamaContext | None) -> Any:
    library = get_library()
    parameters = settings.build_parameters()
    if mtp_target is not None:
        if not library.supports_mtp:
            raise UnsupportedOperation("MTP", "this build of llama.cpp does not export its functions")
        if not model.settings.mtp or not model.info.mtp_layer_count:
            raise UnsupportedOperation("MTP", "the model has no MTP heads, or was loaded without `mtp`")
        parameters.ctx_type = 1
        parameters.ctx_other = mtp_target.pointer
    model.check_fits(settings)
    library.log_bridge.take_error("")
    pointer = library.symbols.llama_init_from_model(model.pointer, parameters)
    if pointer == library.ffi.NULL:
        reason = library.log_bridge.take_error("llama.cpp created no context and gave no reason")
        raise InvalidModel(str(model.path), reason)
    return pointer


def _build_adapter_key(adapters: Mapping[LoraAdapter, float]) -> str:
    """Return the applied adapters and their scales as text, for the keys of saved states."""
    return repr(sorted((adapter.fingerprint, scale) for adapter, scale in adapters.items() if scale))


def _build_missing_output_error(row: int | None) -> InvalidArgument:
    return InvalidArgument("row", f"{row} has no output in the last decode")


def _install_abort_callback(pointer: Any) -> Any:
    """Install an abort callback and return its flag byte; a non-zero byte aborts the decode.

    The callback is C's `strlen` on that byte, so no Python code runs inside a decode.
    """
    library = get_library()
    flag = library.ffi.new("char[2]")
    callback = library.ffi.cast("ggml_abort_callback", library.strlen)
    library.symbols.llama_set_abort_callback(pointer, callback, flag)
    return flag
