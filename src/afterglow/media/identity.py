"""Names for raw bytes: FNV-1a with 64 bits, which callers may give and which is then checked."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
UINT64_MASK = 0xFFFFFFFFFFFFFFFF
BLOCK_BYTES = 1 << 16
FNV_PRIME_POWERS = np.cumprod(np.full(BLOCK_BYTES, FNV_PRIME, np.uint64))[
    ::-1
]  # of the prime, the highest first; all modulo 2**64
ID_PATTERN = re.compile(r"[0-9a-f]{16}", re.IGNORECASE)


def fnv1a(data: bytes) -> str:
    """The hash as 16 hexadecimal digits.

    By definition each byte is xored into the value, which is then multiplied. Byte by byte that takes Python a long
    time, so it is done in blocks: the xor changes only the lowest byte, so it adds some number, and with those numbers
    the value is a sum of products.

    >>> fnv1a(b""), fnv1a(b"a")
    ('cbf29ce484222325', 'af63dc4c8601ec8c')
    """
    value = FNV_OFFSET
    for start in range(0, len(data), BLOCK_BYTES):
        block = np.frombuffer(data, np.uint8, min(BLOCK_BYTES, len(data) - start), start)
        powers = FNV_PRIME_POWERS[-len(block) :]
        lowest = _compute_lowest_bytes(value & 0xFF, block)
        added = (lowest ^ block).astype(np.int64) - lowest
        value = (value * int(powers[0]) + int((added.view(np.uint64) * powers).sum())) & UINT64_MASK
    return f"{value:016x}"


def _compute_lowest_bytes(first: int, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The lowest byte of the value before each byte of a block.

    Bit after bit: a product's bit is that of the factor, flipped by what the bits below make of it.
    """
    lowest = np.zeros(len(block), np.uint8)
    for bit in range(8):
        below = ((lowest ^ block) & ((1 << bit) - 1)) * np.uint8(FNV_PRIME & 0xFF)
        flips = (below ^ block) & (1 << bit)
        lowest[0] |= first & (1 << bit)
        lowest[1:] |= np.bitwise_xor.accumulate(flips[:-1]) ^ (first & (1 << bit))
    return lowest


def normalize_id(id: str, where: str = "id") -> str:
    """An id in small letters; `InvalidArgument` where it is none."""
    if not isinstance(id, str) or not ID_PATTERN.fullmatch(id):
        raise InvalidArgument(where, "must be 16 hexadecimal digits: FNV-1a with 64 bits over the raw bytes")
    return id.lower()


def check_id(id: str, data: bytes) -> None:
    """`InvalidArgument` where an id is not that of the bytes: whoever gave it has another picture in mind."""
    wanted, found = normalize_id(id), fnv1a(data)
    if wanted != found:
        raise InvalidArgument("id", f"{wanted} is not that of these {len(data):,} bytes, which is {found}")
