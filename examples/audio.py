"""Two questions about an audio clip; it is encoded once. Uses a tiny model that knows seven notes."""

from __future__ import annotations

import numpy as np

import afterglow
from afterglow import AudioData
from afterglow.testing import models

seconds = np.arange(16_000) / 16_000
note_a = AudioData(sample_rate=16_000, samples=np.sin(2 * np.pi * 440 * seconds).astype(np.float32).tobytes())

with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), disk_cache=False) as model:
    messages = [
        {"role": "user", "content": [{"type": "audio", "audio": note_a}, {"type": "text", "text": "Which note?"}]}
    ]
    response = model.chat(messages)
    print(f"{response.text}: {response.usage.encoded_media} encoded, {response.usage.audio_tokens} tokens")

    messages += [{"role": "assistant", "content": response.text}, {"role": "user", "content": "Are you sure?"}]
    response = model.chat(messages)
    print(
        f"{response.text}: {response.usage.encoded_media} encoded, "
        f"{response.usage.cached_media_tokens} audio tokens were cached"
    )
