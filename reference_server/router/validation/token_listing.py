"""The tokens of a text as the tokenize routes return them, rendered as JSON in a thread, in short pieces.

Between two pieces other threads get the interpreter lock: one call for all tokens would stop every stream.
"""

from collections.abc import Iterator, Sequence

import orjson

PIECE = 2048
"""Tokens that are rendered at once: under a millisecond."""


def render_tokens(text: str, tokens: Sequence[tuple[int, int, int]]) -> bytes:
    """A JSON array of tokens with offsets in UTF-8 bytes of `text`, from (id, start, stop) in characters.

    >>> render_tokens("hé yo", [(7, 3, 5)])
    b'[{"id":7,"text":"yo","start":4,"stop":6}]'
    """
    return b"[%b]" % b",".join(_pieces(text, tokens))


def _pieces(text: str, tokens: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
    starts = [0]
    for character in text:
        starts.append(starts[-1] + len(character.encode()))
    for first in range(0, len(tokens), PIECE):
        piece = [
            {"id": token_id, "text": text[start:stop], "start": starts[start], "stop": starts[stop]}
            for token_id, start, stop in tokens[first : first + PIECE]
        ]
        yield orjson.dumps(piece)[1:-1]
