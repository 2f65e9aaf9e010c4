"""What things take on this machine, measured as they happen. Plans are made with these numbers."""

from __future__ import annotations

WEIGHT = 0.2  # of a new measurement
TELLING = 256 * 1024  # bytes


class Costs:
    """Running averages, in seconds."""

    def __init__(self) -> None:
        self.per_entry = 1e-3  # to compute one prompt entry
        self.per_byte = 2e-10  # to move one byte of memory
        self.bytes_per_entry = 20_000.0  # of a whole state
        self.per_disk_byte = 1e-9  # to read one byte of a file, and to check it
        self.per_step = 1e-3  # of a decode with nothing but generating rows
        self._sized = False  # whether `bytes_per_entry` was ever measured

    def computed(self, entries: int, seconds: float) -> None:
        """A decode of prompt entries took so long."""
        self.per_entry += WEIGHT * (seconds / entries - self.per_entry)

    def stepped(self, seconds: float) -> None:
        """A decode of generating rows only took so long."""
        self.per_disk_byte = 1e-9  # to read one byte of a file, and to check it
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
