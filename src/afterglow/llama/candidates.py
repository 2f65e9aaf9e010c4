"""Candidates of a draw: the few tokens of a row of logits that its sampler can choose, found for many rows together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.device_logits import LogitsRows
from afterglow.llama.parallel import count_threads, run_parallel
from afterglow.llama.top_logits import MIN_SHORTLIST_CANDIDATES, TopLogits

CANDIDATE_DTYPE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # `llama_token_data`
SHORTLIST_COLUMN_DEPTH = 64  # logits per column in `build_shortlists`
# Each of few threads gets the logits of several rows: more threads wait for the GIL longer than they compute.
MIN_LOGITS_PER_THREAD = 1_200_000
MAX_SAMPLING_THREADS = 4

RowMode: TypeAlias = int | None  # what a sampler needs of a row: 0 the argmax, k the k largest logits, None all
Reduced: TypeAlias = int | NDArray[np.void] | None  # a token, candidates, or nothing


def reduce_rows(modes: Sequence[RowMode], logits: LogitsRows, top: TopLogits | None = None) -> list[Reduced]:
    """Return for each row its argmax (mode 0), a shortlist of the `mode` largest logits, or None if it needs all.

    Also None if a shortlist would not save time. `top` are the largest logits, if a device has found them.

    >>> reduce_rows([0, None], np.array([[1, 3, 2], [1, 3, 2]], dtype=np.float32))
    [1, None]
    """
    return _reduce_all(modes, np.asarray(logits)) if top is None else _reduce_top_logits(modes, top, logits)


def _reduce_top_logits(modes: Sequence[RowMode], top: TopLogits, logits: LogitsRows) -> list[Reduced]:
    """Do what `reduce_rows` does from the largest logits of each row.

    If the device found only the largest logit of each row, it may be any of several equal ones.
    """
    width = top.values.shape[1]
    if width == 1:
        results: list[Reduced] = [
            token if mode == 0 else None for mode, token in zip(modes, top.tokens[:, 0].tolist(), strict=True)
        ]
    else:
        results = _find_candidates(modes, top)
    missing = [row for row, result in enumerate(results) if result is None and modes[row] is not None]
    if len(missing) == len(modes):
        return _reduce_all(modes, np.asarray(logits))
    for row in missing:
        results[row] = _reduce_part(modes[row : row + 1], logits[row][None])[0]
    return results


def _find_candidates(modes: Sequence[RowMode], top: TopLogits) -> list[Reduced]:
    """Do what `reduce_rows` does, but return None for a row whose largest logits are not all in `top`."""
    order = top.tokens.argsort(axis=1)
    tokens, values = np.take_along_axis(top.tokens, order, 1), np.take_along_axis(top.values, order, 1)
    ascending, width = np.sort(values, axis=1), values.shape[1]
    results: list[Reduced] = [None] * len(modes)
    for mode in {mode for mode in modes if mode is not None and mode < width}:
        rows = np.array([row for row, other in enumerate(modes) if other == mode])
        limits = ascending[rows, width - max(mode, 1)]
        is_complete = limits > ascending[rows, 0]  # other tokens may have the lowest value, too
        if mode == 0:
            found: Sequence[Reduced] = tokens[rows, values[rows].argmax(axis=1)].tolist()
        else:
            found = _divide_candidates(tokens[rows], values[rows], values[rows] >= limits[:, None])
        for row, reduced, complete in zip(rows.tolist(), found, is_complete.tolist(), strict=True):
            results[row] = reduced if complete else None
    return results


def _divide_candidates(
    tokens: NDArray[np.int32], values: NDArray[np.float32], mask: NDArray[np.bool_]
) -> list[NDArray[np.void]]:
    """Return the candidates of each row that `mask` selects."""
    candidates = np.zeros(np.count_nonzero(mask), dtype=CANDIDATE_DTYPE)
    candidates["id"], candidates["logit"] = tokens[mask], values[mask]
    bounds = [0, *mask.sum(axis=1).cumsum().tolist()]
    return [candidates[start:stop] for start, stop in itertools.pairwise(bounds)]


def _reduce_all(modes: Sequence[RowMode], logits: NDArray[np.float32]) -> list[Reduced]:
    """Do what `reduce_rows` does from all logits, on several threads."""
    parts = max(1, min(MAX_SAMPLING_THREADS, count_threads(), logits.size // MIN_LOGITS_PER_THREAD))
    if parts == 1:
        return _reduce_part(modes, logits)
    bounds = [len(modes) * part // parts for part in range(parts + 1)]
    ranges = [(modes[start:stop], logits[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return list(itertools.chain.from_iterable(run_parallel(_reduce_part, ranges)))


def _reduce_part(modes: Sequence[RowMode], logits: NDArray[np.float32]) -> list[Reduced]:
    """Do what `_reduce_all` does on one thread."""
    results: list[Reduced] = [None] * len(modes)
    start = 0
    for stop in range(1, len(modes) + 1):
        if stop < len(modes) and modes[stop] == modes[start]:
            continue
        mode = modes[start]
        if mode == 0:
            results[start:stop] = logits[start:stop].argmax(axis=1).tolist()
        elif mode is not None:
            results[start:stop] = build_shortlists(logits[start:stop], mode)
        start = stop
    return results


def build_shortlists(logits: NDArray[np.float32], count: int) -> list[NDArray[np.void] | None]:
    """Return for each row the candidates whose logits are at least its `count`-th largest, ordered by index.

    None for a row if a shortlist would not save time. A row is divided into columns of 64. At least `count` logits are
    as large as the column maximum of rank `count`, so the logits that are as large include the `count` largest.
    For 128,000 logits this takes a fifth of the time of the native chain.

    >>> build_shortlists(np.arange(12_800, dtype=np.float32)[None], 2)[0]["id"]
    array([12798, 12799], dtype=int32)
    """
    rows, size = logits.shape
    depth, width = SHORTLIST_COLUMN_DEPTH, size // SHORTLIST_COLUMN_DEPTH
    if size < MIN_SHORTLIST_CANDIDATES or count > width:
        return [None] * rows
    columns = logits[:, : depth * width].reshape(rows, depth, width)
    maxima = columns.max(axis=1)
    thresholds = np.partition(maxima, width - count, axis=1)[:, width - count, None]
    # Only columns whose maximum reaches the threshold have such logits, and the rest of the row may.
    row_of_column, column = np.nonzero(maxima >= thresholds)
    found, level = np.nonzero(columns[row_of_column, :, column] >= thresholds[row_of_column])
    rest_row, rest_index = np.nonzero(logits[:, depth * width :] >= thresholds)
    row = np.concatenate([row_of_column[found], rest_row])
    tokens = np.concatenate([level * width + column[found], depth * width + rest_index])
    order = np.lexsort((tokens, row))
    row, tokens = row[order], tokens[order]
    values = logits[row, tokens]
    bounds = np.searchsorted(row, np.arange(rows + 1)).tolist()
    shortlists: list[NDArray[np.void] | None] = []
    for start, stop in itertools.pairwise(bounds):
        if stop - start < count:  # some logits are NaN
            shortlists.append(None)
            continue
        of_row = values[start:stop]
        is_candidate = of_row >= np.partition(of_row, stop - start - count)[stop - start - count]
        candidates = np.zeros(np.count_nonzero(is_candidate), dtype=CANDIDATE_DTYPE)
        candidates["id"], candidates["logit"] = tokens[start:stop][is_candidate], of_row[is_candidate]
        shortlists.append(candidates)
    return shortlists


def find_largest(logits: NDArray[np.float32], count: int) -> list[int]:
    """Return the tokens of the `count` largest logits of a row, largest first. Of equal logits, the smaller token.

    >>> find_largest(np.array([1, 3, 2, 3], dtype=np.float32), 3)
    [1, 3, 2]
    """
    if count == 0:
        return []
    shortlist = build_shortlists(logits[None], count)[0]
    tokens = np.arange(len(logits)) if shortlist is None else shortlist["id"]
    largest: list[int] = tokens[np.argsort(-logits[tokens], kind="stable")[:count]].tolist()
    return largest
