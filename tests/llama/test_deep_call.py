"""Calls on a thread with a stack of a chosen size."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from afterglow.llama.deep_call import LARGE_STACK_BYTES, call_with_stack


def recurse(depth: int) -> int:
    """Recurse through C: each level of `sorted` with a key takes stack."""
    return 1 if depth == 0 else 1 + sorted([depth], key=lambda _: recurse(depth - 1))[0]


def test_the_result_of_the_call_is_returned():
    assert call_with_stack(1, lambda: "result") == "result"
    assert call_with_stack(LARGE_STACK_BYTES, lambda: threading.get_ident()) != threading.get_ident()


def test_an_error_is_raised_in_the_thread_of_the_caller():
    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        call_with_stack(1, fail)


def test_the_stack_has_the_requested_size():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        assert call_with_stack(256 * 1024**2, lambda: recurse(20_000)) == 20_001
    finally:
        sys.setrecursionlimit(limit)


def test_the_stack_size_of_other_threads_is_unchanged():
    before = threading.stack_size()
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda n: call_with_stack(n * 1024**2, lambda: n), range(1, 40)))
    assert sizes == list(range(1, 40))
    assert threading.stack_size() == before


def test_a_stack_that_the_system_does_not_provide_is_a_memory_error():
    before = threading.stack_size()
    with pytest.raises(MemoryError, match="1,125,899,906,842,624 bytes"):
        call_with_stack(2**50, lambda: None)
    assert threading.stack_size() == before
