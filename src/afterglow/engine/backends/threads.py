"""Number of threads of a decode: fewer while other programs use the cores.

The threads of a decode meet at a barrier after every node of the graph. If one of them shares its core with another
program, all wait for it at every barrier. With one thread less, nobody waits. Whether that is faster depends on the
model, the scheduler of the system and the number of busy programs, so both are tried and the faster one is used.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import psutil

from afterglow.llama.context import LlamaContext
from afterglow.llama.library.cpu import list_usable_cores

SAMPLE_SECONDS = 0.25  # of one measurement of the load
CONTENDED_CORES = 0.3  # cores that the threads lack, from which on fewer threads are tried
UNCONTENDED_CORES = 0.15
LOAD_CHANGE_CORES = 0.3  # change of the load after which the next trial does not wait for its time
MAX_ROWS = 16  # decodes with more rows are prefill: they meet at few barriers per second and use all threads
TRIAL_DECODES = 8  # of slow decodes, as many as take half a second, but at least three
MIN_TRIAL_DECODES = 3
MAX_TRIAL_SECONDS = 0.5
MIN_GAIN_FRACTION = 0.05  # fraction of the decode time that a change has to save
TRIAL_INTERVAL_SECONDS = 5.0  # doubled after each trial that failed
MAX_TRIAL_INTERVAL_SECONDS = 40.0


@dataclass(slots=True)
class DecodeTimes:
    """Seconds of the latest decodes with one thread count, with their rows."""

    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=TRIAL_DECODES))

    @property
    def is_complete(self) -> bool:
        count = len(self.samples)
        is_slow = sum(seconds for _, seconds in self.samples) >= MAX_TRIAL_SECONDS
        return count == TRIAL_DECODES or (count >= MIN_TRIAL_DECODES and is_slow)

    def compare(self, other: DecodeTimes) -> float | None:
        """Return the time of these decodes over that of `other`, for equal rows. None if there are no equal rows."""
        rows = {rows for rows, _ in self.samples} & {rows for rows, _ in other.samples}
        if not rows:
            return None
        return sum(map(self._average, rows)) / sum(map(other._average, rows))

    def _average(self, rows: int) -> float:
        return mean(seconds for sample_rows, seconds in self.samples if sample_rows == rows)


class ThreadGovernor:
    """Chooses the threads of each decode from the load of the cores and from decode times. Pure: it measures nothing.

    >>> governor = ThreadGovernor(max_threads=2, cores=2)
    >>> governor.choose(rows=1)
    2
    >>> for number in range(8):
    ...     governor.record(rows=1, seconds=0.04, now=0.04 * number)
    >>> governor.observe(other_cores=1.0, now=0.4)  # a trial begins
    >>> governor.choose(rows=1)
    1
    """

    def __init__(self, max_threads: int, cores: int) -> None:
        self.max_threads = max_threads
        self.trials = 0
        self._cores = cores
        self._free_threads = max_threads  # those that leave other programs their cores
        self._settled_load: float | None = None  # cores that other programs used after the last trial
        self._uses_fewer = False
        self._is_trial = False
        self._is_load_known = False  # a measurement during the trial confirmed its number of threads
        self._next_trial_at = 0.0
        self._trial_interval = TRIAL_INTERVAL_SECONDS
        self._times, self._previous_times = (
            DecodeTimes(),
            DecodeTimes(),
        )  # with the threads in use, and before the trial

    def choose(self, rows: int) -> int:
        """Return the threads of a decode."""
        return self._free_threads if self._uses_fewer and rows <= MAX_ROWS else self.max_threads

    def record(self, rows: int, seconds: float, now: float) -> None:
        """Record the time of a decode. This may end a trial."""
        if rows > MAX_ROWS:
            return
        self._times.samples.append((rows, seconds))
        if self._is_trial and self._is_load_known and self._times.is_complete:
            self._end_trial(now)

    def observe(self, other_cores: float, now: float) -> None:
        """Record the cores that other programs use. This may begin a trial."""
        if self._settled_load is None or abs(other_cores - self._settled_load) >= LOAD_CHANGE_CORES:
            if self._settled_load is not None:  # what the last trial found may be wrong now
                self._trial_interval, self._next_trial_at = TRIAL_INTERVAL_SECONDS, now + SAMPLE_SECONDS
            self._settled_load = other_cores
        free_cores = self._cores - other_cores
        threshold = UNCONTENDED_CORES if self._uses_fewer else CONTENDED_CORES
        if self.max_threads - free_cores < threshold:
            if self._uses_fewer:
                self._uses_fewer, self._times = False, DecodeTimes()
            self._is_trial = False
            return
        threads = max(1, min(self.max_threads - 1, int(free_cores + CONTENDED_CORES)))
        if self._is_trial and self._uses_fewer and threads < self._free_threads:
            self._times = DecodeTimes()  # other programs had less than they could use: try again with fewer
        else:
            self._is_load_known = True
        if self._uses_fewer or not self._is_trial:
            self._free_threads = threads
        if not self._is_trial and now >= self._next_trial_at and self._times.is_complete:
            self._begin_trial()

    def _begin_trial(self) -> None:
        self.trials += 1
        self._is_trial, self._is_load_known, self._uses_fewer = True, False, not self._uses_fewer
        self._previous_times, self._times = self._times, DecodeTimes()

    def _end_trial(self, now: float) -> None:
        """Keep the threads of the trial if they are faster."""
        self._is_trial = False
        ratio = self._times.compare(self._previous_times)
        if ratio is not None and ratio <= 1 - MIN_GAIN_FRACTION:
            self._trial_interval = TRIAL_INTERVAL_SECONDS
        else:
            self._uses_fewer, self._times = not self._uses_fewer, self._previous_times
            self._trial_interval = min(2 * self._trial_interval, MAX_TRIAL_INTERVAL_SECONDS)
        self._next_trial_at = now + self._trial_interval
        self._settled_load = None  # it depends on the threads in use


class CoreMeter:
    """Measures how many of the cores of this process other processes use."""

    def __init__(self) -> None:
        self._core_ids = list_usable_cores()
        self.cores = len(self._core_ids)
        self.restart()

    def restart(self) -> None:
        """Begin a measurement."""
        self.started_at, self._idle_seconds, self._own_seconds = self._read()

    def measure(self) -> float:
        """Return the average since the measurement began, and begin the next one."""
        started_at, idle_seconds, own_seconds = self.started_at, self._idle_seconds, self._own_seconds
        self.restart()
        available = self._idle_seconds - idle_seconds + self._own_seconds - own_seconds
        return max(0.0, self.cores - available / (self.started_at - started_at))

    def _read(self) -> tuple[float, float, float]:
        times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in self._core_ids]
        idle_seconds = sum(core.idle + getattr(core, "iowait", 0.0) for core in times)
        return time.perf_counter(), idle_seconds, time.process_time()


class AdaptiveThreads:
    """Sets the threads of contexts before each decode, as a governor chooses them."""

    def __init__(self, contexts: Sequence[LlamaContext]) -> None:
        self._contexts = contexts
        self._meter = CoreMeter()
        self.governor = ThreadGovernor(contexts[0].settings.threads, self._meter.cores)
        self._threads = self.governor.max_threads
        self._started_at = self._ended_at = time.perf_counter()

    def prepare_decode(self, rows: int) -> None:
        """Set the threads for the next decode."""
        self._started_at = time.perf_counter()
        if self._started_at - self._ended_at > SAMPLE_SECONDS:  # nothing was decoded: other programs may have ended
            self._meter.restart()
        if (threads := self.governor.choose(rows)) != self._threads:
            self._threads = threads
            for context in self._contexts:
                context.set_threads(threads, threads)

    def record_decode(self, rows: int) -> None:
        """Record the decode that ended now, and the load of the cores if it is time to."""
        now = self._ended_at = time.perf_counter()
        self.governor.record(rows, now - self._started_at, now)
        if now - self._meter.started_at >= SAMPLE_SECONDS:
            self.governor.observe(self._meter.measure(), now)


def is_dynamic_allowed() -> bool:
    """Return whether the number of threads may change: unless OpenMP's own switch for that is off."""
    return os.environ.get("OMP_DYNAMIC", "").strip().lower() != "false"
