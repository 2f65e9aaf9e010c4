"""Decodes image files with Pillow to upright RGB pixels on a white background."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from afterglow.errors import InvalidMedia
from afterglow.media.budget import DECODE_BUDGET
from afterglow.media.image_header import InvalidImageHeader, read_image_header
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.media.types import ImageData

# Pillow's other decoders never see a file.
DECODERS: dict[str, type[ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
EXIF_ORIENTATION_TAG = 0x0112
EXIF_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LOW_DETAIL_SIDE_PIXELS = 512
DECODE_BYTES_PER_PIXEL = 16  # at the peak: four images of four bytes per pixel, if the file has transparency


def decode_image(
    data: bytes, policy: MediaPolicy = INLINE_ONLY, *, source: str = "the image", detail: str = "auto"
) -> ImageData:
    """Decode an image file. `detail="low"` scales it down to at most 512 by 512 pixels. `source` names it in errors.

    >>> file = io.BytesIO()
    >>> Image.new("LA", (4, 2), (0, 0)).save(file, "PNG")
    >>> decode_image(file.getvalue()).pixels == b"\\xff" * 24
    True
    """
    try:
        header = read_image_header(data)
    except InvalidImageHeader as error:
        raise InvalidMedia(source, f"{error}") from None
    check_image_size(header.width, header.height, policy, source)
    if header.animated:
        raise InvalidMedia(source, "it is animated: send one of its frames")
    with DECODE_BUDGET.reserve(DECODE_BYTES_PER_PIXEL * header.width * header.height, policy.max_decoded_bytes):
        try:
            with DECODERS[header.format](io.BytesIO(data)) as file:
                check_image_size(*file.size, policy, source)
                image = _to_upright_rgb(file)
        except InvalidMedia:
            raise
        except Exception as error:  # any exception of a decoder is caused by the file
            raise InvalidMedia(source, f"the {header.format} file is damaged ({error})") from None
        if detail == "low":
            image.thumbnail((LOW_DETAIL_SIDE_PIXELS, LOW_DETAIL_SIDE_PIXELS), Image.Resampling.BICUBIC)
        return ImageData(width=image.width, height=image.height, pixels=image.tobytes())


def check_image_size(width: int, height: int, policy: MediaPolicy, source: str) -> None:
    """Raise `InvalidMedia` if an image is empty or exceeds the size limits."""
    if width < 1 or height < 1:
        raise InvalidMedia(source, f"{width} by {height} pixels is not a valid size")
    if max(width, height) > policy.max_side_pixels or width * height > policy.max_pixels:
        limit = f"the limit is {policy.max_side_pixels:,} per side and {policy.max_pixels:,} in total"
        raise InvalidMedia(source, f"it has {width:,} by {height:,} pixels, {limit}: scale it down")


def _to_upright_rgb(file: ImageFile) -> Image.Image:
    """Convert to 8-bit RGB, rotate by the EXIF orientation, and composite transparency on white."""
    try:
        orientation = int(file.getexif().get(EXIF_ORIENTATION_TAG, 1))
    except Exception:  # malformed EXIF is common and does not affect the pixels
        orientation = 1
    file.load()
    image: Image.Image = file
    if image.mode.startswith("I"):  # 16-bit grayscale
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image if image.mode == "RGB" else image.convert("RGB")
    return image.transpose(EXIF_TRANSPOSES[orientation]) if orientation in EXIF_TRANSPOSES else image
