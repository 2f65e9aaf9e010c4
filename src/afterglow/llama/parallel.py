"""Runs work on large buffers on several threads. NumPy, file reads and checksums release the GIL."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

ResultT = TypeVar("ResultT")
MAX_THREADS = 16  # more are hardly faster: they share the memory bus
MIN_PARALLEL_BYTES = 4 * 1024**2  # handing smaller copies to other threads takes longer than they save


@cache
def count_threads() -> int:
    """Return the number of threads of this process for work on buffers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)


@cache
def get_buffer_threads() -> ThreadPoolExecutor:
    """Return the threads of this process for work on buffers."""
    return ThreadPoolExecutor(count_threads(), thread_name_prefix="afterglow-buffer")


def run_parallel(function: Callable[..., ResultT], arguments: Iterable[tuple[object, ...]]) -> list[ResultT]:
    """Call a function with each tuple of arguments, on several threads; return the results in order.

    >>> run_parallel(max, [(1, 2), (4, 3)])
    [2, 4]
    """
    return list(get_buffer_threads().map(lambda values: function(*values), arguments))


def copy_parallel(
    nbytes: int, function: Callable[..., ResultT], arguments: Iterable[tuple[object, ...]]
) -> list[ResultT]:
    """Call a function that copies `nbytes` altogether as `run_parallel` does, on one thread if that is faster.

    >>> copy_parallel(100, max, [(1, 2), (4, 3)])
    [2, 4]
    """
    if nbytes < MIN_PARALLEL_BYTES:
        return list(itertools.starmap(function, arguments))
    return run_parallel(function, arguments)
