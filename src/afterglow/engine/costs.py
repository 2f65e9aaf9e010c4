"""What things take on this machine, measured as they happen. Plans are made with these numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

WEIGHT = 0.2  # of a new measurement
TELLING = 256 * 1024  # bytes


class Costs:
    """Running averages, in seconds."""

    def __init__(self) -> None:
        self.per_entry = 1e-3  # to compute one prompt entry
        self.per_entry_lately = 1e-3  # the same, of the newest decode alone
        self.per_byte = 2e-10  # to move one byte of memory
        self.bytes_per_entry = 20_000.0  # of a whole state
        self.per_disk_byte = 1e-9  # to read one byte of a file, and to check it
        self.per_step = 1e-3  # of a decode with nothing but generating rows
        self.steps = StepCosts()
        self._timed = False  # whether `per_entry` was ever measured
        self._sized = False  # whether `bytes_per_entry` was ever measured

    def computed(self, entries: int, seconds: float) -> None:
        """A decode of prompt entries took so long."""
        self.per_entry_lately = measured = max(seconds / entries, 1e-9)
        # A machine that is slower than was guessed is believed at once: what is too cheap to compute is not kept.
        weight = 1.0 if not self._timed and measured > self.per_entry else WEIGHT
        self.per_entry += weight * (measured - self.per_entry)
        self._timed = True

    def stepped(self, seconds: float) -> None:
        """A decode of generating rows only took so long."""
        self.per_step += WEIGHT * (seconds - self.per_step)

    def moved(self, nbytes: int, seconds: float, entries: int) -> None:
        """Saving, loading or copying a state took so long. A small one tells only what a call costs."""
        if nbytes >= TELLING:
            self.per_byte += WEIGHT * (seconds / nbytes - self.per_byte)
        if nbytes and entries:
            weight = WEIGHT if self._sized else 1.0  # a size needs no averaging, but for short sequences
            self.bytes_per_entry += weight * (nbytes / entries - self.bytes_per_entry)
            self._sized = True

    def read(self, nbytes: int, seconds: float) -> None:
        """Reading files took so long."""
        if nbytes >= TELLING:
            self.per_disk_byte += WEIGHT * (seconds / nbytes - self.per_disk_byte)

    def of_copy(self, entries: int) -> float:
        """Expected seconds to copy a sequence of so many entries: there and back."""
        return 2 * entries * self.bytes_per_entry * self.per_byte


class Recent:
    """What something takes: of its last measurements one of the shortest. Whatever else the machine does makes them
    longer, and says nothing of it.

    >>> price = Recent()
    >>> for seconds in (9.0, 1.2, 1.0):
    ...     price.add(seconds)
    >>> price.seconds
    1.0
    """

    KEPT = 8

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=self.KEPT)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """Asked for far less often than measured."""
        return sorted(self._last)[(len(self._last) - 1) // 4] if self._last else 0.0

    def __len__(self) -> int:
        return len(self._last)


class StepCosts:
    """Seconds of a decode by how many generating rows it has: what guessing ahead costs on this machine."""

    SETTLED = 3  # measurements after which a number can be judged by

    def __init__(self) -> None:
        self._rows: list[int] = []  # that were measured, ascending
        self._prices: dict[int, Recent] = {}  # empty after the first decode of its kind, which prepares the others

    def measured(self, rows: int, seconds: float) -> None:
        """A decode of so many generating rows took so long."""
        price = self._prices.get(rows)
        if price is None:
            self._prices[rows] = Recent()
            return
        if not len(price):
            self._rows.insert(bisect_left(self._rows, rows), rows)
        price.add(seconds)

    @property
    def longest(self) -> int:
        """The most rows that were measured."""
        return self._rows[-1] if self._rows else 0

    def known(self, rows: int) -> bool:
        """Whether a decode of so many rows was measured often enough to be judged by."""
        return len(self._prices.get(rows, ())) >= self.SETTLED

    def first(self, rows: int) -> bool:
        """Whether a decode of so many rows would be the first: it prepares what the others use."""
        return rows not in self._prices

    def of(self, rows: int, per_row: float) -> float:
        """Expected seconds of so many rows: between those that were measured, or beyond as they grew; `per_row` is for
        each row more where only one number was measured. More rows never cost less."""
        if not self._rows:
            return rows * per_row
        place = bisect_left(self._rows, rows)
        if place == len(self._rows):
            return self._beyond(rows, per_row)
        upper = self._rows[place]
        if upper == rows or place == 0:
            return self._prices[upper].seconds
        lower = self._rows[place - 1]
        low, high = self._prices[lower].seconds, max(self._prices[lower].seconds, self._prices[upper].seconds)
        return low + (high - low) * (rows - lower) / (upper - lower)

    def _beyond(self, rows: int, per_row: float) -> float:
        last = self._rows[-1]
        slope = per_row
        if len(self._rows) > 1:
            before = self._rows[-2]
            slope = max(0.0, self._prices[last].seconds - self._prices[before].seconds) / (last - before)
        return self._prices[last].seconds + slope * (rows - last)
