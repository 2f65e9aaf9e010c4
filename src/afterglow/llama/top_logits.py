"""The largest logits of many rows, found by the device that computed them.

A row of logits has up to 256,000 numbers, of which a sampler needs few. On a GPU, one operation for all rows of a
decode finds them in a fraction of the time that the CPU takes to read all logits once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library

TOP_COUNT = 64  # logits per row if tokens are drawn; more than the usual `top_k` of 40
MIN_ROWS = 4  # for fewer rows, the CPU is as fast
MIN_SHORTLIST_CANDIDATES = 8192  # with fewer candidates, llama.cpp's samplers are faster than finding the largest first
# llama.cpp adds the operations of a sampler to the graph of every decode, for all sequences that have one. This number
# is no sequence, so llama.cpp still copies all logits to the host, and none of its rows is sampled.
SAMPLER_SEQUENCE = -1
LOGITS_NAME = b"result_output"  # of the tensor in llama.cpp's graphs


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
        self._tensors: tuple[Any, Any] | None = None  # tokens and values in the last graph that was built
        self._shape = (0, 0)  # of these tensors: rows, and logits per row
        self._is_added = False  # to the graph that is being built
        self._device: Any = ffi.NULL  # that computes the logits; NULL is the CPU
        self._interface = ffi.new("struct llama_sampler_i *")  # with the callbacks, which must outlive the sampler
        self._callbacks = (
            ffi.callback(ffi.typeof(self._interface.backend_init), self._set_device),
            ffi.callback(ffi.typeof(self._interface.backend_reset), self._start_graph),
            ffi.callback(ffi.typeof(self._interface.backend_apply), self._add_operations),
        )
        self._interface.backend_init, self._interface.backend_reset, self._interface.backend_apply = self._callbacks
        chain = symbols.llama_sampler_chain_init(symbols.llama_sampler_chain_default_params())
        symbols.llama_sampler_chain_add(chain, symbols.llama_sampler_init(self._interface, ffi.NULL))
        symbols.llama_set_sampler(context, SAMPLER_SEQUENCE, chain)

        def free(pointer: Any) -> None:
            symbols.llama_set_sampler(context, SAMPLER_SEQUENCE, ffi.NULL)
            symbols.llama_sampler_free(pointer)

        super().__init__("top logits", chain, free, parent=parent)

    def _set_device(self, _: Any, buffer_type: Any, __: int) -> bool:
        self._device = self._library.symbols.ggml_backend_buft_get_device(buffer_type)
        return True

    def _start_graph(self, _: Any) -> None:
        """llama.cpp starts to build a graph."""
        self._is_added = False

    def _add_operations(self, _: Any, memory: Any, graph: Any, __: Any) -> None:
        """Add the operations to a graph, once. llama.cpp calls this for each row that a sequence may have."""
        if self._is_added:
            return
        self._is_added = True
        symbols = self._library.symbols
        logits = symbols.ggml_graph_get_tensor(graph, LOGITS_NAME)
        rows = symbols.ggml_nrows(logits) if logits else 0
        if not rows:  # no logits: another graph than the one whose tensors are read
            return
        self._tensors, self._shape = None, (rows, self.count)
        size = symbols.ggml_nelements(logits) // rows
        if rows < MIN_ROWS or size < MIN_SHORTLIST_CANDIDATES:
            return
        if self.count == 1:
            found = symbols.ggml_argmax(memory, logits)
        else:
            found = symbols.ggml_top_k(memory, logits, self.count)
        if self._device and not symbols.ggml_backend_dev_supports_op(self._device, found):
            return  # llama.cpp would compute it on the CPU
        tokens = found if self.count > 1 else symbols.ggml_reshape_3d(memory, found, 1, rows, 1)
        values = symbols.ggml_get_rows(memory, symbols.ggml_reshape_3d(memory, logits, 1, size, rows), tokens)
        for tensor in (tokens, values):
            symbols.ggml_set_output(tensor)  # its memory is not reused
            symbols.ggml_build_forward_expand(graph, tensor)
        self._tensors = tokens, values

    def read(self, logits: NDArray[np.float32]) -> TopLogits | None:
        """Return the largest logits of each row of the last decode; None if the device did not compute them.

        `logits` are those of all rows of the decode, and every row must have had an output. A decode of several
        ubatches computes several graphs, and the tensors of the last one have fewer rows.
        """
        rows = self._shape[0]
        if self._tensors is None or rows != len(logits):
            return None
        top = TopLogits(np.empty(self._shape, np.int32), np.empty(self._shape, np.float32))
        ffi, symbols = self._library.ffi, self._library.symbols
        for tensor, array in zip(self._tensors, (top.tokens, top.values), strict=True):
            symbols.ggml_backend_tensor_get(tensor, ffi.from_buffer(array), 0, array.nbytes)
        # The rows are those of `logits`, in this order, and have no NaN: one of each is compared.
        with contextlib.suppress(IndexError):
            if (logits[np.arange(rows), top.tokens[:, 0]] == top.values[:, 0]).all():
                return top
        return None
