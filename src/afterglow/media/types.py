"""Decoded images and audio, the input of a projector."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np

from afterglow.errors import InvalidArgument
from afterglow.media.policy import Modality


@dataclass(frozen=True)
class ImageData:
    """RGB image: rows from the top, three bytes per pixel.

    >>> red = ImageData(width=2, height=1, pixels=bytes([255, 0, 0] * 2))
    >>> red.digest == ImageData(width=1, height=2, pixels=red.pixels).digest
    False
    """

    modality: ClassVar[Modality] = "image"
    width: int
    height: int
    pixels: bytes

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1 or len(self.pixels) != 3 * self.width * self.height:
            size = f"{self.width} by {self.height}"
            raise InvalidArgument("pixels", f"{len(self.pixels)} bytes do not match {size} pixels (3 bytes each)")

    @property
    def nbytes(self) -> int:
        return len(self.pixels)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the size and the pixels."""
        digest = hashlib.sha256(b"picture %d %d " % (self.width, self.height))
        digest.update(self.pixels)  # no copy: an image can have 100 MB
        return digest.digest()


@dataclass(frozen=True)
class AudioData:
    """Mono audio: 32-bit float samples between -1 and 1 in native byte order.

    >>> AudioData(sample_rate=16_000, samples=bytes(4 * 16_000)).seconds
    1.0
    """

    modality: ClassVar[Modality] = "audio"
    sample_rate: int
    samples: bytes

    def __post_init__(self) -> None:
        if self.sample_rate < 1 or not self.samples or len(self.samples) % 4:
            raise InvalidArgument("samples", f"{len(self.samples)} bytes at {self.sample_rate} Hz are not valid audio")
        if not np.isfinite(np.frombuffer(self.samples, np.float32)).all():
            raise InvalidArgument("samples", "must be finite numbers")

    @property
    def nbytes(self) -> int:
        return len(self.samples)

    @property
    def seconds(self) -> float:
        return len(self.samples) / 4 / self.sample_rate

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the sample rate and the samples."""
        digest = hashlib.sha256(b"sound %d " % self.sample_rate)
        digest.update(self.samples)
        return digest.digest()


MediaData: TypeAlias = ImageData | AudioData
