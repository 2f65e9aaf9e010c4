"""Placement of busy sequences: adjacent ones are computed together. Pure functions of sequence ids.

llama.cpp computes each run of sequences with consecutive ids separately, and each run reads all weights. Eight answers
that are spread over 64 sequences take several times as long as eight adjacent ones.
"""

from __future__ import annotations

from collections.abc import Sequence

# Decodes over which a move must pay: about as many as the rest of a short answer takes.
PAYBACK_DECODES = 32
# Time of a copy within a GPU, as a share of a decode of one row. Measured on an H200: 0.8 (1 B) and 0.4 (8 B).
DEVICE_COPY_DECODES = 0.6


def count_runs(seq_ids: Sequence[int]) -> int:
    """Return the number of runs of consecutive ids.

    >>> count_runs([4, 2, 3, 9])
    2
    """
    present = set(seq_ids)
    return sum(seq_id - 1 not in present for seq_id in present)


def plan_moves(busy: Sequence[int], costs: Sequence[int]) -> list[tuple[int, int]]:
    """Return the moves (from, to) that make the busy sequences adjacent, with the least to copy.

    `costs` has the cost of copying each sequence, busy or not: its entries, or 1 if all copies take equally long; 0 if
    it is empty. What a target holds moves away first, to any free place. The moves to empty targets come first, so that
    none of the later targets is a free place.

    >>> plan_moves([0, 1, 5], [100, 100, 0, 0, 0, 20])
    [(5, 2)]
    """
    present, count = set(busy), len(busy)

    def list_moves(start: int) -> list[tuple[int, int]]:
        window = range(start, start + count)
        outside = sorted(present.difference(window))
        free = sorted((seq_id for seq_id in window if seq_id not in present), key=lambda seq_id: costs[seq_id])
        return list(zip(outside, free, strict=True))

    plans = [list_moves(start) for start in range(len(costs) - count + 1)]
    return min(plans, key=lambda moves: (compute_copy_cost(moves, costs), len(moves)))


def compute_copy_cost(moves: Sequence[tuple[int, int]], costs: Sequence[int]) -> int:
    """Return the cost of moves: of the sequences that move, and of those that make room.

    >>> compute_copy_cost([(5, 2)], [100, 100, 30, 0, 0, 20])
    50
    """
    return sum(costs[source] + costs[target] for source, target in moves)
