"""Cost model: measured times of prefill, decode, transfers and disk reads on this machine. The planner uses it."""

from __future__ import annotations

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
