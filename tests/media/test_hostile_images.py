"""Files made to harm: each is refused in under a second, in words, and takes no memory."""

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
from afterglow.media.load import MediaPolicy
from support.media_files import chunk, gradient, moving, png, saved, webp, zeros

JPEG = saved(gradient(), "JPEG")
PNG = saved(gradient())
GIF = saved(gradient(), "GIF")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """A JPEG file that says it is larger than it is."""
    place = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:place] + struct.pack(">HH", height, width) + jpeg[place + 4 :]


def scanned(times: int) -> bytes:
    """A progressive JPEG file of four million pixels that goes over them again and again."""
    data = saved(gradient(2000, 2000), "JPEG", progressive=True, quality=1)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * times + b"\xff\xd9"


def bmp(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + header + bytes(4096)


def packed_bmp() -> bytes:
    """A whole picture of four million runs, which Pillow would unpack in Python."""
    header = struct.pack("<IiiHHIIiiII", 40, 2000, 2000, 1, 8, 1, 0, 0, 0, 0, 0)
    runs = (b"\1\0" * 2000 + b"\0\0") * 2000
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + runs + b"\0\1"


def gif_of_small_blocks() -> bytes:
    """Millions of blocks with one byte each."""
    start = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0x80, 0, 0) + bytes(6)
    return start + b"!\xfe" + b"\1x" * 5_000_000 + b"\0;"


def gif_that_grows() -> bytes:
    """A small screen, and on it a picture that is far larger."""
    start = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return start + b"," + struct.pack("<HHHHB", 60000, 60000, 60000, 60000, 0) + b"\2\2\x4c\1\0;"


