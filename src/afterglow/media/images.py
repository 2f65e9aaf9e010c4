"""Picture files as pixels: red, green and blue, the right way up, on white. Pillow decodes."""

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
from afterglow.media.image_header import InvalidImageHeader, read_image_header
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.media.types import ImageData

# These and no others: what else Pillow can read never sees the file.
DECODERS: dict[str, type[ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
EXIF_ORIENTATION_TAG = 0x0112  # in EXIF
EXIF_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LOW_DETAIL_SIDE_PIXELS = 512  # pixels of a picture of which only the rough shape is asked for


def decode_image(
    data: bytes, policy: MediaPolicy = INLINE_ONLY, *, source: str = "the picture", detail: str = "auto"
) -> ImageData:
    """The picture in a file. `detail` "low" makes it no larger than 512 by 512 pixels.

    >>> file = io.BytesIO()
    >>> Image.new("LA", (4, 2), (0, 0)).save(file, "PNG")
    >>> picture_of(file.getvalue()).pixels == b"\\xff" * 24
    True
    """
    try:
        shape = read_image_header(data)
    except InvalidImageHeader as error:
        raise InvalidMedia(source, f"{error}") from None
    check_image_size(shape.width, shape.height, policy, source)
    if shape.animated:
        raise InvalidMedia(source, "it is animated: send one of its pictures")
    try:
        with DECODERS[shape.format](io.BytesIO(data)) as file:
            check_image_size(*file.size, policy, source)
            clean = _to_upright_rgb(file)
    except InvalidMedia:
        raise
    except Exception as error:  # whatever a decoder stumbles over, the file made it
        raise InvalidMedia(source, f"the {shape.format} file is damaged ({error})") from None
    if detail == "low":
        clean.thumbnail((LOW_DETAIL_SIDE_PIXELS, LOW_DETAIL_SIDE_PIXELS), Image.Resampling.BICUBIC)
    return ImageData(width=clean.width, height=clean.height, pixels=clean.tobytes())


def check_image_size(width: int, height: int, policy: MediaPolicy, source: str) -> None:
    """`InvalidMedia` where a picture is larger than it may be."""
    if width < 1 or height < 1:
        raise InvalidMedia(source, f"{width} by {height} pixels are no picture")
    if max(width, height) > policy.max_side_pixels or width * height > policy.max_pixels:
        limit = f"a side may have {policy.max_side_pixels:,} and all of it {policy.max_pixels:,}"
        raise InvalidMedia(source, f"it has {width:,} by {height:,} pixels, {limit}: scale it down")


def _to_upright_rgb(file: ImageFile) -> Image.Image:
    """Eight bits of red, green and blue, the right way up, and white where one can see through."""
    turn = EXIF_TRANSPOSES.get(_read_orientation(file))
    file.load()
    image: Image.Image = file
    if image.mode.startswith("I"):  # 16 bits of grey
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image if image.mode == "RGB" else image.convert("RGB")
    return image if turn is None else image.transpose(turn)


def _read_orientation(file: ImageFile) -> int:
    """How a camera was held; upright where that cannot be read."""
    try:
        return int(file.getexif().get(EXIF_ORIENTATION_TAG, 1))
    except Exception:  # EXIF is written by anybody, and the picture does not depend on it
        return 1
