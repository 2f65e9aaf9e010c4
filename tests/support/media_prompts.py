"""Pictures and sounds for tests, and prompts with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.multimodal.encoder_cache import build_media_entries
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.media import MediaPart
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.projector import get_media_size
from afterglow.llama.settings import ContextSettings
from afterglow.media.types import AudioData, ImageData, MediaData
from afterglow.testing import FakeProjector, models
from afterglow.testing.models.notes import LETTERS, PITCHES_HZ

PAIRS = {"attention": "projector-llava", "window": "projector-gemma3", "hybrid": "projector-qwen"}
COLOURS = {"K": (20, 20, 20), "R": (230, 20, 20), "G": (20, 230, 20), "B": (20, 20, 230), "Y": (230, 230, 20)}


def noisy(seed: int, width: int = 64, height: int = 48) -> ImageData:
    """A picture of nothing; another for each seed."""
    numbers = np.random.default_rng(seed).integers(0, 256, 3 * width * height, dtype=np.uint8)
    return ImageData(width, height, numbers.tobytes())


def coloured(letter: str, width: int = 40, height: int = 30) -> ImageData:
    """A picture of one colour, a little uneven."""
    noise = np.random.default_rng(ord(letter)).integers(-15, 16, (height, width, 3))
    return ImageData(width, height, (np.array(COLOURS[letter]) + noise).astype(np.uint8).tobytes())


def played(letter: str, seconds: float = 0.5, rate: int = 16_000, volume: float = 0.5) -> AudioData:
    """A note with a little noise around it, which does not begin where a wave does."""
    pitch = PITCHES_HZ[LETTERS.index(letter.encode())]
    turns = 2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(ord(letter)).normal(0, 0.02, len(turns))
    return AudioData(rate, (volume * (np.sin(turns + 1) + noise)).astype(np.float32).tobytes())


def llama_engine(
    kind: str = "attention",
    projector: str | None = None,
    *,
    settings: EngineSettings | None = None,
    unified: bool = False,
    **context: int,
) -> Engine:
    """An engine on a tiny model with its projector."""
    defaults = {"cells": 4096, "sequences": 4, "batch": 128, "ubatch": 64, "outputs": 8, "threads": 1}
    return EngineSpec(
        path=models.get_path(kind),
        projector_path=models.get_path(projector or PAIRS[kind]),
        context_settings=ContextSettings(**{**defaults, **context}, kv_unified=unified),
        engine_settings=settings or EngineSettings(),
    )()


Asked = tuple[list[Entry], dict[bytes, MediaPart]]


def asked(engine: Engine, *items: MediaData | Sequence[Entry]) -> Asked:
    """The entries and the contents of a prompt out of tokens, pictures and sounds."""
    entries: list[Entry] = []
    contents: dict[bytes, MediaPart] = {}
    for item in items:
        if not isinstance(item, MediaData):
            entries += item
            continue
        for entry, part in seen(engine, item):
            entries.append(entry)
            if part is not None:
                contents[entry.digest] = part
    return entries, contents


def seen(engine: Engine, content: MediaData):
    projector = engine.backend.projector
    if isinstance(projector, FakeProjector):
        return build_media_entries(content, projector.measure(content), projector.key)
    measures = remote_calls.measure_media(engine, [get_media_size(content)])
    return build_media_entries(content, measures.measured[0], measures.projector_key)


def check_positions(engine: Engine) -> None:
    """The record equals memory. After a picture with M-RoPE memory's last position lies before the record's."""
    for slot in engine.prefix_cache.slots:
        held = engine.backend.get_position_range(slot.seq_id)
        assert not slot.partial_media_rows
        if len(slot) and slot.entries[-1] < 0:
            assert held is not None
            assert held[1] < slot.position
        else:
            assert (held[1] + 1 if held else 0) == slot.position
