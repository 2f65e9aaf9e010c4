"""Candidates of a draw: the largest logits of a row, found without sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afterglow.llama import candidates
from afterglow.llama.candidates import find_largest
from afterglow.llama.top_logits import MIN_SHORTLIST_CANDIDATES


def sort_all(logits: NDArray[np.float32], count: int) -> list[int]:
    return np.argsort(-logits, kind="stable")[:count].tolist()


@given(
    size=st.sampled_from([1, 100, MIN_SHORTLIST_CANDIDATES, MIN_SHORTLIST_CANDIDATES + 17, 49_152]),
    count=st.integers(0, 200),
    levels=st.sampled_from([1, 2, 5, 1000, 10**9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_largest_logits_are_those_of_a_stable_sort(size: int, count: int, levels: int, seed: int) -> None:
    """With few levels, many logits are equal."""
    logits = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    assert find_largest(logits, count) == sort_all(logits, count)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_largest_logits_beside_values_that_are_no_numbers(value: float) -> None:
    logits = np.random.default_rng(1).normal(size=49_152).astype(np.float32)
    logits[100:200] = value
    assert find_largest(logits, 20) == sort_all(logits, 20)


def test_a_large_vocabulary_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of 128,256 logits takes longer than the decode of a token on a GPU."""
    sorted_counts, sort = [], np.argsort

    def count_and_sort(values: NDArray[np.float32], kind: str) -> NDArray[np.intp]:
        sorted_counts.append(len(values))
        return sort(values, kind=kind)

    monkeypatch.setattr(candidates.np, "argsort", count_and_sort)
    logits = np.random.default_rng(1).normal(size=128_256).astype(np.float32)
    assert len(find_largest(logits, 20)) == 20
    assert sorted_counts == [20]
