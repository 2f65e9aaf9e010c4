"""Two questions about an image; it is encoded once. Uses a tiny model that knows eight colors."""

from __future__ import annotations

import afterglow
from afterglow import ImageData
from afterglow.testing import models

blue = ImageData(width=48, height=32, pixels=bytes([20, 20, 230]) * (48 * 32))

with afterglow.load(
    models.get_path("colors"), projector=models.get_path("projector-colors"), disk_cache=False
) as model:
    messages = [
        {"role": "user", "content": [{"type": "image", "image": blue}, {"type": "text", "text": "What colour?"}]}
    ]
    response = model.chat(messages)
    print(f"{response.text}: {response.usage.encoded_media} encoded, {response.usage.media_tokens} tokens")

    messages += [{"role": "assistant", "content": response.text}, {"role": "user", "content": "Are you sure?"}]
    response = model.chat(messages)
    print(
        f"{response.text}: {response.usage.encoded_media} encoded, "
        f"{response.usage.cached_media_tokens} image tokens were cached"
    )
