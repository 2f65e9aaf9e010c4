"""What a picture file says of itself, found without decoding it: its format, its size, whether it moves.

Decoders ask for memory as a file tells them to, and some work through its pieces one by one. So the size is known, and
the number of pieces bounded, before any of them sees the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

MAX_PNG_CHUNKS = 20_000  # of a PNG file
MAX_GIF_BLOCKS = 400_000  # of a GIF file; they have up to 255 bytes
MAX_JPEG_SCANNED_PIXELS = 400_000_000  # pixels of a JPEG file times its scans: each goes over the whole picture
MAX_JPEG_SEGMENTS = 2_000
MAX_JPEG_PADDING_BYTES = 1_024  # bytes between segments
JPEG_MARKER_PATTERN = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")  # not the zeros and restarts inside a scan
JPEG_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the markers that say a size


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the file says."""

    format: str
    width: int
    height: int
    animated: bool = False


class InvalidImageHeader(ValueError):
    """The file is not what its first bytes say; the text says why."""


def read_image_header(data: bytes) -> ImageHeader:
    """The shape of a picture file; `Misshapen` where it is none of the five formats.

    >>> shape_of(b"BM" + bytes(16) + struct.pack("<iiHHI", 640, -480, 1, 24, 0))
    Shape(format='BMP', width=640, height=480, moves=False)
    """
    for start, read in HEADER_READERS.items():
        if data.startswith(start) and (start != b"RIFF" or data[8:12] == b"WEBP"):
            try:
                return read(data)
            except (struct.error, IndexError):
                raise InvalidImageHeader("it is cut off") from None
    raise InvalidImageHeader("it is no PNG, JPEG, WebP, GIF or BMP file")


def _read_png_header(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise InvalidImageHeader("its header is damaged")
    width, height = struct.unpack_from(">II", data, 16)
    view, position, moves = memoryview(data), 8, False
    for _ in range(MAX_PNG_CHUNKS):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if kind[0:1].isupper() and struct.unpack_from(">I", data, end)[0] != zlib.crc32(view[position + 4 : end]):
            raise InvalidImageHeader("its data is damaged")  # which Pillow shows as black, without a word
        moves |= kind in (b"acTL", b"fcTL", b"fdAT")
        if kind == b"IEND":
            return ImageHeader("PNG", width, height, moves)
        position = end + 4
    raise InvalidImageHeader(f"it has more than {MAX_PNG_CHUNKS:,} chunks")


def _read_jpeg_header(data: bytes) -> ImageHeader:
    position, scans, width, height = 2, 0, 0, 0
    for _ in range(MAX_JPEG_SEGMENTS):
        found = JPEG_MARKER_PATTERN.search(data, position)
        if found is None or found[1] == b"\xd9":
            break
        if not scans and found.end() - position > MAX_JPEG_PADDING_BYTES:
            raise InvalidImageHeader("there is something else between its segments")
        code, position = found[1][0], found.end()
        if code in JPEG_FRAME_MARKERS:
            high, wide = struct.unpack_from(">HH", data, position + 3)
            width, height = max(width, wide), max(height, high)
        scans += code == 0xDA
        if code != 0x01 and code != 0xD8:  # all others say how long they are
            position += max(2, struct.unpack_from(">H", data, position)[0])
    else:
        raise InvalidImageHeader(f"it has more than {MAX_JPEG_SEGMENTS:,} segments")
    if scans > 1 and scans * width * height > MAX_JPEG_SCANNED_PIXELS:
        raise InvalidImageHeader(f"it goes over its {width * height:,} pixels {scans:,} times")
    return ImageHeader("JPEG", width, height)


def _read_webp_header(data: bytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        flags, width, height = data[20], data[24:27], data[27:30]
        if len(height) < 3:
            raise InvalidImageHeader("it is cut off")
        size = int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
        return ImageHeader("WEBP", *size, animated=bool(flags & 2))
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    raise InvalidImageHeader("its header is damaged")


def _read_gif_header(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, images, left = 13 + _get_color_table_bytes(flags), 0, MAX_GIF_BLOCKS
    while images < 2 and position < len(data):
        if data[position] == 0x2C:
            x, y, wide, high, flags = struct.unpack_from("<HHHHB", data, position + 1)
            width, height, images = max(width, x + wide), max(height, y + high), images + 1
            position += 11 + _get_color_table_bytes(flags)  # and the size of the codes
        elif data[position] == 0x21:
            position += 2
        else:
            break  # the end, or something that is not GIF
        position, left = _skip_gif_blocks(data, position, left)
    if not images:
        raise InvalidImageHeader("there is no picture in it")
    return ImageHeader("GIF", width, height, animated=images > 1)


def _skip_gif_blocks(data: bytes, position: int, blocks_left: int) -> tuple[int, int]:
    """Where a row of blocks ends, and how many more the file may have."""
    while position < len(data) and (size := data[position]):
        position += size + 1
        blocks_left -= 1
        if blocks_left < 0:
            raise InvalidImageHeader(f"it has more than {MAX_GIF_BLOCKS:,} blocks")
    return position + 1, blocks_left - 1


def _get_color_table_bytes(flags: int) -> int:
    """The bytes of a colour table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _read_bmp_header(data: bytes) -> ImageHeader:
    if data[14:18] == b"\x0c\0\0\0":  # the header of the first version
        return ImageHeader("BMP", *struct.unpack_from("<HH", data, 18))
    width, height, _, _, packing = struct.unpack_from("<iiHHI", data, 18)
    if packing not in (0, 3, 6):  # plain, or plain with masks
        raise InvalidImageHeader("it is a packed BMP file: save it as PNG")
    return ImageHeader("BMP", abs(width), abs(height))


HEADER_READERS: dict[bytes, Callable[[bytes], ImageHeader]] = {
    b"\x89PNG\r\n\x1a\n": _read_png_header,
    b"\xff\xd8\xff": _read_jpeg_header,
    b"RIFF": _read_webp_header,
    b"GIF87a": _read_gif_header,
    b"GIF89a": _read_gif_header,
    b"BM": _read_bmp_header,
}
