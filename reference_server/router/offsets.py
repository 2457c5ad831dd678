"""Where each token stands in its text, as the tokenize routes tell it: in bytes of UTF-8."""

from collections.abc import Sequence
from typing import Any


def simple_tokens(text: str, tokens: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Tokens with offsets in UTF-8 bytes of `text`, from offsets in characters.

    >>> simple_tokens("hé yo", [(7, 3, 5)])
    [{'id': 7, 'text': 'yo', 'start': 4, 'stop': 6}]
    """
    starts = [0]
    for character in text:
        starts.append(starts[-1] + len(character.encode()))
    return [
        {"id": token_id, "text": text[start:stop], "start": starts[start], "stop": starts[stop]}
        for token_id, start, stop in tokens
    ]
