"""Adaptive thread count: compute threads follow the cores that other processes leave free.

The threads of a decode meet at a barrier after every graph node and spin there. If one of them shares its core with a
busy process, all of them wait for it, hundreds of times per decode: on two cores beside two busy processes, two threads
took up to 3 s for a token that one thread computes in 20 ms (benchmarks/LOG.md).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

SAMPLE_INTERVAL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU time of the cores this process may use, in core-seconds since an arbitrary start."""

    wall_seconds: float
    idle_seconds: float  # of all these cores
    own_seconds: float  # used by this process


def read_cpu_sample() -> CpuSample:
    """Return the current CPU times."""
    per_core = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(per_core))
    idle = sum(per_core[core].idle + getattr(per_core[core], "iowait", 0.0) for core in usable if core < len(per_core))
    return CpuSample(time.monotonic(), idle, time.process_time())


def choose_threads(maximum: int, before: CpuSample, after: CpuSample) -> int:
    """Return how many threads to use: the cores that were idle or used by this process, at least 1.

    Half a core of other work is tolerated, so that a client on the same machine does not cost a thread.

    >>> choose_threads(8, CpuSample(0.0, 0.0, 0.0), CpuSample(1.0, 0.0, 5.9))
    6
    """
    elapsed = after.wall_seconds - before.wall_seconds
    available = (after.idle_seconds - before.idle_seconds + after.own_seconds - before.own_seconds) / elapsed
    return max(1, min(maximum, int(available + 0.5)))


class AdaptiveThreads:
    """Thread count of one context, sampled at most every `SAMPLE_INTERVAL_SECONDS`."""

    def __init__(self, maximum: int) -> None:
        self.maximum = self.threads = maximum
        self._sample = read_cpu_sample()

    def poll(self) -> int | None:
        """Return the new thread count if it changes now, else None."""
        if time.monotonic() - self._sample.wall_seconds < SAMPLE_INTERVAL_SECONDS:
            return None
        before, self._sample = self._sample, read_cpu_sample()
        threads = choose_threads(self.maximum, before, self._sample)
        if threads == self.threads:
            return None
        self.threads = threads
        return threads
