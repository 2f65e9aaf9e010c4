"""Pictures and sounds for tests, and prompts with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afterglow import tiny
from afterglow.engine import services
from afterglow.engine.engine import Engine
from afterglow.engine.entries import Entry
from afterglow.engine.pictures import Part, entries_of
from afterglow.engine.recipe import LlamaEngine
from afterglow.engine.settings import EngineSettings
from afterglow.llama.projector import measurable
from afterglow.llama.settings import ContextSettings
from afterglow.media.contents import Content, Picture, Sound
from afterglow.testing import FakeProjector
from afterglow.tiny.notes import LETTERS, PITCHES

PAIRS = {"attention": "projector-llava", "window": "projector-gemma3", "hybrid": "projector-qwen"}
COLOURS = {"K": (20, 20, 20), "R": (230, 20, 20), "G": (20, 230, 20), "B": (20, 20, 230), "Y": (230, 230, 20)}


def noisy(seed: int, width: int = 64, height: int = 48) -> Picture:
    """A picture of nothing; another for each seed."""
    numbers = np.random.default_rng(seed).integers(0, 256, 3 * width * height, dtype=np.uint8)
    return Picture(width, height, numbers.tobytes())


def coloured(letter: str, width: int = 40, height: int = 30) -> Picture:
    """A picture of one colour, a little uneven."""
    noise = np.random.default_rng(ord(letter)).integers(-15, 16, (height, width, 3))
    return Picture(width, height, (np.array(COLOURS[letter]) + noise).astype(np.uint8).tobytes())


def played(letter: str, seconds: float = 0.5, rate: int = 16_000, volume: float = 0.5) -> Sound:
    """A note with a little noise around it, which does not begin where a wave does."""
    pitch = PITCHES[LETTERS.index(letter.encode())]
    turns = 2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(ord(letter)).normal(0, 0.02, len(turns))
    return Sound(rate, (volume * (np.sin(turns + 1) + noise)).astype(np.float32).tobytes())


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
    return LlamaEngine(
        path=tiny.path(kind),
        projector=tiny.path(projector or PAIRS[kind]),
        context=ContextSettings(**{**defaults, **context}, unified=unified),
        engine=settings or EngineSettings(),
    )()


Asked = tuple[list[Entry], dict[bytes, Part]]


def asked(engine: Engine, *items: Content | Sequence[Entry]) -> Asked:
    """The entries and the contents of a prompt out of tokens, pictures and sounds."""
    entries: list[Entry] = []
    contents: dict[bytes, Part] = {}
    for item in items:
        if not isinstance(item, Content):
            entries += item
            continue
        for entry, part in seen(engine, item):
            entries.append(entry)
            if part is not None:
                contents[entry.digest] = part
    return entries, contents


def seen(engine: Engine, content: Content):
    projector = engine.backend.projector
    if isinstance(projector, FakeProjector):
        return entries_of(content, projector.measure(content), projector.key)
    measures = services.measure(engine, [measurable(content)])
    return entries_of(content, measures.measured[0], measures.key)


def check_positions(engine: Engine) -> None:
    """The record equals memory. After a picture with M-RoPE memory's last position lies before the record's."""
    for slot in engine.memory.slots:
        held = engine.backend.held(slot.number)
        assert not slot.ahead
        if len(slot) and slot.ids[-1] < 0:
            assert held is not None
            assert held[1] < slot.position
        else:
            assert (held[1] + 1 if held else 0) == slot.position
