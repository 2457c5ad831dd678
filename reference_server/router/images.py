"""Images in prompts, as Markdown `![](…)`: plain text for a text model, refused for a model that would see them.

No model that this server runs looks at images (http-api.md sections 3.7 and 5.5). A router may still stand before a
foreign model server of such a model; its prompts are refused with TGI's texts rather than read as text.
"""

import base64
import binascii
import re

from reference_server.errors import ValidationError

#: `model_type` of the models whose prompts hold images.
IMAGE_MODELS = frozenset({
    "idefics", "mllama", "idefics2", "idefics3", "gemma3", "llama4", "paligemma", "llava_next", "qwen2_vl",
    "qwen2_5_vl",
})  # fmt: skip

_IMAGE = re.compile(r"!\[\]\(([^)]*)\)")
_SHOWN_CHARACTERS = 100


def refuse_images(prompt: str) -> None:
    """Raise `ValidationError` for the first image of `prompt`."""
    match = _IMAGE.search(prompt)
    if match is None:
        return
    content = match[1]
    if content.startswith(("http://", "https://")):
        raise ValidationError("Could not fetch image: remote images are disabled")
    mime, separator, payload = content.removeprefix("data:").partition(";base64,")
    if not content.startswith("data:") or not separator or ";" in mime + payload:
        raise ValidationError(f"invalid image content: {content[:_SHOWN_CHARACTERS]}")
    try:
        base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValidationError(f"base64 encoding is invalid: {error}") from None
    raise ValidationError("invalid image: the model server does not take images")
