"""A small trained vision model, if its files are next to the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import afterglow
from afterglow import ImageData

pytestmark = pytest.mark.native
FOLDER = Path(__file__).parents[2].parent / "shared" / "fixtures" / "models"
FILES = (FOLDER / "train-vlm.gguf", FOLDER / "tiny-mmproj-llava.gguf")
COLORS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (30, 60, 220),
    "yellow": (230, 220, 30),
    "black": (15, 15, 15),
    "white": (240, 240, 240),
}


def build_image(color: str, seed: int) -> ImageData:
    noise = np.random.default_rng(seed).integers(-12, 13, (64, 64, 3))
    return ImageData(64, 64, (np.array(COLORS[color]) + noise).astype(np.uint8).tobytes())


def test_a_trained_vision_model_names_colors_cold_and_warm() -> None:
    if not all(path.is_file() for path in FILES):
        pytest.skip(f"{FOLDER} has no trained vision model")
    with afterglow.load(FILES[0], projector=FILES[1], context=256, threads=1) as model:
        for encoded in (1, 0):
            for seed, color in enumerate(COLORS):
                answer = model.complete(["Image: ", build_image(color, seed), "\n"], max_tokens=20, temperature=0)
                assert answer.text.startswith(f"It is a {color} "), answer.text
                assert (answer.usage.media_tokens, answer.usage.encoded_media) == (16, encoded)
        assert answer.usage.cached_media_tokens == 16
