"""Image headers are read without decoding."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from afterglow.media.image_header import read_image_header
from support.media_files import encode_image, gradient


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_header_matches_pillow(format):
    data = encode_image(gradient(37, 11), format)
    header = read_image_header(data)
    assert (header.format, header.width, header.height, header.animated) == (format, 37, 11, False)


def test_the_header_of_every_webp_variant():
    for options in ({"lossless": True}, {"quality": 50}, {"quality": 50, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}):
        data = encode_image(gradient(37, 11), "WEBP", **options)
        assert (read_image_header(data).width, read_image_header(data).height) == Image.open(io.BytesIO(data)).size
    transparent = encode_image(Image.new("RGBA", (21, 9)), "WEBP", quality=50)
    assert (read_image_header(transparent).width, read_image_header(transparent).height) == (21, 9)
