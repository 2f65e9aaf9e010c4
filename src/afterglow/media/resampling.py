"""Sounds at another number of samples a second."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.media.contents import Sound

RATES = range(4_000, 384_001)  # samples a second
WIDTH = 32  # of the filter for another rate, in samples of the lower rate to each side


def resampled(sound: Sound, rate: int) -> Sound:
    """The same sound with another number of samples a second; what is too high for them is taken out.

    >>> resampled(Sound(rate=48_000, samples=bytes(4 * 48_000)), 16_000).seconds
    1.0
    """
    if rate not in RATES:
        raise InvalidArgument("rate", f"must be from {RATES.start:,} to {RATES[-1]:,} samples a second, not {rate:,}")
    if rate == sound.rate:
        return sound
    given = np.frombuffer(sound.samples, np.float32)
    up, down = _ratio(sound.rate, rate)
    count = resampled_count(len(given), sound.rate, rate)
    reach = math.ceil(WIDTH * max(1.0, down / up))  # samples of the given sound to each side
    padded = np.concatenate([np.zeros(reach, np.float32), given, np.zeros(reach + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    made = np.empty(count, np.float32)
    for phase in range(min(up, count)):  # samples that lie alike between two given ones share a filter
        first, offset = divmod(phase * down, up)
        alike = windows[first + 1 :: down][: len(made[phase::up])]
        made[phase::up] = alike @ _filter(offset / up, reach, min(1.0, up / down))
    return Sound(rate=rate, samples=np.clip(made, -1, 1).tobytes())


def resampled_count(count: int, before: int, after: int) -> int:
    """How many samples there are when so many are brought from one rate to another.

    >>> resampled_count(44_100, 44_100, 16_000)
    16000
    """
    up, down = _ratio(before, after)
    return max(1, count * up // down)


def _ratio(before: int, after: int) -> tuple[int, int]:
    common = math.gcd(after, before)
    return after // common, before // common


def _filter(offset: float, reach: int, cutoff: float) -> NDArray[np.float32]:
    """A windowed sinc: the weights of the samples around a place that lies `offset` after one of them."""
    distance = np.arange(-reach + 1, reach + 1) - offset
    window = np.cos(np.pi * distance / (2 * reach + 2)) ** 2
    weights = np.sinc(distance * cutoff * 0.95) * window
    return np.asarray(weights / weights.sum(), np.float32)
