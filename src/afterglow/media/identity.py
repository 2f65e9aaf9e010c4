"""Media ids: 64-bit FNV-1a of the raw bytes. A client may send one, which is then checked."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
UINT64_MASK = 0xFFFFFFFFFFFFFFFF
BLOCK_BYTES = 1 << 16
# Powers of the prime modulo 2**64, the highest first.
FNV_PRIME_POWERS = np.cumprod(np.full(BLOCK_BYTES, FNV_PRIME, np.uint64))[::-1]
ID_PATTERN = re.compile(r"[0-9a-f]{16}", re.IGNORECASE)


def fnv1a(data: bytes) -> str:
    """Return the 64-bit FNV-1a hash as 16 hexadecimal digits.

    FNV-1a XORs each byte into the value and multiplies it by the prime. A loop over bytes is slow in Python, so this
    works on blocks: the XOR changes only the lowest byte, which is the same as adding a number. With these addends
    the value is a sum of products.

    >>> fnv1a(b""), fnv1a(b"a")
    ('cbf29ce484222325', 'af63dc4c8601ec8c')
    """
    value = FNV_OFFSET
    for start in range(0, len(data), BLOCK_BYTES):
        block = np.frombuffer(data, np.uint8, min(BLOCK_BYTES, len(data) - start), start)
        powers = FNV_PRIME_POWERS[-len(block) :]
        lowest = _compute_lowest_bytes(value & 0xFF, block)
        addends = (lowest ^ block).astype(np.int64) - lowest
        value = (value * int(powers[0]) + int((addends.view(np.uint64) * powers).sum())) & UINT64_MASK
    return f"{value:016x}"


def _compute_lowest_bytes(first: int, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the lowest byte of the hash value before each byte of a block.

    Computed bit by bit: a bit of the product is the bit of the factor, flipped by the contribution of the lower bits.
    """
    lowest = np.zeros(len(block), np.uint8)
    for bit in range(8):
        below = ((lowest ^ block) & ((1 << bit) - 1)) * np.uint8(FNV_PRIME & 0xFF)
        flips = (below ^ block) & (1 << bit)
        lowest[0] |= first & (1 << bit)
        lowest[1:] |= np.bitwise_xor.accumulate(flips[:-1]) ^ (first & (1 << bit))
    return lowest


def normalize_id(id: str, where: str = "id") -> str:
    """Return the id in lower case; raise `InvalidArgument` if it is malformed."""
    if not isinstance(id, str) or not ID_PATTERN.fullmatch(id):
        raise InvalidArgument(where, "must be 16 hexadecimal digits: the 64-bit FNV-1a of the raw bytes")
    return id.lower()


def check_id(id: str, data: bytes) -> None:
    """Raise `InvalidArgument` if the id is not that of the bytes: the client means a different file."""
    expected, actual = normalize_id(id), fnv1a(data)
    if expected != actual:
        raise InvalidArgument("id", f"{expected} does not match the {len(data):,} bytes, whose id is {actual}")
