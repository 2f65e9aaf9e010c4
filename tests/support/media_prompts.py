"""Images and audio for tests, and prompts that contain them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.multimodal.encoder_cache import MediaEntry, build_media_entries
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.media import MediaPart
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.projector import get_media_size
from afterglow.llama.settings import ContextSettings
from afterglow.media.types import AudioData, ImageData, MediaData
from afterglow.testing import FakeProjector, models
from afterglow.testing.models.notes import LETTERS, PITCHES_HZ

PAIRS = {"attention": "projector-llava", "window": "projector-gemma3", "hybrid": "projector-qwen"}
COLORS = {"K": (20, 20, 20), "R": (230, 20, 20), "G": (20, 230, 20), "B": (20, 20, 230), "Y": (230, 230, 20)}


def noise_image(seed: int, width: int = 64, height: int = 48) -> ImageData:
    """Return an image of random pixels."""
    numbers = np.random.default_rng(seed).integers(0, 256, 3 * width * height, dtype=np.uint8)
    return ImageData(width, height, numbers.tobytes())


def color_image(letter: str, width: int = 40, height: int = 30) -> ImageData:
    """Return an image of one color with a little noise."""
    noise = np.random.default_rng(ord(letter)).integers(-15, 16, (height, width, 3))
    return ImageData(width, height, (np.array(COLORS[letter]) + noise).astype(np.uint8).tobytes())


def note_audio(letter: str, seconds: float = 0.5, rate: int = 16_000, volume: float = 0.5) -> AudioData:
    """Return a note with a little noise; its wave does not start at phase 0."""
    pitch = PITCHES_HZ[LETTERS.index(letter.encode())]
    turns = 2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(ord(letter)).normal(0, 0.02, len(turns))
    return AudioData(rate, (volume * (np.sin(turns + 1) + noise)).astype(np.float32).tobytes())


def llama_engine(
    kind: str = "attention",
    projector: str | None = None,
    *,
    settings: EngineSettings | None = None,
    kv_unified: bool = False,
    **context: int,
) -> Engine:
    """Return an engine on a tiny model with its projector."""
    defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 8, "threads": 1}
    return EngineSpec(
        path=models.get_path(kind),
        projector_path=models.get_path(projector or PAIRS[kind]),
        context_settings=ContextSettings(**{**defaults, **context}, kv_unified=kv_unified),
        engine_settings=settings or EngineSettings(),
    )()


MediaPrompt = tuple[list[Entry], dict[bytes, MediaPart]]


def build_prompt(engine: Engine, *parts: MediaData | Sequence[Entry]) -> MediaPrompt:
    """Return the entries and the media of a prompt of tokens, images and audio."""
    entries: list[Entry] = []
    media: dict[bytes, MediaPart] = {}
    for item in parts:
        if not isinstance(item, MediaData):
            entries += item
            continue
        for entry, part in build_entries(engine, item):
            entries.append(entry)
            if part is not None:
                media[entry.digest] = part
    return entries, media


def build_entries(engine: Engine, content: MediaData) -> list[MediaEntry]:
    """Return the entries of one content, measured by the projector of the engine."""
    projector = engine.backend.projector
    if isinstance(projector, FakeProjector):
        return build_media_entries(content, projector.measure(content), projector.key)
    measures = remote_calls.measure_media(engine, [get_media_size(content)])
    return build_media_entries(content, measures.measured[0], measures.projector_key)


def check_positions(engine: Engine) -> None:
    """Check the recorded positions against the KV cache.

    After an image with M-RoPE, the last position of the KV cache is before the recorded one.
    """
    for slot in engine.prefix_cache.slots:
        positions = engine.backend.get_position_range(slot.seq_id)
        assert not slot.partial_media_rows
        if len(slot) and slot.entries[-1] < 0:
            assert positions is not None
            assert positions[1] < slot.position
        else:
            assert (positions[1] + 1 if positions else 0) == slot.position
