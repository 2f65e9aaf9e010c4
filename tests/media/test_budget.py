"""Byte budget of decoders."""

from __future__ import annotations

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from afterglow.errors import InvalidMedia
from afterglow.media import images
from afterglow.media.budget import DECODE_BUDGET, MediaBudget
from afterglow.media.images import DECODE_BYTES_PER_PIXEL, decode_image
from afterglow.media.policy import MediaPolicy


def test_threads_wait_until_their_bytes_fit():
    budget, lock, used, peak = MediaBudget(), threading.Lock(), 0, 0

    def use(nbytes: int) -> None:
        nonlocal used, peak
        with budget.reserve(nbytes, limit=100):
            with lock:
                used += nbytes
                peak = max(peak, used)
            time.sleep(0.002)
            with lock:
                used -= nbytes

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, [30, 40, 50, 60] * 10))
    assert 60 < peak <= 100
    assert budget.used_bytes == 0


def test_more_than_the_limit_is_used_alone():
    budget = MediaBudget()
    with budget.reserve(500, limit=100):
        assert budget.used_bytes == 500
    assert budget.used_bytes == 0


def test_concurrent_decoders_of_a_process_share_one_budget(monkeypatch):
    file, peak = io.BytesIO(), 0
    Image.new("RGB", (200, 100)).save(file, "PNG")
    convert = images._to_upright_rgb

    def convert_and_record(image):
        nonlocal peak
        peak = max(peak, DECODE_BUDGET.used_bytes)
        time.sleep(0.01)
        return convert(image)

    monkeypatch.setattr(images, "_to_upright_rgb", convert_and_record)
    needed = DECODE_BYTES_PER_PIXEL * 200 * 100
    policy = MediaPolicy(max_decoded_bytes=2 * needed)
    with ThreadPoolExecutor(6) as pool:
        decoded = list(pool.map(lambda _: decode_image(file.getvalue(), policy), range(6)))
    assert len(decoded) == 6
    assert peak == 2 * needed
    monkeypatch.setattr(images, "_to_upright_rgb", lambda _: 1 / 0)
    with pytest.raises(InvalidMedia, match="damaged"):
        decode_image(file.getvalue(), policy)
    assert DECODE_BUDGET.used_bytes == 0
