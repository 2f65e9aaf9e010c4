"""Reads format, size and animation of an image file without decoding it.

Decoders allocate what a file declares, and some loop over all of its chunks. So the size is known and the number of
chunks is bounded before a decoder sees the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

MAX_PNG_CHUNKS = 20_000
MAX_GIF_BLOCKS = 400_000  # a block has up to 255 bytes
MAX_JPEG_SCANNED_PIXELS = 400_000_000  # pixels times scans: each scan covers the whole image
MAX_JPEG_SEGMENTS = 2_000
MAX_JPEG_PADDING_BYTES = 1_024  # between segments
JPEG_MARKER_PATTERN = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")  # not the zeros and restart markers inside a scan
JPEG_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers that contain the image size


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format, size and animation as the file declares them."""

    format: str
    width: int
    height: int
    animated: bool = False


class InvalidImageHeader(ValueError):
    """The file is not a valid image of the format that its first bytes declare."""


def read_image_header(data: bytes) -> ImageHeader:
    """Read the header of an image file; raise `InvalidImageHeader` if it has none of the five formats.

    >>> read_image_header(b"BM" + bytes(16) + struct.pack("<iiHHI", 640, -480, 1, 24, 0))
    ImageHeader(format='BMP', width=640, height=480, animated=False)
    """
    for magic, read in HEADER_READERS.items():
        if data.startswith(magic) and (magic != b"RIFF" or data[8:12] == b"WEBP"):
            try:
                return read(data)
            except (struct.error, IndexError):
                raise InvalidImageHeader("it is truncated") from None
    raise InvalidImageHeader("it is not a PNG, JPEG, WebP, GIF or BMP file")


def _read_png_header(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise InvalidImageHeader("its header is damaged")
    width, height = struct.unpack_from(">II", data, 16)
    view, position, animated = memoryview(data), 8, False
    for _ in range(MAX_PNG_CHUNKS):
        length, chunk_type = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        is_critical = chunk_type[0:1].isupper()
        if is_critical and struct.unpack_from(">I", data, end)[0] != zlib.crc32(view[position + 4 : end]):
            raise InvalidImageHeader("its data is damaged")  # Pillow would decode it to black without an error
        animated |= chunk_type in (b"acTL", b"fcTL", b"fdAT")
        if chunk_type == b"IEND":
            return ImageHeader("PNG", width, height, animated)
        position = end + 4
    raise InvalidImageHeader(f"it has more than {MAX_PNG_CHUNKS:,} chunks")


def _read_jpeg_header(data: bytes) -> ImageHeader:
    position, scans, width, height = 2, 0, 0, 0
    for _ in range(MAX_JPEG_SEGMENTS):
        match = JPEG_MARKER_PATTERN.search(data, position)
        if match is None or match[1] == b"\xd9":
            break
        if not scans and match.end() - position > MAX_JPEG_PADDING_BYTES:
            raise InvalidImageHeader("it has foreign data between its segments")
        marker, position = match[1][0], match.end()
        if marker in JPEG_FRAME_MARKERS:
            frame_height, frame_width = struct.unpack_from(">HH", data, position + 3)
            width, height = max(width, frame_width), max(height, frame_height)
        scans += marker == 0xDA
        if marker != 0x01 and marker != 0xD8:  # all other segments contain their length
            position += max(2, struct.unpack_from(">H", data, position)[0])
    else:
        raise InvalidImageHeader(f"it has more than {MAX_JPEG_SEGMENTS:,} segments")
    if scans > 1 and scans * width * height > MAX_JPEG_SCANNED_PIXELS:
        raise InvalidImageHeader(f"it has {scans:,} scans of {width * height:,} pixels")
    return ImageHeader("JPEG", width, height)


def _read_webp_header(data: bytes) -> ImageHeader:
    chunk_type = data[12:16]
    if chunk_type == b"VP8X":
        flags, width, height = data[20], data[24:27], data[27:30]
        if len(height) < 3:
            raise InvalidImageHeader("it is truncated")
        size = int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
        return ImageHeader("WEBP", *size, animated=bool(flags & 2))
    if chunk_type == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if chunk_type == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    raise InvalidImageHeader("its header is damaged")


def _read_gif_header(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, images, blocks_left = 13 + _get_color_table_bytes(flags), 0, MAX_GIF_BLOCKS
    while images < 2 and position < len(data):
        if data[position] == 0x2C:
            x, y, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", data, position + 1)
            width, height, images = max(width, x + frame_width), max(height, y + frame_height), images + 1
            position += 11 + _get_color_table_bytes(flags)  # 10 bytes of descriptor, 1 byte of LZW code size
        elif data[position] == 0x21:
            position += 2
        else:
            break  # the trailer, or data that is not GIF
        position, blocks_left = _skip_gif_blocks(data, position, blocks_left)
    if not images:
        raise InvalidImageHeader("it contains no image")
    return ImageHeader("GIF", width, height, animated=images > 1)


def _skip_gif_blocks(data: bytes, position: int, blocks_left: int) -> tuple[int, int]:
    """Return the position after a list of data blocks and the number of blocks left within the limit."""
    while position < len(data) and (size := data[position]):
        position += size + 1
        blocks_left -= 1
        if blocks_left < 0:
            raise InvalidImageHeader(f"it has more than {MAX_GIF_BLOCKS:,} blocks")
    return position + 1, blocks_left - 1


def _get_color_table_bytes(flags: int) -> int:
    """Return the size of the color table that the flags declare."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _read_bmp_header(data: bytes) -> ImageHeader:
    if data[14:18] == b"\x0c\0\0\0":  # BITMAPCOREHEADER
        return ImageHeader("BMP", *struct.unpack_from("<HH", data, 18))
    width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression not in (0, 3, 6):  # uncompressed, or uncompressed with bit masks
        raise InvalidImageHeader("it is a compressed BMP file: save it as PNG")
    return ImageHeader("BMP", abs(width), abs(height))


HEADER_READERS: dict[bytes, Callable[[bytes], ImageHeader]] = {
    b"\x89PNG\r\n\x1a\n": _read_png_header,
    b"\xff\xd8\xff": _read_jpeg_header,
    b"RIFF": _read_webp_header,
    b"GIF87a": _read_gif_header,
    b"GIF89a": _read_gif_header,
    b"BM": _read_bmp_header,
}
