"""Hostile image files: each is rejected in under a second, with a reason, and without memory growth."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zlib

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import InvalidMedia
from afterglow.media import images
from afterglow.media.image_header import MAX_GIF_BLOCKS, MAX_PNG_CHUNKS, ImageHeader
from afterglow.media.images import decode_image
from afterglow.media.policy import MediaPolicy
from support.media_files import animated_image, chunk, compressed_zeros, encode_image, gradient, png, webp

pytestmark = pytest.mark.slow

JPEG = encode_image(gradient(), "JPEG")
PNG = encode_image(gradient())
GIF = encode_image(gradient(), "GIF")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def set_jpeg_size(jpeg: bytes, width: int, height: int) -> bytes:
    """Return a JPEG file that declares another size."""
    position = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:position] + struct.pack(">HH", height, width) + jpeg[position + 4 :]


def repeat_scans(times: int) -> bytes:
    """Return a progressive JPEG file of four million pixels with many scans."""
    data = encode_image(gradient(2000, 2000), "JPEG", progressive=True, quality=1)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * times + b"\xff\xd9"


def bmp(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + header + bytes(4096)


def compressed_bmp() -> bytes:
    """Return a compressed BMP of four million runs, which Pillow would decompress in Python."""
    header = struct.pack("<IiiHHIIiiII", 40, 2000, 2000, 1, 8, 1, 0, 0, 0, 0, 0)
    runs = (b"\1\0" * 2000 + b"\0\0") * 2000
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + runs + b"\0\1"


def gif_of_small_blocks() -> bytes:
    """Return a GIF with millions of one-byte blocks."""
    start = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0x80, 0, 0) + bytes(6)
    return start + b"!\xfe" + b"\1x" * 5_000_000 + b"\0;"


def gif_with_large_frame() -> bytes:
    """Return a GIF with a small screen and a much larger frame."""
    start = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return start + b"," + struct.pack("<HHHHB", 60000, 60000, 60000, 60000, 0) + b"\2\2\x4c\1\0;"


HOSTILE_FILES = {
    "bomb: 64 MiB of pixels in 64 KiB": lambda: png(1_000_000, 22, chunk(b"IDAT", compressed_zeros(64 << 20))),
    "header of four billion pixels": lambda: png(65_500, 65_500, chunk(b"IDAT", b"x")),
    "header of the largest size": lambda: png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", b"x")),
    "width 0": lambda: png(0, 10, chunk(b"IDAT", b"x")),
    "text chunk that decompresses to 256 MiB": lambda: png(
        9, 9, chunk(b"zTXt", b"k\0\0" + compressed_zeros(256 << 20))
    ),
    "color profile that decompresses to 256 MiB": lambda: png(
        9, 9, chunk(b"iCCP", b"p\0\0" + compressed_zeros(256 << 20))
    ),
    "a million chunks": lambda: png(9, 9, chunk(b"tEXt", b"a\0b") * 1_000_000),
    "chunk longer than the file": lambda: PNG[:33] + struct.pack(">I", 2**31 - 1) + b"IDAT" + PNG[41:],
    "truncated PNG": lambda: PNG[: len(PNG) // 2],
    "PNG with damaged pixels": lambda: PNG[:43] + bytes(40) + PNG[83:],
    "PNG without pixels": lambda: png(9, 9),
    "truncated JPEG": lambda: JPEG[: len(JPEG) // 2],
    "JPEG header only": lambda: JPEG[:20],
    "JPEG that declares a huge size": lambda: set_jpeg_size(JPEG, 65_535, 65_535),
    "JPEG with hundreds of scans": lambda: repeat_scans(300),
    "JPEG with megabytes of padding": lambda: b"\xff\xd8" + b"\xff" * 5_000_000 + JPEG[2:],
    "JPEG with junk between segments": lambda: b"\xff\xd8\xff\xe0\0\2" + b"\xff\0" * 5_000_000 + JPEG[2:],
    "JPEG with a million segments": lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * 1_000_000 + JPEG[2:],
    "animated GIF": lambda: animated_image("GIF"),
    "animated WebP": lambda: animated_image("WEBP"),
    "animated PNG": lambda: animated_image("PNG"),
    "GIF of the largest size": lambda: GIF[:6] + b"\xff\xff\xff\xff" + GIF[10:],
    "GIF that grows": gif_with_large_frame,
    "GIF with millions of blocks": gif_of_small_blocks,
    "GIF without an image": lambda: GIF[:13] + b";",
    "truncated GIF": lambda: GIF[:40],
    "WebP of the largest size": lambda: webp(b"VP8X", b"\0\0\0\0" + b"\xff\xff\xff\xff\xff\xff"),
    "lossless WebP of the largest size": lambda: webp(b"VP8L", b"\x2f\xff\xff\xff\xff" + bytes(50)),
    "truncated WebP": lambda: encode_image(gradient(), "WEBP")[:100],
    "WebP with an unknown chunk": lambda: webp(b"JUNK", bytes(100)),
    "compressed BMP": compressed_bmp,
    "BMP of the largest size": lambda: bmp(2**31 - 1, -(2**31)),
    "truncated BMP": lambda: bmp(3000, 3000),
    "TIFF": lambda: encode_image(gradient(), "TIFF"),
    "ICO": lambda: encode_image(gradient(), "ICO"),
    "PPM": lambda: encode_image(gradient(), "PPM"),
    "PDF": lambda: encode_image(gradient(), "PDF"),
    "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "SVG": lambda: SVG,
    "text": lambda: b"this is not an image",
    "ZIP archive": lambda: b"PK\3\4" + bytes(100),
    "SVG that begins like a GIF": lambda: b"GIF89a/*" + SVG + b"*/",
    "ELF program": lambda: b"\x7fELF" + bytes(100),
    "empty file": lambda: b"",
    "zeros": lambda: bytes(1_000_000),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_hostile_file_is_rejected_fast_and_without_memory(name):
    data = HOSTILE_FILES[name]()
    process = psutil.Process()
    before, start = process.memory_info().rss, time.thread_time()  # not wall time: the machine may be busy
    with pytest.raises(InvalidMedia) as caught:
        decode_image(data, source="the image")
    seconds, growth = time.thread_time() - start, process.memory_info().rss - before
    assert seconds < 1
    assert growth < 64 << 20
    assert str(caught.value).startswith("the image cannot be read: ")
    assert ("animated" in str(caught.value)) == ("animated" in name)


def test_the_list_covers_at_least_twenty_files():
    assert len(HOSTILE_FILES) >= 20


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in HOSTILE_FILES
        if "largest size" in name or "grows" in name or "huge" in name or "header of" in name
    ],
)
def test_a_file_that_declares_too_many_pixels_never_reaches_a_decoder(name, monkeypatch):
    monkeypatch.setattr(images, "DECODERS", {})
    with pytest.raises(InvalidMedia, match=r"pixels.*scale it down"):
        decode_image(HOSTILE_FILES[name]())


def test_the_size_that_the_decoder_reports_is_checked_too(monkeypatch):
    monkeypatch.setattr(images, "read_image_header", lambda data: ImageHeader("PNG", 1, 1))
    with pytest.raises(InvalidMedia, match="64 by 48 pixels"):
        decode_image(PNG, MediaPolicy(max_pixels=1000))


def test_a_hundred_rejections_do_not_leak_memory():
    files = [HOSTILE_FILES[name]() for name in ("truncated JPEG", "animated GIF", "truncated PNG", "truncated BMP")]

    def refuse_all() -> int:
        for data in files:
            with pytest.raises(InvalidMedia):
                decode_image(data)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        for _ in range(5):
            refuse_all()
        before = refuse_all()
        for _ in range(25):
            after = refuse_all()
        assert after - before < 100_000
    finally:
        tracemalloc.stop()


def test_a_damaged_profile_or_orientation_does_not_reject_the_image():
    garbage = b"\xde\xad" * 500
    icc = encode_image(gradient(), icc_profile=garbage)
    assert decode_image(icc).digest == decode_image(PNG).digest
    exif = JPEG[:2] + b"\xff\xe1" + struct.pack(">H", 8 + len(garbage)) + b"Exif\0\0" + garbage + JPEG[2:]
    assert decode_image(exif).digest == decode_image(JPEG).digest


def test_data_after_the_image_is_ignored():
    """A polyglot file is decoded as the image that it begins with."""
    for data in (PNG, JPEG, GIF):
        assert decode_image(data + b"PK\3\4" + SVG).digest == decode_image(data).digest


def test_the_largest_ordinary_files_are_within_the_chunk_limits():
    noise = gradient(800, 800).effect_spread(300)
    largest = MediaPolicy().max_bytes
    for format, piece, limit in (("PNG", b"IDAT", MAX_PNG_CHUNKS), ("GIF", None, MAX_GIF_BLOCKS)):
        file = encode_image(noise, format)
        pieces = file.count(piece) if piece else len(file) / 256
        assert pieces * largest / len(file) < limit / 2


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([PNG, JPEG, GIF, encode_image(gradient(), "WEBP"), encode_image(gradient(), "BMP")]), st.data())
def test_a_file_with_changed_bytes_decodes_or_is_rejected(file, data):
    changed = bytearray(file)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(file), len(file) // 2, 30]))
    try:
        image = decode_image(bytes(changed[:length]), MediaPolicy(max_pixels=1_000_000))
        assert image.width * image.height <= 1_000_000
    except InvalidMedia:
        pass


def test_the_bombs_decompress_to_their_declared_size():
    """The bombs above are real: they decompress to their declared size."""
    decompressor = zlib.decompressobj()
    assert len(decompressor.decompress(compressed_zeros(64 << 20))) == 64 << 20
