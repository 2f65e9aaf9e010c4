"""Resamples audio to another sample rate with a windowed-sinc filter."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.media.types import AudioData

SUPPORTED_SAMPLE_RATES = range(4_000, 384_001)  # Hz
FILTER_HALF_WIDTH_SAMPLES = 32  # in samples of the lower rate


def resample(audio: AudioData, sample_rate: int) -> AudioData:
    """Resample audio; removes frequencies above half of the new sample rate.

    >>> resample(AudioData(sample_rate=48_000, samples=bytes(4 * 48_000)), 16_000).seconds
    1.0
    """
    if sample_rate not in SUPPORTED_SAMPLE_RATES:
        lowest, highest = SUPPORTED_SAMPLE_RATES.start, SUPPORTED_SAMPLE_RATES[-1]
        raise InvalidArgument("sample_rate", f"must be from {lowest:,} to {highest:,} Hz, not {sample_rate:,}")
    if sample_rate == audio.sample_rate:
        return audio
    samples = np.frombuffer(audio.samples, np.float32)
    up, down = _reduce_ratio(audio.sample_rate, sample_rate)
    count = count_resampled(len(samples), audio.sample_rate, sample_rate)
    half_width = math.ceil(FILTER_HALF_WIDTH_SAMPLES * max(1.0, down / up))  # in input samples
    padded = np.concatenate([np.zeros(half_width, np.float32), samples, np.zeros(half_width + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half_width)
    output = np.empty(count, np.float32)
    for phase in range(min(up, count)):  # output samples with the same offset between two input samples share a filter
        first, offset = divmod(phase * down, up)
        phase_windows = windows[first + 1 :: down][: len(output[phase::up])]
        output[phase::up] = phase_windows @ _build_sinc_filter(offset / up, half_width, min(1.0, up / down))
    return AudioData(sample_rate=sample_rate, samples=np.clip(output, -1, 1).tobytes())


def count_resampled(count: int, source_rate: int, target_rate: int) -> int:
    """Return the number of samples after resampling `count` samples.

    >>> count_resampled(44_100, 44_100, 16_000)
    16000
    """
    up, down = _reduce_ratio(source_rate, target_rate)
    return max(1, count * up // down)


def _reduce_ratio(source_rate: int, target_rate: int) -> tuple[int, int]:
    divisor = math.gcd(target_rate, source_rate)
    return target_rate // divisor, source_rate // divisor


def _build_sinc_filter(offset: float, half_width: int, cutoff: float) -> NDArray[np.float32]:
    """Return windowed-sinc weights of the samples around a position that is `offset` after one of them."""
    distance = np.arange(-half_width + 1, half_width + 1) - offset
    window = np.cos(np.pi * distance / (2 * half_width + 2)) ** 2
    weights = np.sinc(distance * cutoff * 0.95) * window
    return np.asarray(weights / weights.sum(), np.float32)
