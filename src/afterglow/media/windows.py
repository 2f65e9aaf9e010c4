"""Windows of long recordings: they end where it is quiet, so that few words are cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FRAME_SECONDS = 0.05  # resolution of a cut
EARLIEST_CUT_FRACTION = 0.6  # share of a window


def split_at_silence(samples: NDArray[np.float32], sample_rate: int, window_seconds: float) -> list[tuple[int, int]]:
    """Return the start and stop of windows of at most `window_seconds`, in samples. Each ends at its quietest frame.

    A window has at least 60 % of the length, except the last one. They do not overlap.

    >>> samples = np.ones(100, np.float32)
    >>> samples[70:75] = 0
    >>> split_at_silence(samples, 100, 0.8)
    [(0, 71), (71, 100)]
    """
    size, frame = max(1, int(window_seconds * sample_rate)), max(1, int(FRAME_SECONDS * sample_rate))
    windows, start = [], 0
    while len(samples) - start > size:
        first = start + max(1, int(EARLIEST_CUT_FRACTION * size))
        stop = start + size
        count = (stop - first) // frame
        if count:
            energy = np.square(samples[first : first + count * frame]).reshape(count, frame).sum(axis=1)
            quietest = count - 1 - int(np.argmin(energy[::-1]))  # the last one, if several are as quiet
            stop = first + quietest * frame + (frame + 1) // 2
        windows.append((start, stop))
        start = stop
    return [*windows, (start, len(samples))]
