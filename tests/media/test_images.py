"""Every ordinary picture file becomes the same clean pixels."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from afterglow.errors import InvalidMedia
from afterglow.media.image_header import read_image_header
from afterglow.media.images import decode_image
from afterglow.media.load import MediaPolicy
from support.media_files import chunk, gradient, png, saved


def pixels(data: bytes, **options: object) -> np.ndarray:
    picture = decode_image(data, **options)
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_a_lossless_file_gives_its_pixels(format):
    options = {"lossless": True} if format == "WEBP" else {}
    assert (pixels(saved(gradient(), format, **options)) == np.asarray(gradient())).all()


@pytest.mark.parametrize(
    ("format", "options"),
    [("JPEG", {"quality": 95}), ("JPEG", {"quality": 95, "progressive": True}), ("WEBP", {"quality": 95})],
)
def test_a_lossy_file_gives_nearly_its_pixels(format, options):
    made = pixels(saved(gradient(), format, **options)).astype(int)
    assert np.abs(made - np.asarray(gradient()).astype(int)).mean() < 8


def test_a_still_gif_is_a_picture():
    still = saved(Image.new("RGB", (5, 4), (10, 200, 30)), "GIF")
    assert (pixels(still) == (10, 200, 30)).all()
    assert pixels(still).shape == (4, 5, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_png_is_red_green_and_blue(mode):
    half = 128 << 8 if mode == "I;16" else None
    image = Image.new("I;16", (3, 2), half) if half else Image.new("L", (3, 2), 128).convert(mode)
    made = pixels(saved(image))
    assert made.shape == (2, 3, 3)
    if mode not in ("1", "P"):
        assert (made == 128).all()


def test_sixteen_bits_of_colour_keep_their_upper_eight():
    row = b"\0" + bytes([200, 17, 100, 99, 50, 1]) * 2
    assert (pixels(png(2, 1, chunk(b"IDAT", zlib.compress(row)), depth=16)) == (200, 100, 50)).all()


def test_cmyk_becomes_the_colours_one_sees():
    red = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    assert np.abs(pixels(red).astype(int) - (255, 0, 0)).max() < 12


def test_what_one_sees_through_is_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert pixels(saved(image)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    see_through = Image.new("P", (1, 1), 3)
    see_through.putpalette([0] * 768)
    assert pixels(saved(see_through, "GIF", transparency=3)).tolist() == [[[255, 255, 255]]]
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert pixels(saved(half)).tolist() == [[[127, 127, 127]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_photo_is_the_right_way_up(orientation, format):
    """The upright picture has red at the top left and blue at the bottom right, on grey, and is wide."""
    upright = Image.new("RGB", (64, 32), "grey")
    upright.paste((255, 0, 0), (0, 0, 16, 16))
    upright.paste((0, 0, 255), (48, 16, 64, 32))
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what undoes each, by Pillow's numbers
    held = upright if orientation == 1 else upright.transpose(Image.Transpose(turns[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    made = pixels(saved(held, format, exif=exif))
    assert made.shape == (32, 64, 3)
    assert made[4, 4, 0] > 200 > 60 > made[4, 4, 2]
    assert made[28, 60, 2] > 200 > 60 > made[28, 60, 0]


def test_low_detail_is_a_small_picture_and_other_details_change_nothing():
    data = saved(gradient(1024, 300))
    assert decode_image(data, detail="low").width == 512
    assert decode_image(data, detail="low").height == 150
    assert decode_image(data, detail="high").digest == decode_image(data).digest
    assert decode_image(saved(gradient(20, 10)), detail="low").digest == decode_image(saved(gradient(20, 10))).digest


def test_limits_are_said_in_numbers():
    data = saved(gradient(100, 20))
    for policy in (MediaPolicy(max_side_pixels=99), MediaPolicy(max_pixels=1999)):
        with pytest.raises(InvalidMedia, match=r"100 by 20 pixels.*scale it down"):
            decode_image(data, policy)
    assert decode_image(data, MediaPolicy(max_side_pixels=100, max_pixels=2000)).width == 100


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_shape_is_what_pillow_says(format):
    data = saved(gradient(37, 11), format)
    shape = read_image_header(data)
    assert (shape.format, shape.width, shape.height, shape.animated) == (format, 37, 11, False)


def test_the_shapes_of_all_kinds_of_webp():
    for options in ({"lossless": True}, {"quality": 50}, {"quality": 50, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}):
        data = saved(gradient(37, 11), "WEBP", **options)
        assert (read_image_header(data).width, read_image_header(data).height) == Image.open(io.BytesIO(data)).size
    see_through = saved(Image.new("RGBA", (21, 9)), "WEBP", quality=50)
    assert (read_image_header(see_through).width, read_image_header(see_through).height) == (21, 9)
