"""A sound, two questions about it, and what the second one took. With a tiny model that knows seven notes."""

from __future__ import annotations

import numpy as np

import afterglow
from afterglow import AudioData
from afterglow.testing import models

seconds = np.arange(16_000) / 16_000
a = AudioData(sample_rate=16_000, samples=np.sin(2 * np.pi * 440 * seconds).astype(np.float32).tobytes())

with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), disk_cache=False) as model:
    talk = [{"role": "user", "content": [{"type": "audio", "audio": a}, {"type": "text", "text": "Which note?"}]}]
    turn = model.chat(talk)
    print(f"{turn.text}: {turn.usage.encoded_media} encoded, {turn.usage.audio_tokens} tokens")

    talk += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": "Are you sure?"}]
    turn = model.chat(talk)
    print(
        f"{turn.text}: {turn.usage.encoded_media} encoded, {turn.usage.cached_media_tokens} tokens of it were in memory"
    )
