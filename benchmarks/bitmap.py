"""A small picture as a data address: a PNG of seeded colours, not compressed, so the same bytes everywhere."""

from __future__ import annotations

import base64
import random
import struct
import zlib


def bitmap(seed: str, side: int) -> str:
    """A square of so many pixels, in tiles of eight.

    >>> bitmap("a", 16)[:22]
    'data:image/png;base64,'
    """
    chosen = random.Random(seed)
    tiles = [[chosen.randbytes(3) for _ in range(side // 8)] for _ in range(side // 8)]
    rows = [b"\0" + b"".join(tile * 8 for tile in tiles[line // 8]) for line in range(side)]
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows), 0)), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
