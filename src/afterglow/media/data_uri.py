"""Encodes images and audio as data URIs without loss, so that messages can be saved as text."""

from __future__ import annotations

import base64
import io

import numpy as np
import soundfile  # type: ignore[import-untyped]
from PIL import Image

from afterglow.media.types import ImageData, MediaData


def to_data_uri(media: MediaData) -> str:
    """Return a data URI that decodes to the same pixels or samples (PNG, or WAV with float samples).

    >>> to_data_uri(ImageData(width=1, height=1, pixels=bytes(3)))[:22]
    'data:image/png;base64,'
    """
    file = io.BytesIO()
    if isinstance(media, ImageData):
        Image.frombytes("RGB", (media.width, media.height), media.pixels).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    samples = np.frombuffer(media.samples, dtype=np.float32)
    soundfile.write(file, samples, media.sample_rate, format="WAV", subtype="FLOAT")
    return f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"
