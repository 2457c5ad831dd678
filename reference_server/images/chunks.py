"""Chunks of prompts whose images attend to themselves in both directions: no chunk ends within such an image.

Pure. Router and model server cut by this rule, so that they count the same tokens.
"""

from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""First and end of the tokens of an image."""


def spans_of(ids: Iterable[int], token_id: int) -> tuple[Span, ...]:
    """The runs of the image token among the ids of a prompt.

    >>> spans_of([7, 5, 5, 5, 8, 5], token_id=5)
    ((1, 4), (5, 6))
    """
    spans: list[Span] = []
    for place, id_ in enumerate(ids):
        if id_ != token_id:
            continue
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return tuple(spans)


def uncut(start: int, count: int, spans: Sequence[Span]) -> int:
    """The tokens of a chunk from `start`: `count`, or as many that the chunk ends before or after an image.

    It ends after the image only if it starts there; then it may have more than `count` tokens.

    >>> uncut(0, 8, [(5, 12)]), uncut(5, 3, [(5, 12)]), uncut(0, 12, [(5, 12)])
    (5, 7, 12)
    """
    end = start + count
    for first, last in spans:
        if first < end < last:
            return (first if first > start else last) - start
    return count
