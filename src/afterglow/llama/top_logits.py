"""The largest logits of many rows, found by the device that computed them, and logits that stay on this device.

A row of logits has up to 256,000 numbers, of which a sampler needs few. On a GPU, one operation for all rows of a
decode finds them in a fraction of the time that the CPU takes to read all logits once. The other logits need not be
copied to the host then.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import DecodeFailed
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library

TOP_COUNT = 64  # logits per row if tokens are drawn; more than the usual `top_k` of 40
MIN_ROWS = 4  # for fewer rows, the CPU is as fast
MIN_SHORTLIST_CANDIDATES = 8192  # with fewer candidates, llama.cpp's samplers are faster than finding the largest first
# llama.cpp adds the operations of a sampler to the graph of every decode, for all sequences that have one. This number
# is no sequence, so llama.cpp still copies all logits to the host, and none of its rows is sampled.
SAMPLER_SEQUENCE = -1
LOGITS_NAME = b"result_output"  # of the tensor in llama.cpp's graphs
GGML_TYPE_F32 = 0
MAX_VOCABULARY = 1 << 24  # larger token numbers are no exact 32-bit floats


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits of each row, in no order: `tokens` and `values` have a line per row.

    A line has the largest logit only, or `TOP_COUNT`.
    """

    tokens: NDArray[np.int32]
    values: NDArray[np.float32]


