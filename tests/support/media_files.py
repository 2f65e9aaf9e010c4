"""Image and audio files for tests, valid and damaged, generated in memory."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image


def encode_image(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """Return an image as file bytes."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def encode_data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def gradient(width: int = 64, height: int = 48) -> Image.Image:
    """Return an image whose columns and rows are all different."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x * 3 % 256, y * 5 % 256, (x + y) % 256], axis=-1).astype(np.uint8))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return a PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG file whose header has this size."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND")


def compressed_zeros(count: int) -> bytes:
    """Return `count` zero bytes, compressed."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(count >> 20)) + packer.flush()


def webp(kind: bytes, data: bytes) -> bytes:
    """Return a WebP file with one chunk."""
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def animated_image(format: str) -> bytes:
    """Return an animated image as file bytes."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    return encode_image(frames[0], format, save_all=True, append_images=frames[1:], duration=50)


def sine_wave(rate: int = 16_000, seconds: float = 0.5, pitch: float = 440, channels: int = 1) -> np.ndarray:
    """Return a sine wave, one column per channel."""
    wave = 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate)
    return np.repeat(wave[:, None], channels, axis=1).astype(np.float32)


def encode_audio(samples: np.ndarray, rate: int = 16_000, format: str = "WAV", subtype: str | None = None) -> bytes:
    """Return audio samples as file bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()
