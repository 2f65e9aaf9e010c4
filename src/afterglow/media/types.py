"""Pictures and sounds, decoded: what a projector takes, whatever file or address they came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from afterglow.errors import InvalidArgument


@dataclass(frozen=True)
class ImageData:
    """Pixels in rows from the top, three bytes each: red, green, blue.

    >>> red = Picture(width=2, height=1, pixels=bytes([255, 0, 0] * 2))
    >>> red.digest == Picture(width=1, height=2, pixels=red.pixels).digest
    False
    """

    width: int
    height: int
    pixels: bytes

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1 or len(self.pixels) != 3 * self.width * self.height:
            raise InvalidArgument(
                "pixels", f"{len(self.pixels)} bytes are no picture of {self.width} by {self.height} (3 bytes each)"
            )

    @property
    def nbytes(self) -> int:
        return len(self.pixels)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of what is seen. Pictures of the same size are never taken for one another."""
        return hashlib.sha256(b"picture %d %d " % (self.width, self.height) + self.pixels).digest()


@dataclass(frozen=True)
class AudioData:
    """One channel of samples, 32-bit floats between -1 and 1 in the machine's order, so many each second.

    >>> Sound(rate=16_000, samples=bytes(4 * 16_000)).seconds
    1.0
    """

    sample_rate: int
    samples: bytes

    def __post_init__(self) -> None:
        if self.sample_rate < 1 or not self.samples or len(self.samples) % 4:
            raise InvalidArgument("samples", f"{len(self.samples)} bytes at {self.sample_rate} a second are no sound")
        if not np.isfinite(np.frombuffer(self.samples, np.float32)).all():
            raise InvalidArgument("samples", "have numbers in them that are not finite")

    @property
    def nbytes(self) -> int:
        return len(self.samples)

    @property
    def seconds(self) -> float:
        return len(self.samples) / 4 / self.sample_rate

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of what is heard."""
        return hashlib.sha256(b"sound %d " % self.sample_rate + self.samples).digest()


MediaData: TypeAlias = ImageData | AudioData