class TopLogitsReducer(Handle):
    """Adds an argmax or a top-k operation to the graphs of a context. `read` returns its result after a decode.

    Set `count` to the logits per row that are needed: 1 or `TOP_COUNT`. It applies to the next graph that llama.cpp
    builds, which it reuses until the number of rows changes, for at most 256 decodes.

    >>> context.enable_top_logits()  # creates a reducer
    >>> context.get_top_logits(TOP_COUNT) is None  # until a decode of `MIN_ROWS` rows or more
    True
    """

    def __init__(self, context: Any, parent: Handle | None = None) -> None:
        """`context` is the native context that `parent` owns."""
        self._library = get_library()
        ffi, symbols = self._library.ffi, self._library.symbols
        self.count = TOP_COUNT
        self.is_verified = False  # the tensor of the logits has the same numbers as llama.cpp's copy on the host
        self._context = context
        self._logits: Any = ffi.NULL  # tensor in the last graph that was built, with a row for each output
        self._top: Any = None  # tensor in this graph: a line has the tokens and then the values of a row
        self._shape = (0, 0)  # of the logits: rows, and numbers per row
        self._width = 0  # of the largest logits per row
        self._is_added = False  # to the graph that is being built
        self._is_checked = False  # `is_verified` is of the last graph that was built
        self._device: Any = ffi.NULL  # that computes the logits; NULL is the CPU
        self._chains: list[Any] = []  # samplers of the sequences while logits are held, by sequence
        self._interface = ffi.new("struct llama_sampler_i *")  # with the callbacks, which must outlive the sampler
        self._callbacks = (
            ffi.callback(ffi.typeof(self._interface.backend_init), self._set_device),
            ffi.callback(ffi.typeof(self._interface.backend_reset), self._start_graph),
            ffi.callback(ffi.typeof(self._interface.backend_apply), self._add_operations),
        )
        self._interface.backend_init, self._interface.backend_reset, self._interface.backend_apply = self._callbacks

        def free(pointer: Any) -> None:
            self.release()
            symbols.llama_set_sampler(context, SAMPLER_SEQUENCE, ffi.NULL)
            symbols.llama_sampler_free(pointer)

        super().__init__("top logits", self._attach(SAMPLER_SEQUENCE), free, parent=parent)

    def _attach(self, sequence: int) -> Any:
        """Attach a sampler to a sequence; return it."""
        symbols = self._library.symbols
        chain = symbols.llama_sampler_chain_init(symbols.llama_sampler_chain_default_params())
        symbols.llama_sampler_chain_add(chain, symbols.llama_sampler_init(self._interface, self._library.ffi.NULL))
        symbols.llama_set_sampler(self._context, sequence, chain)
        return chain

    @property
    def is_holding(self) -> bool:
        """Whether logits stay on the device."""
        return bool(self._chains)

    def hold(self, sequences: int) -> None:
        """Leave the logits of all sequences on the device from the next decode on.

        llama.cpp copies no logits of sequences that have a sampler. `read_logits` copies them. A sequence may have one
        output per decode then. Holding and releasing let llama.cpp allocate its buffers again, which takes tens of
        milliseconds.
        """
        if not self._chains:
            self._chains = [self._attach(sequence) for sequence in range(sequences)]

    def release(self) -> None:
        """Let llama.cpp copy all logits to the host from the next decode on."""
        symbols, null = self._library.symbols, self._library.ffi.NULL
        for sequence, chain in enumerate(self._chains):
            symbols.llama_set_sampler(self._context, sequence, null)
            symbols.llama_sampler_free(chain)
        self._chains = []

    def _set_device(self, _: Any, buffer_type: Any, __: int) -> bool:
        self._device = self._library.symbols.ggml_backend_buft_get_device(buffer_type)
        return True

    def _start_graph(self, _: Any) -> None:
        """llama.cpp starts to build a graph."""
        self._is_added = False

    def _add_operations(self, _: Any, memory: Any, graph: Any, data: Any) -> None:
        """Add the operations to a graph, once. llama.cpp calls this for each row that a sequence may have."""
        data.logits = self._library.ffi.NULL  # of one row: llama.cpp would copy them to the host
        if self._is_added:
            return
        self._is_added = True
        symbols = self._library.symbols
        logits = symbols.ggml_graph_get_tensor(graph, LOGITS_NAME)
        rows = symbols.ggml_nrows(logits) if logits else 0
        if not rows:  # no logits: another graph than the one whose tensors are read
            return
        size = symbols.ggml_nelements(logits) // rows
        self._logits, self._shape, self._top, self._width = logits, (rows, size), None, self.count
        self._is_checked = False
        if rows < MIN_ROWS or not MIN_SHORTLIST_CANDIDATES <= size <= MAX_VOCABULARY:
            return
        if self.count == 1:
            tokens = symbols.ggml_reshape_3d(memory, symbols.ggml_argmax(memory, logits), 1, rows, 1)
        else:
            tokens = symbols.ggml_top_k(memory, logits, self.count)
        values = symbols.ggml_get_rows(memory, symbols.ggml_reshape_3d(memory, logits, 1, size, rows), tokens)
        values = symbols.ggml_reshape_3d(memory, values, self.count, rows, 1)
        numbers = symbols.ggml_cast(memory, tokens, GGML_TYPE_F32)  # so that one tensor has both, which is read faster
        top = symbols.ggml_concat(memory, numbers, values, 0)
        if not all(map(self._is_supported, (tokens, values, numbers, top))):
            return  # llama.cpp would compute it on the CPU
        symbols.ggml_set_output(top)  # its memory is not reused
        symbols.ggml_build_forward_expand(graph, top)
        self._top = top

    def _is_supported(self, operation: Any) -> bool:
        return not self._device or self._library.symbols.ggml_backend_dev_supports_op(self._device, operation)

    def read(self, outputs: int) -> TopLogits | None:
        """Return the largest logits of each row of the last decode; None if the device did not compute them.

        The decode had this many `outputs`. A decode of several ubatches computes several graphs, and the tensors of
        the last one have fewer rows.
        """
        if self._top is None or self._shape[0] != outputs:
            return None
        numbers = np.empty((outputs, 2 * self._width), np.float32)
        self._read_tensor(self._top, numbers, 0)
        values = numbers[:, self._width :]
        if np.isnan(values).any():
            return None
        return TopLogits(numbers[:, : self._width].astype(np.int32), values)

    def verify(self, top: TopLogits, logits: NDArray[np.float32]) -> bool:
        """Return whether these belong to the rows of `logits`, in this order.

        One of each row is compared, once for each graph that llama.cpp builds: it reuses a graph for many decodes.
        """
        if not self._is_checked:
            self._is_checked, self.is_verified = True, False
            with contextlib.suppress(IndexError):
                self.is_verified = bool((logits[np.arange(len(logits)), top.tokens[:, 0]] == top.values[:, 0]).all())
        return self.is_verified

    def read_logits(self, outputs: int, rows: slice) -> NDArray[np.float32]:
        """Copy `rows` of the last decode, which had this many `outputs`, all of them in its last ubatch."""
        if self._shape[0] != outputs:
            raise DecodeFailed(0, f"the device has the logits of {self._shape[0]} rows, not of {outputs}")
        start, stop, _ = rows.indices(outputs)
        logits = np.empty((stop - start, self._shape[1]), np.float32)
        self._read_tensor(self._logits, logits, start * self._shape[1] * 4)
        return logits

    def _read_tensor(self, tensor: Any, array: NDArray[np.float32], offset: int) -> None:
        symbols = self._library.symbols
        symbols.llama_synchronize(self._context)  # a GPU may still compute it
        symbols.ggml_backend_tensor_get(tensor, self._library.ffi.from_buffer(array), offset, array.nbytes)
