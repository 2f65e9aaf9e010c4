"""Sounds at another number of samples a second."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.media.types import AudioData

SUPPORTED_SAMPLE_RATES = range(4_000, 384_001)  # samples a second
FILTER_HALF_WIDTH_SAMPLES = 32  # of the filter for another rate, in samples of the lower rate to each side


def resample(audio: AudioData, sample_rate: int) -> AudioData:
    """The same sound with another number of samples a second; what is too high for them is taken out.

    >>> resampled(Sound(rate=48_000, samples=bytes(4 * 48_000)), 16_000).seconds
    1.0
    """
    if sample_rate not in SUPPORTED_SAMPLE_RATES:
        raise InvalidArgument(
            "sample_rate",
            f"must be from {SUPPORTED_SAMPLE_RATES.start:,} to {SUPPORTED_SAMPLE_RATES[-1]:,} samples a second, not {sample_rate:,}",
        )
    if sample_rate == audio.sample_rate:
        return audio
    given = np.frombuffer(audio.samples, np.float32)
    up, down = _reduce_ratio(audio.sample_rate, sample_rate)
    count = count_resampled(len(given), audio.sample_rate, sample_rate)
    reach = math.ceil(FILTER_HALF_WIDTH_SAMPLES * max(1.0, down / up))  # samples of the given sound to each side
    padded = np.concatenate([np.zeros(reach, np.float32), given, np.zeros(reach + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    made = np.empty(count, np.float32)
    for phase in range(min(up, count)):  # samples that lie alike between two given ones share a filter
        first, offset = divmod(phase * down, up)
        alike = windows[first + 1 :: down][: len(made[phase::up])]
        made[phase::up] = alike @ _build_sinc_filter(offset / up, reach, min(1.0, up / down))
    return AudioData(sample_rate=sample_rate, samples=np.clip(made, -1, 1).tobytes())


def count_resampled(count: int, source_rate: int, target_rate: int) -> int:
    """How many samples there are when so many are brought from one rate to another.

    >>> resampled_count(44_100, 44_100, 16_000)
    16000
    """
    up, down = _reduce_ratio(source_rate, target_rate)
    return max(1, count * up // down)


def _reduce_ratio(source_rate: int, target_rate: int) -> tuple[int, int]:
    common = math.gcd(target_rate, source_rate)
    return target_rate // common, source_rate // common


def _build_sinc_filter(offset: float, half_width: int, cutoff: float) -> NDArray[np.float32]:
    """A windowed sinc: the weights of the samples around a place that lies `offset` after one of them."""
    distance = np.arange(-half_width + 1, half_width + 1) - offset
    window = np.cos(np.pi * distance / (2 * half_width + 2)) ** 2
    weights = np.sinc(distance * cutoff * 0.95) * window
    return np.asarray(weights / weights.sum(), np.float32)
