"""Names for raw bytes: FNV-1a with 64 bits, which callers may give and which is then checked."""

from __future__ import annotations

import re

from afterglow.errors import InvalidArgument

OFFSET = 0xCBF29CE484222325
PRIME = 0x100000001B3
SHAPE = re.compile(r"[0-9a-f]{16}", re.IGNORECASE)


def fnv1a(data: bytes) -> str:
    """The hash as 16 hexadecimal digits.

    >>> fnv1a(b""), fnv1a(b"a")
    ('cbf29ce484222325', 'af63dc4c8601ec8c')
    """
    value = OFFSET
    for byte in data:
        value = (value ^ byte) * PRIME & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def checked_shape(id: str, where: str = "id") -> str:
    """An id in small letters; `InvalidArgument` where it is none."""
    if not isinstance(id, str) or not SHAPE.fullmatch(id):
        raise InvalidArgument(where, "must be 16 hexadecimal digits: FNV-1a with 64 bits over the raw bytes")
    return id.lower()


def check(id: str, data: bytes) -> None:
    """`InvalidArgument` where an id is not that of the bytes: whoever gave it has another picture in mind."""
    wanted, found = checked_shape(id), fnv1a(data)
    if wanted != found:
        raise InvalidArgument("id", f"{wanted} is not that of these {len(data):,} bytes, which is {found}")
