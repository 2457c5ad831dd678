"""The message in the body of an error response, in the forms of OpenAI, TGI, FastAPI and Anthropic, or plain text."""

import json
from typing import Any


def message_of(body: bytes) -> str:
    """One line without surrounding space; empty if the body has no text.

    >>> message_of(b'{"error": {"message": "image input is not supported", "code": 500}}')
    'image input is not supported'
    >>> message_of(b'{"error": "`inputs` is empty", "error_type": "validation"}')
    '`inputs` is empty'
    """
    text = body.decode(errors="replace")
    try:
        found = _message(json.loads(text))
    except (ValueError, RecursionError):
        found = "" if text.lstrip().startswith("<") else text
    return " ".join(found.split())


def _message(content: Any) -> str:
    """The text under `error`, `message` or `detail`, at any depth of these; FastAPI has a list of errors."""
    match content:
        case str():
            return content
        case {"error": inner} | {"message": inner} | {"detail": inner} | {"msg": inner} | [inner, *_]:
            return _message(inner)
    return ""
