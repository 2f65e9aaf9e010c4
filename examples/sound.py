"""A sound, two questions about it, and what the second one took. With a tiny model that knows seven notes."""

from __future__ import annotations

import numpy as np

import afterglow
from afterglow import Sound, tiny

seconds = np.arange(16_000) / 16_000
a = Sound(rate=16_000, samples=np.sin(2 * np.pi * 440 * seconds).astype(np.float32).tobytes())

with afterglow.load(tiny.path("notes"), projector=tiny.path("projector-notes"), disk=False) as model:
    talk = [{"role": "user", "content": [{"type": "audio", "audio": a}, {"type": "text", "text": "Which note?"}]}]
    turn = model.chat(talk)
    print(f"{turn.text}: {turn.usage.encoded} encoded, {turn.usage.audio} tokens")

    talk += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": "Are you sure?"}]
    turn = model.chat(talk)
    print(f"{turn.text}: {turn.usage.encoded} encoded, {turn.usage.media_cached} tokens of it were in memory")
