"""The rows of one decode, in C arrays that are allocated once and filled through NumPy views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.library.loader import get_library


class Batch:
    """Rows to decode: each has a token, a position, a sequence and an output flag (logits).

    >>> batch.clear()
    >>> batch.add([1, 2, 3], position=0, sequence=0, outputs=1)   # logits after the last of the three
    """

    def __init__(self, capacity: int, hidden_width: int = 0) -> None:
        ffi = get_library().ffi
        self.capacity = capacity
        self.count = 0
        self._arrays = {
            "token": ffi.new("llama_token[]", capacity),
            # llama.cpp may read rows with a hidden state as if they had four positions each, like image rows.
            "pos": ffi.new("llama_pos[]", 4 * capacity if hidden_width else capacity),
            "sequence": ffi.new("llama_seq_id[]", capacity),
            "n_seq_id": ffi.new("int32_t[]", [1] * capacity),
            "logits": ffi.new("int8_t[]", capacity),
            "seq_id": ffi.new("llama_seq_id *[]", capacity),
        }
        for row in range(capacity):  # each row belongs to exactly one sequence, so these pointers never change
            self._arrays["seq_id"][row] = self._arrays["sequence"] + row
        self.tokens: NDArray[np.int32] = np.frombuffer(ffi.buffer(self._arrays["token"]), dtype=np.int32)
        self.positions: NDArray[np.int32] = np.frombuffer(ffi.buffer(self._arrays["pos"]), dtype=np.int32)
        self.sequences: NDArray[np.int32] = np.frombuffer(ffi.buffer(self._arrays["sequence"]), dtype=np.int32)
        self.outputs: NDArray[np.int8] = np.frombuffer(ffi.buffer(self._arrays["logits"]), dtype=np.int8)
        self.native = ffi.new("llama_batch *")[0]
        for field in ("token", "pos", "n_seq_id", "seq_id", "logits"):
            setattr(self.native, field, self._arrays[field])
        self.hidden_states: NDArray[np.float32] | None = None
        if hidden_width:  # rows with a hidden state in addition to their token, as MTP contexts require
            self._arrays["embd"] = ffi.new("float[]", capacity * hidden_width)
            hidden = np.frombuffer(ffi.buffer(self._arrays["embd"]), dtype=np.float32)
            self.hidden_states = hidden.reshape(capacity, hidden_width)
            self.native.embd = self._arrays["embd"]

    def clear(self) -> None:
        self.count = 0

    def add(self, tokens: Sequence[int] | NDArray[np.int32], *, position: int, sequence: int, outputs: int = 0) -> None:
        """Append consecutive tokens of one sequence, from `position` on; the last `outputs` of them get logits."""
        start, stop = self._reserve_rows(len(tokens))
        self.tokens[start:stop] = tokens
        self.positions[start:stop] = np.arange(position, position + len(tokens), dtype=np.int32)
        self.sequences[start:stop] = sequence
        self.outputs[start:stop] = 0
        if outputs:
            self.outputs[max(start, stop - outputs) : stop] = 1
        self.count = stop

    def add_row(self, token: int, *, position: int, sequence: int, output: bool) -> None:
        """Append one row, as a decoding sequence does at every step."""
        row, stop = self._reserve_rows(1)
        self.tokens[row] = token
        self.positions[row] = position
        self.sequences[row] = sequence
        self.outputs[row] = output
        self.count = stop

    def add_rows(
        self, tokens: Sequence[int], *, positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Append one row of each of several sequences: faster than `add_row` for more than a few."""
        start, stop = self._reserve_rows(len(tokens))
        self.tokens[start:stop] = tokens
        self.positions[start:stop] = positions
        self.sequences[start:stop] = sequences
        self.outputs[start:stop] = outputs
        self.count = stop

    def copy_rows(self, other: Batch, rows: NDArray[np.intp]) -> None:
        """Append `rows` of another batch."""
        start, stop = self._reserve_rows(len(rows))
        for target, source in (
            (self.tokens, other.tokens),
            (self.positions, other.positions),
            (self.sequences, other.sequences),
        ):
            target[start:stop] = source[rows]
        self.outputs[start:stop] = other.outputs[rows]
        self.count = stop

    def _reserve_rows(self, rows: int) -> tuple[int, int]:
        """Return the start and the end of `rows` more rows; raise `InvalidArgument` if they do not fit."""
        stop = self.count + rows
        if stop > self.capacity:
            raise InvalidArgument("tokens", f"would make a batch of {stop} rows; {self.capacity} fit")
        return self.count, stop


class EmbeddingBatch:
    """Embedding rows of one sequence (image or audio), for one decode."""

    def __init__(
        self, rows: NDArray[np.float32], positions: NDArray[np.int32], *, sequence: int, output: bool = False
    ) -> None:
        """`positions` has one number per row, or four with M-RoPE: first those of the first axis, then the second, ….

        With `output`, the last row gets logits.
        """
        ffi = get_library().ffi
        self.count = len(rows)
        self.sequence = sequence
        self.output = output
        outputs = np.zeros(self.count, dtype=np.int8)
        outputs[-1] = output
        self.rows = np.ascontiguousarray(rows, dtype=np.float32)
        self.positions = np.ascontiguousarray(positions, dtype=np.int32)
        sequence_id = ffi.new("llama_seq_id *", sequence)
        self._arrays = (
            outputs,
            sequence_id,
            ffi.new("int32_t[]", [1] * self.count),
            ffi.new("llama_seq_id *[]", [sequence_id] * self.count),
        )
        self.native = ffi.new("llama_batch *")[0]
        self.native.n_tokens = self.count
        self.native.embd = ffi.cast("float *", ffi.from_buffer(self.rows))
        self.native.pos = ffi.cast("llama_pos *", ffi.from_buffer(self.positions))
        self.native.n_seq_id, self.native.seq_id = self._arrays[2:]
        self.native.logits = ffi.cast("int8_t *", ffi.from_buffer(outputs))
