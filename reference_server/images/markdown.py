"""Finds the images of a prompt, which are Markdown images without a caption."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

from reference_server.errors import ValidationError
from reference_server.messages import Image, InputChunk

_OPENING, _CLOSING = "![](", ")"
_SHOWN_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The address of an image in a prompt: of any scheme, not checked."""

    url: str

    @property
    def is_remote(self) -> bool:
        return self.url.startswith(("http://", "https://"))


def split_prompt(prompt: str) -> Iterator[str | ImageSource]:
    """The text and the images of a prompt, in order; no text is empty.

    >>> list(split_prompt("See ![](http://h/a.png), please"))
    ['See ', ImageSource(url='http://h/a.png'), ', please']
    """
    # A regular expression would search the rest of the prompt from each opening.
    while prompt:
        text, opening, rest = prompt.partition(_OPENING)
        url, closing, rest = rest.partition(_CLOSING)
        if not opening or not closing:
            yield prompt
            return
        if text:
            yield text
        yield ImageSource(url)
        prompt = rest


def image_of_data_url(url: str) -> Image:
    """The image in a `data:` URL of a client. Raises ValidationError with TGI's texts."""
    mime, separator, payload = url.removeprefix("data:").partition(";base64,")
    if not url.startswith("data:") or not separator or ";" in mime + payload:
        raise ValidationError(f"invalid image content: {url[:_SHOWN_CHARACTERS]}")
    try:
        return Image(base64.b64decode(payload, validate=True), mime)
    except binascii.Error as error:
        raise ValidationError(f"base64 encoding is invalid: {error}") from None


def chunks_of_flat(prompt: str) -> tuple[InputChunk, ...]:
    """The chunks of a prompt that a router flattened for schema v2. Everything except images in base64 is text."""
    return tuple(part if isinstance(part, str) else _image_or_text(part.url) for part in split_prompt(prompt))


def _image_or_text(url: str) -> InputChunk:
    # TGI's router sends a warm-up whose mimetype is `image/jpeg;base64`.
    head, _, payload = url.partition(",")
    if head.startswith("data:") and head.endswith(";base64"):
        try:
            return Image(base64.b64decode(payload, validate=True), head.removeprefix("data:").partition(";")[0])
        except binascii.Error:
            pass
    return f"{_OPENING}{url}{_CLOSING}"
