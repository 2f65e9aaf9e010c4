"""Runs copies of large buffers on several threads. NumPy, file reads and checksums release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

ResultT = TypeVar("ResultT")
MAX_THREADS = 4  # more do not copy faster: they share the memory bus


@cache
def get_copy_threads() -> ThreadPoolExecutor:
    """Return the threads of this process for copies of buffers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(MAX_THREADS, cores), thread_name_prefix="afterglow-copy")


def run_parallel(function: Callable[..., ResultT], arguments: Iterable[tuple[object, ...]]) -> list[ResultT]:
    """Call a function with each tuple of arguments, on several threads; return the results in order.

    >>> run_parallel(max, [(1, 2), (4, 3)])
    [2, 4]
    """
    return list(get_copy_threads().map(lambda values: function(*values), arguments))
