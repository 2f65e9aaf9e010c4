"""Resampling audio to another sample rate."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.errors import InvalidArgument
from afterglow.media.resampling import resample
from afterglow.media.types import AudioData
from support.media_files import sine_wave


def get_samples(audio: AudioData) -> np.ndarray:
    return np.frombuffer(audio.samples, np.float32)


@pytest.mark.parametrize(("before", "after"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_050, 24_000)])
def test_resampling_preserves_a_tone(before, after):
    audio = AudioData(sample_rate=before, samples=sine_wave(before, 1.0).tobytes())
    resampled = resample(audio, after)
    assert resampled.sample_rate == after
    assert len(get_samples(resampled)) == after
    assert np.abs(get_samples(resampled) - sine_wave(after, 1.0)[:, 0])[500:-500].max() < 1e-4


def test_frequencies_above_the_nyquist_limit_are_removed_without_aliasing():
    high = resample(AudioData(sample_rate=48_000, samples=sine_wave(48_000, 1.0, pitch=10_000).tobytes()), 16_000)
    assert np.abs(get_samples(high)[500:-500]).max() < 1e-3


def test_the_same_rate_returns_the_same_audio_and_rate_zero_is_rejected():
    audio = AudioData(sample_rate=16_000, samples=sine_wave().tobytes())
    assert resample(audio, 16_000) is audio
    with pytest.raises(InvalidArgument, match="rate"):
        resample(audio, 0)


def test_a_single_sample_can_be_resampled():
    for before, after in ((16_000, 44_100), (44_100, 16_000)):
        assert get_samples(resample(AudioData(sample_rate=before, samples=bytes(4)), after)).tolist()