HOSTILE = {
    "a bomb: 64 MiB of pixels in 64 KiB": lambda: png(1_000_000, 22, chunk(b"IDAT", zeros(64 << 20))),
    "a header of four thousand million pixels": lambda: png(65_500, 65_500, chunk(b"IDAT", b"x")),
    "a header of the largest size": lambda: png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", b"x")),
    "no pixels at all": lambda: png(0, 10, chunk(b"IDAT", b"x")),
    "a text that unpacks to 256 MiB": lambda: png(9, 9, chunk(b"zTXt", b"k\0\0" + zeros(256 << 20))),
    "a colour profile that unpacks to 256 MiB": lambda: png(9, 9, chunk(b"iCCP", b"p\0\0" + zeros(256 << 20))),
    "a million chunks": lambda: png(9, 9, chunk(b"tEXt", b"a\0b") * 1_000_000),
    "a chunk longer than the file": lambda: PNG[:33] + struct.pack(">I", 2**31 - 1) + b"IDAT" + PNG[41:],
    "a PNG that was cut off": lambda: PNG[: len(PNG) // 2],
    "a PNG with damaged pixels": lambda: PNG[:43] + bytes(40) + PNG[83:],
    "a PNG without pixels": lambda: png(9, 9),
    "a JPEG that was cut off": lambda: JPEG[: len(JPEG) // 2],
    "a JPEG of only its header": lambda: JPEG[:20],
    "a JPEG that says it is huge": lambda: with_size(JPEG, 65_535, 65_535),
    "a JPEG that never ends its scans": lambda: scanned(300),
    "a JPEG of padding": lambda: b"\xff\xd8" + b"\xff" * 5_000_000 + JPEG[2:],
    "a JPEG of junk": lambda: b"\xff\xd8\xff\xe0\0\2" + b"\xff\0" * 5_000_000 + JPEG[2:],
    "a JPEG of endless segments": lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * 1_000_000 + JPEG[2:],
    "an animated GIF": lambda: moving("GIF"),
    "an animated WebP": lambda: moving("WEBP"),
    "an animated PNG": lambda: moving("PNG"),
    "a GIF of the largest size": lambda: GIF[:6] + b"\xff\xff\xff\xff" + GIF[10:],
    "a GIF that grows": gif_that_grows,
    "a GIF of small blocks": gif_of_small_blocks,
    "a GIF without a picture": lambda: GIF[:13] + b";",
    "a GIF that was cut off": lambda: GIF[:40],
    "a WebP of the largest size": lambda: webp(b"VP8X", b"\0\0\0\0" + b"\xff\xff\xff\xff\xff\xff"),
    "a WebP of the largest size without loss": lambda: webp(b"VP8L", b"\x2f\xff\xff\xff\xff" + bytes(50)),
    "a WebP that was cut off": lambda: saved(gradient(), "WEBP")[:100],
    "a WebP of nonsense": lambda: webp(b"JUNK", bytes(100)),
    "a packed BMP": packed_bmp,
    "a BMP of the largest size": lambda: bmp(2**31 - 1, -(2**31)),
    "a BMP that was cut off": lambda: bmp(3000, 3000),
    "a TIFF": lambda: saved(gradient(), "TIFF"),
    "an icon": lambda: saved(gradient(), "ICO"),
    "a PPM": lambda: saved(gradient(), "PPM"),
    "a PDF": lambda: saved(gradient(), "PDF"),
    "an EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "an SVG": lambda: SVG,
    "a text": lambda: b"this is no picture",
    "an archive": lambda: b"PK\3\4" + bytes(100),
    "a page that begins like a GIF": lambda: b"GIF89a/*" + SVG + b"*/",
    "a program": lambda: b"\x7fELF" + bytes(100),
    "nothing": lambda: b"",
    "zeros": lambda: bytes(1_000_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_once_and_takes_no_memory(name):
    data = HOSTILE[name]()
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    with pytest.raises(InvalidMedia) as caught:
        decode_image(data, source="the picture")
    took, grown = time.perf_counter() - began, process.memory_info().rss - before
    assert took < 1
    assert grown < 64 << 20
    assert str(caught.value).startswith("the picture cannot be read: ")
    assert ("animated" in str(caught.value)) == ("animated" in name)


def test_there_are_enough_of_them():
    assert len(HOSTILE) >= 20


@pytest.mark.parametrize(
    "name",
    [name for name in HOSTILE if "largest size" in name or "grows" in name or "huge" in name or "header of" in name],
)
def test_a_file_that_says_it_is_too_large_is_shown_to_no_decoder(name, monkeypatch):
    monkeypatch.setattr(images, "DECODERS", {})
    with pytest.raises(InvalidMedia, match=r"pixels.*scale it down"):
        decode_image(HOSTILE[name]())


def test_what_the_decoder_says_about_the_size_holds_too(monkeypatch):
    monkeypatch.setattr(images, "shape_of", lambda data: ImageHeader("PNG", 1, 1))
    with pytest.raises(InvalidMedia, match="64 by 48 pixels"):
        decode_image(PNG, MediaPolicy(max_pixels=1000))


def test_a_hundred_refusals_leave_nothing_behind():
    files = [
        HOSTILE[name]()
        for name in ("a JPEG that was cut off", "an animated GIF", "a PNG that was cut off", "a BMP that was cut off")
    ]

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


def test_a_damaged_profile_or_orientation_does_not_cost_the_picture():
    garbage = b"\xde\xad" * 500
    icc = saved(gradient(), icc_profile=garbage)
    assert decode_image(icc).digest == decode_image(PNG).digest
    exif = JPEG[:2] + b"\xff\xe1" + struct.pack(">H", 8 + len(garbage)) + b"Exif\0\0" + garbage + JPEG[2:]
    assert decode_image(exif).digest == decode_image(JPEG).digest


def test_what_follows_a_picture_is_not_looked_at():
    """A polyglot is the picture it begins with; what else it could be is never asked."""
    for data in (PNG, JPEG, GIF):
        assert decode_image(data + b"PK\3\4" + SVG).digest == decode_image(data).digest


def test_the_largest_ordinary_files_have_fewer_pieces_than_the_limits():
    noise = gradient(800, 800).effect_spread(300)
    largest = MediaPolicy().max_bytes
    for format, piece, limit in (("PNG", b"IDAT", MAX_PNG_CHUNKS), ("GIF", None, MAX_GIF_BLOCKS)):
        file = saved(noise, format)
        pieces = file.count(piece) if piece else len(file) / 256
        assert pieces * largest / len(file) < limit / 2


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([PNG, JPEG, GIF, saved(gradient(), "WEBP"), saved(gradient(), "BMP")]), st.data())
def test_a_file_with_any_bytes_changed_is_a_picture_or_a_refusal(file, data):
    changed = bytearray(file)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(file), len(file) // 2, 30]))
    try:
        picture = decode_image(bytes(changed[:cut]), MediaPolicy(max_pixels=1_000_000))
        assert picture.width * picture.height <= 1_000_000
    except InvalidMedia:
        pass


def test_zlib_itself_is_what_unpacks():
    """The bombs above are real: unpacked, they are as large as they say."""
    unpacked = zlib.decompressobj()
    assert len(unpacked.decompress(zeros(64 << 20))) == 64 << 20
