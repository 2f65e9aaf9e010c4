"""Decoding image files to upright RGB pixels."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from PIL import Image

from afterglow.errors import InvalidMedia
from afterglow.media.images import decode_image
from afterglow.media.policy import MediaPolicy
from support.media_files import chunk, encode_image, gradient, png


def decode_pixels(data: bytes, **options: object) -> np.ndarray:
    image = decode_image(data, **options)
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_a_lossless_file_decodes_to_its_pixels(format):
    options = {"lossless": True} if format == "WEBP" else {}
    assert (decode_pixels(encode_image(gradient(), format, **options)) == np.asarray(gradient())).all()


@pytest.mark.parametrize(
    ("format", "options"),
    [("JPEG", {"quality": 95}), ("JPEG", {"quality": 95, "progressive": True}), ("WEBP", {"quality": 95})],
)
def test_a_lossy_file_decodes_to_nearly_its_pixels(format, options):
    decoded = decode_pixels(encode_image(gradient(), format, **options)).astype(int)
    assert np.abs(decoded - np.asarray(gradient()).astype(int)).mean() < 8


def test_a_still_gif_is_decoded():
    still = encode_image(Image.new("RGB", (5, 4), (10, 200, 30)), "GIF")
    assert (decode_pixels(still) == (10, 200, 30)).all()
    assert decode_pixels(still).shape == (4, 5, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_png_mode_becomes_rgb(mode):
    half = 128 << 8 if mode == "I;16" else None
    image = Image.new("I;16", (3, 2), half) if half else Image.new("L", (3, 2), 128).convert(mode)
    decoded = decode_pixels(encode_image(image))
    assert decoded.shape == (2, 3, 3)
    if mode not in ("1", "P"):
        assert (decoded == 128).all()


def test_sixteen_bit_color_keeps_its_upper_eight_bits():
    row = b"\0" + bytes([200, 17, 100, 99, 50, 1]) * 2
    assert (decode_pixels(png(2, 1, chunk(b"IDAT", zlib.compress(row)), depth=16)) == (200, 100, 50)).all()


def test_cmyk_becomes_rgb():
    red = encode_image(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert np.abs(decode_pixels(red).astype(int) - (255, 0, 0)).max() < 12


def test_transparency_is_composited_on_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert decode_pixels(encode_image(image)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    transparent = Image.new("P", (1, 1), 3)
    transparent.putpalette([0] * 768)
    assert decode_pixels(encode_image(transparent, "GIF", transparency=3)).tolist() == [[[255, 255, 255]]]
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert decode_pixels(encode_image(half)).tolist() == [[[127, 127, 127]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation, format):
    """The upright image is wide, gray, with red at the top left and blue at the bottom right."""
    upright = Image.new("RGB", (64, 32), "grey")
    upright.paste((255, 0, 0), (0, 0, 16, 16))
    upright.paste((0, 0, 255), (48, 16, 64, 32))
    inverses = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # inverse of each orientation, as Pillow constants
    rotated = upright if orientation == 1 else upright.transpose(Image.Transpose(inverses[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_pixels(encode_image(rotated, format, exif=exif))
    assert decoded.shape == (32, 64, 3)
    assert decoded[4, 4, 0] > 200 > 60 > decoded[4, 4, 2]
    assert decoded[28, 60, 2] > 200 > 60 > decoded[28, 60, 0]


def test_low_detail_scales_down_and_other_details_do_not():
    data = encode_image(gradient(1024, 300))
    assert decode_image(data, detail="low").width == 512
    assert decode_image(data, detail="low").height == 150
    assert decode_image(data, detail="high").digest == decode_image(data).digest
    assert (
        decode_image(encode_image(gradient(20, 10)), detail="low").digest
        == decode_image(encode_image(gradient(20, 10))).digest
    )


def test_an_image_over_the_limits_is_rejected_with_its_size():
    data = encode_image(gradient(100, 20))
    for policy in (MediaPolicy(max_side_pixels=99), MediaPolicy(max_pixels=1999)):
        with pytest.raises(InvalidMedia, match=r"100 by 20 pixels.*scale it down"):
            decode_image(data, policy)
    assert decode_image(data, MediaPolicy(max_side_pixels=100, max_pixels=2000)).width == 100
