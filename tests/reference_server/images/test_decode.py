"""Decoding of images within limits."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image
from transformers.image_utils import load_image

from reference_server.images.decode import ImageError, decode, size_of


def encoded(width: int, height: int, form: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), 77 if mode in "LP" else None).save(file, form, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header has this size; its few bytes of data decompress to fewer rows."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_every_allowed_format_is_decoded_to_rgb(form: str) -> None:
    image = decode(encoded(7, 5, form))

    assert (image.mode, image.size) == ("RGB", (7, 5))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA"])
def test_other_pixels_become_rgb(mode: str) -> None:
    assert decode(encoded(3, 2, mode=mode)).mode == "RGB"


def test_size_is_read_without_the_pixels() -> None:
    assert size_of(png_of_size(640, 480)) == (640, 480)


def photographed(form: str, orientation: int) -> bytes:
    """An image of 5 x 3 different pixels whose EXIF data has this orientation."""
    pixels = np.random.default_rng(3).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_transformers_turns_it(form: str, orientation: int) -> None:
    data = photographed(form, orientation)
    expected = load_image(base64.b64encode(data).decode())

    image = decode(data)

    assert (image.mode, image.size) == ("RGB", expected.size)
    assert image.tobytes() == expected.tobytes()
    assert size_of(data) == expected.size
    assert expected.size == ((5, 3) if orientation < 5 else (3, 5))


def test_the_orientation_of_a_png_may_stand_behind_its_pixels() -> None:
    data = photographed("PNG", 6)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4])
    last = data.index(b"IEND") - 4
    moved = data[:start] + data[end:last] + data[start:end] + data[last:]

    assert decode(moved).tobytes() == decode(data).tobytes()
    assert size_of(moved) == size_of(data) == (3, 5)


def test_exif_data_that_cannot_be_read_turn_no_image() -> None:
    file = io.BytesIO()
    Image.new("RGB", (5, 3)).save(file, "JPEG", exif=b"Exif\0\0no tiff header")

    assert decode(file.getvalue()).size == size_of(file.getvalue()) == (5, 3)


@pytest.mark.parametrize("form", ["BMP", "PPM", "ICO", "EPS"])
def test_formats_of_rarely_used_decoders_are_refused(form: str) -> None:
    with pytest.raises(ImageError, match="its format is none of PNG, JPEG, GIF, WEBP, TIFF"):
        decode(encoded(16, 16, form))


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (9000, "it has 9000 x 9000 pixels, but at most 50000000 are decoded"),
        (60_000, "it has more than 50000000 pixels"),
    ],
)
def test_reliability_T9_a_decompression_bomb_is_refused_by_its_header(side: int, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        decode(png_of_size(side, side))


def test_a_line_of_pixels_is_refused() -> None:
    with pytest.raises(ImageError, match="it has 1 x 201 pixels, but a side may be at most 200 times the other"):
        decode(encoded(1, 201))


def test_a_truncated_image_is_refused() -> None:
    with pytest.raises(ImageError, match="it cannot be decoded: "):
        decode(encoded(300, 300, "JPEG")[:-200])


def test_bytes_that_are_no_image_are_refused() -> None:
    with pytest.raises(ImageError, match="its format is none of"):
        decode(b"not an image")
