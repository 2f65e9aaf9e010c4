"""Picture and sound files for tests, good ones and bad ones, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image


def saved(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    """A picture of which no two columns and no two rows are alike."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x * 3 % 256, y * 5 % 256, (x + y) % 256], axis=-1).astype(np.uint8))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """A piece of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file that says it has this size."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND")


def zeros(count: int) -> bytes:
    """So many zeros, packed."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(count >> 20)) + packer.flush()


def webp(kind: bytes, data: bytes) -> bytes:
    """A WebP file with one piece."""
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def moving(format: str) -> bytes:
    """An animated file."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    return saved(frames[0], format, save_all=True, append_images=frames[1:], duration=50)


def tone(rate: int = 16_000, seconds: float = 0.5, pitch: float = 440, channels: int = 1) -> np.ndarray:
    """A sine, one column for each channel."""
    wave = 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate)
    return np.repeat(wave[:, None], channels, axis=1).astype(np.float32)


def recorded(samples: np.ndarray, rate: int = 16_000, format: str = "WAV", subtype: str | None = None) -> bytes:
    """A sound as a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()
