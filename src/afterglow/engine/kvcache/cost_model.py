"""What things take on this machine, measured as they happen. Plans are made with these numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

NEW_SAMPLE_WEIGHT = 0.2  # of a new measurement
MIN_MEASURED_BYTES = 256 * 1024  # bytes


class CostModel:
    """Running averages, in seconds."""

    def __init__(self) -> None:
        self.seconds_per_entry = 1e-3  # to compute one prompt entry
        self.latest_seconds_per_entry = 1e-3  # the same, of the newest decode alone
        self.seconds_per_byte = 2e-10  # to move one byte of memory
        self.bytes_per_entry = 20_000.0  # of a whole state
        self.seconds_per_disk_byte = 1e-9  # to read one byte of a file, and to check it
        self.seconds_per_step = 1e-3  # of a decode with nothing but generating rows
        self.step_costs = StepCosts()
        self._has_entry_time = False  # whether `per_entry` was ever measured
        self._has_entry_size = False  # whether `bytes_per_entry` was ever measured

    def record_prefill(self, entries: int, seconds: float) -> None:
        """A decode of prompt entries took so long."""
        self.latest_seconds_per_entry = measured = max(seconds / entries, 1e-9)
        # A machine that is slower than was guessed is believed at once: what is too cheap to compute is not kept.
        weight = 1.0 if not self._has_entry_time and measured > self.seconds_per_entry else NEW_SAMPLE_WEIGHT
        self.seconds_per_entry += weight * (measured - self.seconds_per_entry)
        self._has_entry_time = True

    def record_decode_step(self, seconds: float) -> None:
        """A decode of generating rows only took so long."""
        self.seconds_per_step += NEW_SAMPLE_WEIGHT * (seconds - self.seconds_per_step)

    def record_transfer(self, nbytes: int, seconds: float, entries: int) -> None:
        """Saving, loading or copying a state took so long. A small one tells only what a call costs."""
        if nbytes >= MIN_MEASURED_BYTES:
            self.seconds_per_byte += NEW_SAMPLE_WEIGHT * (seconds / nbytes - self.seconds_per_byte)
        if nbytes and entries:
            weight = (
                NEW_SAMPLE_WEIGHT if self._has_entry_size else 1.0
            )  # a size needs no averaging, but for short sequences
            self.bytes_per_entry += weight * (nbytes / entries - self.bytes_per_entry)
            self._has_entry_size = True

    def record_disk_read(self, nbytes: int, seconds: float) -> None:
        """Reading files took so long."""
        if nbytes >= MIN_MEASURED_BYTES:
            self.seconds_per_disk_byte += NEW_SAMPLE_WEIGHT * (seconds / nbytes - self.seconds_per_disk_byte)

    def estimate_copy_seconds(self, entries: int) -> float:
        """Expected seconds to copy a sequence of so many entries: there and back."""
        return 2 * entries * self.bytes_per_entry * self.seconds_per_byte


class RecentTimings:
    """What something takes: of its last measurements one of the shortest. Whatever else the machine does makes them
    longer, and says nothing of it.

    >>> price = Recent()
    >>> for seconds in (9.0, 1.2, 1.0):
    ...     price.add(seconds)
    >>> price.seconds
    1.0
    """

    MAX_SAMPLES = 8

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)

    @property
    def seconds(self) -> float:
        """Asked for far less often than measured."""
        return sorted(self._samples)[(len(self._samples) - 1) // 4] if self._samples else 0.0

    def __len__(self) -> int:
        return len(self._samples)


class StepCosts:
    """Seconds of a decode by how many generating rows it has: what guessing ahead costs on this machine."""

    MIN_SAMPLES = 3  # measurements after which a number can be judged by

    def __init__(self) -> None:
        self._measured_rows: list[int] = []  # that were measured, ascending
        self._timings: dict[
            int, RecentTimings
        ] = {}  # empty after the first decode of its kind, which prepares the others

    def record(self, rows: int, seconds: float) -> None:
        """A decode of so many generating rows took so long."""
        price = self._timings.get(rows)
        if price is None:
            self._timings[rows] = RecentTimings()
            return
        if not len(price):
            self._measured_rows.insert(bisect_left(self._measured_rows, rows), rows)
        price.add(seconds)

    @property
    def max_measured_rows(self) -> int:
        """The most rows that were measured."""
        return self._measured_rows[-1] if self._measured_rows else 0

    def is_measured(self, rows: int) -> bool:
        """Whether a decode of so many rows was measured often enough to be judged by."""
        return len(self._timings.get(rows, ())) >= self.MIN_SAMPLES

    def is_first(self, rows: int) -> bool:
        """Whether a decode of so many rows would be the first: it prepares what the others use."""
        return rows not in self._timings

    def estimate_seconds(self, rows: int, seconds_per_row: float) -> float:
        """Expected seconds of so many rows: between those that were measured, or beyond as they grew; `per_row` is for
        each row more where only one number was measured. More rows never cost less."""
        if not self._measured_rows:
            return rows * seconds_per_row
        place = bisect_left(self._measured_rows, rows)
        if place == len(self._measured_rows):
            return self._extrapolate(rows, seconds_per_row)
        upper = self._measured_rows[place]
        if upper == rows or place == 0:
            return self._timings[upper].seconds
        lower = self._measured_rows[place - 1]
        low, high = self._timings[lower].seconds, max(self._timings[lower].seconds, self._timings[upper].seconds)
        return low + (high - low) * (rows - lower) / (upper - lower)

    def _extrapolate(self, rows: int, seconds_per_row: float) -> float:
        last = self._measured_rows[-1]
        slope = seconds_per_row
        if len(self._measured_rows) > 1:
            before = self._measured_rows[-2]
            slope = max(0.0, self._timings[last].seconds - self._timings[before].seconds) / (last - before)
        return self._timings[last].seconds + slope * (rows - last)
