"""Cost model: measured times of prefill, decode, transfers and disk reads on this machine. The planner uses it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

NEW_SAMPLE_WEIGHT = 0.2  # weight of a new measurement in a running average
MIN_MEASURED_BYTES = 256 * 1024  # smaller transfers measure only the overhead of a call


class CostModel:
    """Running averages of measured costs. The initial values are estimates until something was measured."""

    def __init__(self) -> None:
        self.seconds_per_entry = 1e-3  # prefill of one entry
        self.latest_seconds_per_entry = 1e-3  # the same, of the latest decode only
        self.seconds_per_byte = 2e-10  # transfer between the device and RAM
        self.bytes_per_entry = 20_000.0  # of a full state
        self.seconds_per_disk_byte = 1e-9  # reading and verifying a file
        self.seconds_per_step = 1e-3  # decode without prompt entries
        self.step_costs = StepCosts()
        self._has_entry_time = False  # whether `seconds_per_entry` was measured
        self._has_entry_size = False  # whether `bytes_per_entry` was measured

    def record_prefill(self, entries: int, seconds: float) -> None:
        """Record a decode of prompt entries."""
        self.latest_seconds_per_entry = measured = max(seconds / entries, 1e-9)
        # The first measurement replaces the estimate if it is slower: if computing seems too cheap, nothing is stored.
        weight = 1.0 if not self._has_entry_time and measured > self.seconds_per_entry else NEW_SAMPLE_WEIGHT
        self.seconds_per_entry += weight * (measured - self.seconds_per_entry)
        self._has_entry_time = True

    def record_decode_step(self, seconds: float) -> None:
        """Record a decode without prompt entries."""
        self.seconds_per_step += NEW_SAMPLE_WEIGHT * (seconds - self.seconds_per_step)

    def record_transfer(self, nbytes: int, seconds: float, entries: int) -> None:
        """Record saving, loading or copying the state of a sequence of `entries` entries (0: size not measured)."""
        if nbytes >= MIN_MEASURED_BYTES:
            self.seconds_per_byte += NEW_SAMPLE_WEIGHT * (seconds / nbytes - self.seconds_per_byte)
        if nbytes and entries:
            # Sizes need no averaging, except over short sequences.
            weight = NEW_SAMPLE_WEIGHT if self._has_entry_size else 1.0
            self.bytes_per_entry += weight * (nbytes / entries - self.bytes_per_entry)
            self._has_entry_size = True

    def record_disk_read(self, nbytes: int, seconds: float) -> None:
        """Record reading files."""
        if nbytes >= MIN_MEASURED_BYTES:
            self.seconds_per_disk_byte += NEW_SAMPLE_WEIGHT * (seconds / nbytes - self.seconds_per_disk_byte)

    def estimate_copy_seconds(self, entries: int) -> float:
        """Return the expected seconds to copy a sequence between streams: one transfer out and one in."""
        return 2 * entries * self.bytes_per_entry * self.seconds_per_byte


class RecentTimings:
    """Duration of an operation: the lower quartile of its latest measurements.

    Other load on the machine only ever makes a measurement longer, so the short ones are the accurate ones.

    >>> timings = RecentTimings()
    >>> for seconds in (9.0, 1.2, 1.0):
    ...     timings.add(seconds)
    >>> timings.seconds
    1.0
    """

    MAX_SAMPLES = 8

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)

    @property
    def seconds(self) -> float:
        """Duration in seconds. Sorted on access, because it is read far less often than measured."""
        return sorted(self._samples)[(len(self._samples) - 1) // 4] if self._samples else 0.0

    def __len__(self) -> int:
        return len(self._samples)


class StepCosts:
    """Seconds of a decode step by its number of generating rows: the price of draft tokens on this machine."""

    MIN_SAMPLES = 3  # measurements before a row count is trusted

    def __init__(self) -> None:
        self._measured_rows: list[int] = []  # measured row counts, ascending
        # By row count. Empty after the first decode of that size, which is not measured: it prepares the later ones.
        self._timings: dict[int, RecentTimings] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Record a decode step with this number of generating rows."""
        timings = self._timings.get(rows)
        if timings is None:
            self._timings[rows] = RecentTimings()
            return
        if not len(timings):
            self._measured_rows.insert(bisect_left(self._measured_rows, rows), rows)
        timings.add(seconds)

    @property
    def max_measured_rows(self) -> int:
        return self._measured_rows[-1] if self._measured_rows else 0

    def is_measured(self, rows: int) -> bool:
        """Return whether steps with this number of rows were measured often enough."""
        return len(self._timings.get(rows, ())) >= self.MIN_SAMPLES

    def is_first(self, rows: int) -> bool:
        """Return whether a step with this number of rows would be the first, which prepares the later ones."""
        return rows not in self._timings

    def estimate_seconds(self, rows: int, seconds_per_row: float) -> float:
        """Return the expected seconds of a step: interpolated between measured row counts, extrapolated beyond them.

        `seconds_per_row` is the slope if only one row count was measured. More rows never cost less.
        """
        if not self._measured_rows:
            return rows * seconds_per_row
        index = bisect_left(self._measured_rows, rows)
        if index == len(self._measured_rows):
            return self._extrapolate(rows, seconds_per_row)
        upper = self._measured_rows[index]
        if upper == rows or index == 0:
            return self._timings[upper].seconds
        lower = self._measured_rows[index - 1]
        low, high = self._timings[lower].seconds, max(self._timings[lower].seconds, self._timings[upper].seconds)
        return low + (high - low) * (rows - lower) / (upper - lower)

    def _extrapolate(self, rows: int, seconds_per_row: float) -> float:
        last = self._measured_rows[-1]
        slope = seconds_per_row
        if len(self._measured_rows) > 1:
            previous = self._measured_rows[-2]
            slope = max(0.0, self._timings[last].seconds - self._timings[previous].seconds) / (last - previous)
        return self._timings[last].seconds + slope * (rows - last)
