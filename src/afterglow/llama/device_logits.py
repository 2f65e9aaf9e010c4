"""Logits that stay on the device that computed them: rows are copied when they are read."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.top_logits import TopLogitsReducer


class LogitsRows(Protocol):
    """The logits of several rows: an array, or `DeviceLogits`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> NDArray[np.float32]: ...

    def __array__(self) -> NDArray[Any]: ...


class DeviceLogits:
    """The logits of the last decode of a context, with `count` rows. The next decode overwrites them.

    >>> context.is_holding_logits, isinstance(context.get_all_logits(), DeviceLogits)  # they are on the host
    (False, False)
    """

    def __init__(self, reducer: TopLogitsReducer, count: int) -> None:
        self._reducer = reducer
        self._count = count
        self._rows: dict[int, NDArray[np.float32]] = {}  # those that were read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> NDArray[np.float32]:
        if row not in self._rows:
            self._rows[row] = self._reducer.read_logits(self._count, slice(row, row + 1))[0]
        return self._rows[row]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Copy all rows."""
        logits = self._reducer.read_logits(self._count, slice(None))
        return logits if dtype is None else logits.astype(dtype)


def divide_rows(
    sequences: NDArray[np.int32], outputs: NDArray[np.int8], max_rows: int
) -> list[NDArray[np.intp]] | None:
    """Return the rows of each decode into which a batch is divided, so that each has its outputs in its last ubatch.

    llama.cpp computes the graph of a ubatch after that of another, and only the last one keeps its logits. Rows without
    outputs come first. The others are computed together if their sequences are neighbours, as llama.cpp does it, at
    most `max_rows`. None if a sequence has several outputs, or one that is not its last row.

    >>> divide_rows(np.int32([0, 0, 0, 1, 2, 5]), np.int8([0, 0, 1, 1, 1, 1]), 512)
    [array([0, 1]), array([2, 3, 4]), array([5])]
    """
    rows = np.arange(len(sequences))
    if outputs.all() and len(rows) <= max_rows and (sequences - rows == sequences[0]).all():
        return [rows]  # as in most decodes: one row of each sequence
    last_rows = np.flatnonzero(outputs)
    is_last = np.append(sequences[1:] != sequences[:-1], True)
    if not is_last[last_rows].all() or (np.diff(sequences) < 0).any():
        return None
    if len(last_rows) == 0 or sequences[0] == sequences[-1]:
        return [rows]
    steps = np.diff(sequences[last_rows])
    runs = np.split(last_rows, np.flatnonzero(steps != 1) + 1)
    parts = [run[start : start + max_rows] for run in runs for start in range(0, len(run), max_rows)]
    others = np.flatnonzero(outputs == 0)
    return [others, *parts] if len(others) else parts
