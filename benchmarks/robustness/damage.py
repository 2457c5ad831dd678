"""Damages bytes at random: single bytes, runs of bytes, and values inside JSON, TOML or CSV text."""

import random
import re

VALUES = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"1180591620717411303424", b'""', b"[]", b"{}", b"[[]]"),
    *(b'"../x"', b'"\\ud800"', b'"' + b"a" * 5000 + b'"', b"[" * 2000, b'"\\u0000"', b"2026-13-41", b"=1+1"),
)
"""Values of a wrong type or out of bounds."""
_VALUE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null')


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with one to four random changes."""
    changed = content
    for _ in range(draw.randint(1, 4)):
        changed = draw.choice((_flipped, _cut, _doubled, _truncated, _replaced, _replaced))(changed, draw)
    return changed


def _flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]


def _cut(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + content[at + draw.randint(1, 40) :]


def _doubled(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + content[at : at + draw.randint(1, 40)] * 2 + content[at:]


def _truncated(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _replaced(content: bytes, draw: random.Random) -> bytes:
    """The text with one of its values replaced."""
    values = list(_VALUE.finditer(content))
    if not values:
        return content
    chosen = draw.choice(values)
    return content[: chosen.start()] + draw.choice(VALUES) + content[chosen.end() :]
