"""A picture, two questions about it, and what the second one took. With a tiny model that knows eight colours."""

from __future__ import annotations

import afterglow
from afterglow import ImageData
from afterglow.testing import models

blue = ImageData(width=48, height=32, pixels=bytes([20, 20, 230]) * (48 * 32))

with afterglow.load(
    models.get_path("colours"), projector=models.get_path("projector-colours"), disk_cache=False
) as model:
    talk = [{"role": "user", "content": [{"type": "image", "image": blue}, {"type": "text", "text": "What colour?"}]}]
    turn = model.chat(talk)
    print(f"{turn.text}: {turn.usage.encoded_media} encoded, {turn.usage.media_tokens} tokens")

    talk += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": "Are you sure?"}]
    turn = model.chat(talk)
    print(
        f"{turn.text}: {turn.usage.encoded_media} encoded, {turn.usage.cached_media_tokens} tokens of it were in memory"
    )
