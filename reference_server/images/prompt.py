"""A prompt whose images have been read: its texts and images, in order. Pure."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from reference_server.messages import Image, InputChunk


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image that decodes, and the text that stands for it in the prompt."""

    image: Image
    text: str


PromptPart = str | PromptImage


def chunks_of(parts: Iterable[PromptPart]) -> tuple[InputChunk, ...]:
    """The prompt as the model server receives it."""
    return tuple(part if isinstance(part, str) else part.image for part in parts)


def digest_of(image: Image) -> int:
    """SHA-256 of the encoded image."""
    return int.from_bytes(hashlib.sha256(image.data).digest())
