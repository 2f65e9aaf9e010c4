"""Placement of busy sequences: adjacent ones are computed together. Pure functions of sequence ids.

llama.cpp computes each run of sequences with consecutive ids separately, and each run reads all weights. Eight answers
that are spread over 64 sequences take several times as long as eight adjacent ones.
"""

from __future__ import annotations

from collections.abc import Sequence

# Decodes over which a move must pay: about as many as the rest of a short answer takes.
PAYBACK_DECODES = 32


def count_runs(seq_ids: Sequence[int]) -> int:
    """Return the number of runs of consecutive ids.

    >>> count_runs([4, 2, 3, 9])
    2
    """
    present = set(seq_ids)
    return sum(seq_id - 1 not in present for seq_id in present)


def plan_moves(busy: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the moves (from, to) that make the busy sequences adjacent, with the fewest entries to copy.

    `lengths` has the entries of every sequence, busy or not. What a target holds moves away first, to any free place.
    The moves to empty targets come first, so that none of the later targets is a free place.

    >>> plan_moves([0, 1, 5], [100, 100, 0, 0, 0, 20])
    [(5, 2)]
    """
    present, count = set(busy), len(busy)

    def list_moves(start: int) -> list[tuple[int, int]]:
        window = range(start, start + count)
        outside = sorted(present.difference(window))
        free = sorted((seq_id for seq_id in window if seq_id not in present), key=lambda seq_id: lengths[seq_id])
        return list(zip(outside, free, strict=True))

    plans = [list_moves(start) for start in range(len(lengths) - count + 1)]
    return min(plans, key=lambda moves: (count_copied_entries(moves, lengths), len(moves)))


def count_copied_entries(moves: Sequence[tuple[int, int]], lengths: Sequence[int]) -> int:
    """Return the entries that moves copy: those that move, and those that make room.

    >>> count_copied_entries([(5, 2)], [100, 100, 30, 0, 0, 20])
    50
    """
    return sum(lengths[source] + lengths[target] for source, target in moves)
