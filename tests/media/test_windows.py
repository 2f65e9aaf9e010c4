"""Windows of recordings end where it is quiet, are not too long, and contain every sample once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from afterglow.media.windows import split_at_silence

RATE = 1000


def test_windows_end_in_pauses() -> None:
    samples = np.random.default_rng(1).normal(0, 0.3, 10 * RATE).astype(np.float32)
    for pause in (2.5, 5.2, 7.4):
        samples[int(pause * RATE) : int((pause + 0.1) * RATE)] = 0
    windows = split_at_silence(samples, RATE, 3.0)
    assert [start / RATE for start, _ in windows[1:]] == pytest.approx([2.55, 5.25, 7.45], abs=0.05)


@pytest.mark.parametrize("count", [1, 2999, 3000, 3001, 3002, 50_000])
@pytest.mark.parametrize("seconds", [0.01, 1.0, 3.0])
def test_windows_contain_every_sample_once(count: int, seconds: float) -> None:
    samples = np.random.default_rng(2).normal(0, 0.3, count).astype(np.float32)
    windows = split_at_silence(samples, RATE, seconds)
    assert (windows[0][0], windows[-1][1]) == (0, count)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(windows))
    assert all(0 < stop - start <= seconds * RATE for start, stop in windows)


def test_silence_is_cut_late() -> None:
    windows = split_at_silence(np.zeros(9 * RATE, np.float32), RATE, 3.0)
    assert len(windows) == 4
    assert windows[0][1] > 2.9 * RATE
