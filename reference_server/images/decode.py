"""Decodes an image of a client, within limits that the file's header already breaks."""

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF")
"""The decoders that may run. Pillow has many more, which only few people test."""
MAX_PIXELS = 50_000_000
"""Of one image: 150 MB decoded."""
MAX_RATIO = 200
"""Of the longer to the shorter side: a model sees nothing in a line of pixels, and Transformers' resizing fails."""


class ImageError(Exception):
    """The image cannot be decoded, or is larger than the limits allow."""


def decode(data: bytes) -> "Image":
    """The first frame of an image in RGB. Raises ImageError; allocates nothing for an image that is too large."""
    return _opened(data, lambda image: image.convert("RGB"))


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height by the file's header. Raises ImageError."""
    return _opened(data, lambda image: image.size)


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
    except Exception as error:  # decoders raise whatever their format's libraries do
        raise ImageError(f"it cannot be decoded: {error or type(error).__name__}") from error


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(f"it has {width} x {height} pixels, but at most {MAX_PIXELS} are decoded: send a smaller one")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"it has {width} x {height} pixels, but a side may be at most {MAX_RATIO} times the other")
