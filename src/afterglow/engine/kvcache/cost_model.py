"""Cost model: measured times of prefill, decode, transfers and disk reads on this machine. The planner uses it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Any

from afterglow.engine.types.tile import TILE_ROWS, RowTile

NEW_SAMPLE_WEIGHT = 0.2  # weight of a new measurement in a running average
MIN_MEASURED_BYTES = 256 * 1024  # smaller transfers measure only the overhead of a call
MIN_MEASURED_READ_BYTES = 4 * 1024**2  # the same for reads of files, which have more of it
INITIAL_SECONDS_PER_ENTRY = 1e-3  # until a prefill was measured
INITIAL_SECONDS_PER_BYTE = 2e-10  # until a transfer was measured


class CostModel:
    """Measured costs. The initial values are estimates; the first measurement replaces them."""

    def __init__(self, row_tile: RowTile | None = None) -> None:
        """With the `row_tile` of the backend, if it has one."""
        self._row_tile = row_tile
        self.prefill_costs = PrefillCosts()
        self.latest_seconds_per_entry = INITIAL_SECONDS_PER_ENTRY  # prefill of one entry in the latest decode
        self.cell_bytes_per_entry = 0.0  # of a full state without its partial state; 0: not measured
        self.seconds_per_step = 1e-3  # decode without prompt entries
        self.step_costs = StepCosts()
        self._time_unit = RecentTimings()  # seconds of the unit of `RowTile.estimate_time`
        self._transfer = RecentTimings()  # seconds per byte
        self._disk = RunningAverage(1e-9)  # not the fastest reads, as for transfers: those come from the page cache
        self._bytes_per_entry = RunningAverage(20_000.0)

    @property
    def seconds_per_entry(self) -> float:
        """Seconds of the prefill of one entry of a long prompt."""
        return self.prefill_costs.seconds_per_entry

    @property
    def bytes_per_entry(self) -> float:
        """Bytes of a full state per entry."""
        return self._bytes_per_entry.value

    @property
    def seconds_per_byte(self) -> float:
        """Seconds to transfer a byte between the device and RAM."""
        return self._transfer.seconds if len(self._transfer) else INITIAL_SECONDS_PER_BYTE

    @property
    def seconds_per_disk_byte(self) -> float:
        """Seconds to read and verify a byte of a file."""
        return self._disk.value

    @property
    def is_disk_measured(self) -> bool:
        """Whether this engine has read files."""
        return self._disk.is_measured

    def record_prefill(self, entries: int, seconds: float, spans: Iterable[tuple[int, int]] = ()) -> None:
        """Record a decode of prompt entries. `spans` are its rows of each sequence, with the cells before them."""
        if self._row_tile is not None and (spans := list(spans)):
            self._time_unit.add(seconds / self._row_tile.estimate_decode_time(spans))
        self.latest_seconds_per_entry = max(seconds / entries, 1e-9)
        self.prefill_costs.record(entries, seconds)

    def record_decode_step(self, seconds: float) -> None:
        """Record a decode without prompt entries."""
        self.seconds_per_step += NEW_SAMPLE_WEIGHT * (seconds - self.seconds_per_step)

    def record_transfer(self, nbytes: int, seconds: float, entries: int) -> None:
        """Record saving, loading or copying the state of a sequence of `entries` entries (0: size not measured)."""
        if nbytes >= MIN_MEASURED_BYTES:
            self._transfer.add(seconds / nbytes)
        if nbytes and entries:
            self._bytes_per_entry.add(nbytes / entries)  # sizes need no averaging, except over short sequences

    def record_disk_read(self, nbytes: int, seconds: float) -> None:
        """Record reading files."""
        if nbytes >= MIN_MEASURED_READ_BYTES:
            self._disk.add(seconds / nbytes)

    def to_dict(self) -> dict[str, object]:
        """Return the measured costs of prefill and transfers, to be stored for the next engine of the model."""
        costs: dict[str, object] = {
            "prefill": self.prefill_costs.to_dict(),
            "cell_bytes_per_entry": self.cell_bytes_per_entry,
        }
        if len(self._transfer):
            costs["transfer"] = self._transfer.seconds
        if self._bytes_per_entry.is_measured:
            costs["bytes_per_entry"] = self.bytes_per_entry
        if self._disk.is_measured:
            costs["disk"] = self._disk.value
        return costs

    def add_stored(self, costs: dict[str, Any]) -> None:
        """Add the result of `to_dict` of an earlier engine. The first measurement of each cost replaces it."""
        self.cell_bytes_per_entry = float(costs["cell_bytes_per_entry"])
        for size, seconds in costs["prefill"].items():
            self.prefill_costs.add_stored(int(size), float(seconds))
        if len(self.prefill_costs):
            self.latest_seconds_per_entry = self.seconds_per_entry
        if "transfer" in costs:
            self._transfer.add_stored(float(costs["transfer"]))
        if "bytes_per_entry" in costs:
            self._bytes_per_entry.value = float(costs["bytes_per_entry"])
            self._bytes_per_entry.is_measured = True
        if "disk" in costs:
            self._disk.value = float(costs["disk"])

    @property
    def seconds_per_row(self) -> float:
        """Seconds of a decode of one row, which reads all weights."""
        return self.step_costs.estimate_seconds(1, self.seconds_per_step)

    def estimate_prefill_seconds(self, entries: int, after: int) -> float:
        """Return the expected seconds to compute entries after others.

        >>> cost_model = CostModel(RowTile(balanced_cells=1000))
        >>> cost_model.record_prefill(512, 0.512, [(512, 0)])
        >>> cost_model.estimate_prefill_seconds(20, after=0), cost_model.estimate_prefill_seconds(20, after=1990)
        (0.0202, 0.06)
        """
        if self._row_tile is None or not len(self._time_unit) or not entries:
            return entries * self.seconds_per_entry
        return self._row_tile.estimate_decode_time([(entries, after + entries // 2)]) * self._time_unit.seconds

    def estimate_seconds_per_entry(self, after: int) -> float:
        """Return the expected seconds of one entry of a prompt after others, computed in row tiles if there are any."""
        if self._row_tile is None or not len(self._time_unit):
            return self.seconds_per_entry
        return self._row_tile.estimate_time(TILE_ROWS, after) / TILE_ROWS * self._time_unit.seconds

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
        self._is_stored = False  # the only sample is of an earlier engine

    def add(self, seconds: float) -> None:
        if self._is_stored:
            self._samples.clear()
            self._is_stored = False
        self._samples.append(seconds)

    def add_stored(self, seconds: float) -> None:
        """Add the duration that an earlier engine measured. The first measurement replaces it."""
        self.add(seconds)
        self._is_stored = True

    def list_samples(self) -> list[float]:
        """Return the latest measurements, oldest first."""
        return list(self._samples)

    @property
    def seconds(self) -> float:
        """Duration in seconds. Sorted on access, because it is read far less often than measured."""
        return sorted(self._samples)[(len(self._samples) - 1) // 4] if self._samples else 0.0

    def __len__(self) -> int:
        return len(self._samples)


class RunningAverage:
    """Average in which new measurements have a fixed weight. The first one replaces the initial estimate.

    >>> average = RunningAverage(5.0)
    >>> average.add(1.0)
    >>> average.add(2.0)
    >>> average.value
    1.2
    """

    def __init__(self, initial: float) -> None:
        self.value = initial
        self.is_measured = False

    def add(self, measured: float) -> None:
        weight = NEW_SAMPLE_WEIGHT if self.is_measured else 1.0
        self.value += weight * (measured - self.value)
        self.is_measured = True


class PrefillCosts:
    """Seconds per entry of a prefill, by its number of entries in classes that double.

    Part of a decode does not depend on its length; on a GPU, 16 entries take about as long as 500. Only the longest
    prefills show what one more entry costs, which is what a plan compares.

    >>> costs = PrefillCosts()
    >>> costs.record(16, 0.004)
    >>> costs.record(512, 0.016)
    >>> costs.record(20, 0.005)
    >>> costs.seconds_per_entry
    3.125e-05
    """

    def __init__(self) -> None:
        self._classes: dict[int, RecentTimings] = {}  # seconds per entry, by the binary logarithm of the entries

    def record(self, entries: int, seconds: float) -> None:
        """Record a decode of this many prompt entries."""
        self._classes.setdefault(entries.bit_length(), RecentTimings()).add(max(seconds / entries, 1e-9))

    def add_stored(self, size: int, seconds_per_entry: float) -> None:
        """Add what an earlier engine measured for a class."""
        self._classes.setdefault(size, RecentTimings()).add_stored(seconds_per_entry)

    def to_dict(self) -> dict[str, float]:
        """Return the seconds per entry by class."""
        return {str(size): timings.seconds for size, timings in self._classes.items()}

    def __len__(self) -> int:
        return len(self._classes)

    @property
    def is_measured(self) -> bool:
        """Whether a prefill was recorded."""
        return bool(self._classes)

    @property
    def seconds_per_entry(self) -> float:
        return self._classes[max(self._classes)].seconds if self._classes else INITIAL_SECONDS_PER_ENTRY


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

    def list_samples(self) -> dict[int, list[float]]:
        """Return the latest measurements by row count."""
        return {rows: timings.list_samples() for rows, timings in self._timings.items()}

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
