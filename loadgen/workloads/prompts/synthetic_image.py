"""A synthetic image: a PNG file of a given size, made from a key, and its forms in requests."""

import base64
import hashlib
import random
import re
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

EXAMPLE = "640x480"
MAX_SIDE = 8_192
TILE = 16
"""Pixels of a side of the coloured squares: a picture that is not flat, and compresses well."""


@dataclass(frozen=True, slots=True)
class SyntheticImage:
    """One image; equal keys and sizes give equal bytes."""

    key: str
    width: int
    height: int

    @property
    def data_url(self) -> str:
        return f"data:image/png;base64,{self.base64}"

    @property
    def base64(self) -> str:
        return _base64_png(self.key, self.width, self.height)


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WxH` in pixels. Raises ValueError.

    >>> parse_size("640x480")
    (640, 480)
    """
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip())
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise ValueError(f"{text!r} is not WxH in pixels, each from 1 to {MAX_SIDE}, as in {EXAMPLE}")
    return width, height


@lru_cache(maxsize=64)
def _base64_png(key: str, width: int, height: int) -> str:
    return base64.b64encode(png(key, width, height)).decode("ascii")


def png(key: str, width: int, height: int) -> bytes:
    """A PNG of eight bits in RGB: squares of colours that follow from the key."""
    columns, rows = -(-width // TILE), -(-height // TILE)
    colours = random.Random(hashlib.sha256(key.encode()).digest()).randbytes(3 * columns * rows)
    lines = []
    for row in range(rows):
        own = colours[3 * columns * row : 3 * columns * (row + 1)]
        line = b"".join(own[3 * column : 3 * column + 3] * TILE for column in range(columns))[: 3 * width]
        # Each line begins with its filter: none.
        lines.append((b"\0" + line) * min(TILE, height - TILE * row))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(lines), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
