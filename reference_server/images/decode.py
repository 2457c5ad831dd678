"""Decodes a client's image. The file's header decides on limits, before any pixel is decoded.

An image is turned by its EXIF orientation, as `transformers.image_utils.load_image` does.
"""

import io
import struct
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF")
"""The decoders that may run. Many others of Pillow are rarely tested."""
MAX_PIXELS = 50_000_000
"""The limit of one image, which takes 150 MB decoded."""
MAX_RATIO = 200
"""The limit of the longer side over the shorter one: Transformers cannot resize a line of pixels."""


_TURNED = 5
"""The first orientation that exchanges width and height."""
_EXIF_MARKS = (b"eXIf", b"Raw profile type exif")
"""Before EXIF data in a PNG, in front of its pixels or behind them."""


class ImageError(Exception):
    """The image cannot be decoded, or is larger than the limits allow."""


def decode(data: bytes) -> "Image":
    """The first frame of an image in RGB, upright. Raises ImageError; allocates nothing for one that is too large."""
    return _opened(data, lambda image: _upright(image, data))


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of the upright image, by the file's header. Raises ImageError."""
    return _opened(data, lambda image: image.size[::-1] if _orientation(image, data) >= _TURNED else image.size)


def _upright(image: "Image", data: bytes) -> "Image":
    from PIL.Image import Transpose

    orientation = _orientation(image, data)
    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return (image.transpose(methods[orientation]) if orientation in methods else image).convert("RGB")


def _orientation(image: "Image", data: bytes) -> int:
    """The EXIF orientation, from 1 to 8; 1 if the file has none, or none that can be read."""
    from PIL.ExifTags import Base

    if image.format == "TIFF":
        # Pillow turns these itself, the size included.
        return 1
    if image.format == "PNG" and not any(mark in data for mark in _EXIF_MARKS):
        # Pillow would decode the pixels to look for EXIF data behind them.
        return 1
    try:
        orientation = image.getexif().get(Base.Orientation, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error):
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _opened(data: bytes, read: Callable[["Image"], T]) -> T:
    # In the router's process nothing needs Pillow.
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # Files with odd metadata, and sizes at which Pillow warns of a decompression bomb.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(*image.size)
            return read(image)
    except (ImageError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"it has more than {MAX_PIXELS} pixels: send a smaller one") from None
    except UnidentifiedImageError:
        raise ImageError(f"its format is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # a decoder raises the exceptions of its library
        raise ImageError(f"it cannot be decoded: {error or type(error).__name__}") from error


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(f"it has {width} x {height} pixels, but at most {MAX_PIXELS} are decoded: send a smaller one")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"it has {width} x {height} pixels, but a side may be at most {MAX_RATIO} times the other")
