"""N-gram drafts: the tokens that followed an earlier occurrence of a request's last tokens."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

SHORTEST, LONGEST = 2, 4
"""Smallest and largest length of a match, in tokens."""
MOST_CANDIDATES = 32
"""Largest number of earlier occurrences of the last two tokens to compare, the latest first."""

NGRAM_PRIORS = (0.5, 0.3, 0.3, 0.5, 0.7)
"""Acceptance by the length of the match until outcomes are known: a longer match predicts better."""


class NgramRule(StrEnum):
    """suffix: after the longest match of the last 2 to 4 tokens. tgi: after the first occurrence of the last token."""

    SUFFIX = "suffix"
    TGI = "tgi"


class NgramDraft(NamedTuple):
    """Ids that may follow those of a request. match_len: length of the match, at most LONGEST."""

    ids: list[int]
    match_len: int


NO_DRAFT = NgramDraft([], 0)


class SuffixIndex:
    """Finds earlier occurrences of the last ids of one request. Ids may be added between calls.

    Chains of equal pairs, as in LZ77: `_earlier[i]` is the last index before i at which the same two tokens end; 0 if
    there is none, because no pair ends at index 0.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []

    def draft(self, ids: Sequence[int], count: int) -> NgramDraft:
        """`count` ids that may follow `ids`, prompt and output; none if the last two ids do not occur before.

        >>> SuffixIndex().draft([1, 2, 3, 9, 2, 3], 2)
        NgramDraft(ids=[9, 2], match_len=2)
        >>> SuffixIndex().draft([7, 5, 6, 5, 6], 5).ids
        [5, 6, 5, 6, 5]
        """
        self._extend(ids)
        end, match_len = self._longest_match(ids)
        return NgramDraft(follow(ids, end + 1, count), match_len) if end else NO_DRAFT

    def _extend(self, ids: Sequence[int]) -> None:
        latest, earlier = self._latest, self._earlier
        if not earlier:
            earlier.append(0)
        for end in range(len(earlier), len(ids)):
            pair = ids[end - 1], ids[end]
            earlier.append(latest.get(pair, 0))
            latest[pair] = end

    def _longest_match(self, ids: Sequence[int]) -> tuple[int, int]:
        """The end of the longest earlier match (the latest of equal ones) and its length; (0, 0) without one."""
        end = len(ids) - 1
        candidate = self._earlier[end]
        best, best_len = 0, 0
        for _ in range(MOST_CANDIDATES):
            if not candidate:
                break
            length = SHORTEST
            while length < LONGEST and candidate >= length and ids[candidate - length] == ids[end - length]:
                length += 1
            if length > best_len:
                best, best_len = candidate, length
            if length == LONGEST:
                break
            candidate = self._earlier[candidate]
        return best, best_len


def follow(ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids from `start` on; at the end of `ids`, the copy starts again at `start`."""
    period = len(ids) - start
    return [ids[start + step % period] for step in range(count)]


class FirstMatch:
    """TGI's rule: the ids after the first occurrence of the last id, for a request alone in its batch.

    TGI searches only the ids from before the last step. At their end it repeats the last of these ids. If there is no
    occurrence, it drafts from position 1 on (TGI, server/text_generation_server/utils/tokens.py). In a batch, TGI
    drafts zeros at the end of every request except the longest.
    """

    def __init__(self) -> None:
        self._num_known = 0

    def draft(self, ids: Sequence[int], count: int) -> NgramDraft:
        """`count` ids that may follow `ids`. `ids` has at least two ids, and had fewer before the last step.

        >>> FirstMatch().draft([4, 7, 8, 9, 7], 3).ids, FirstMatch().draft([4, 5, 6], 4).ids
        ([8, 9, 9], [5, 5, 5, 5])
        """
        end = min(self._num_known or len(ids), len(ids) - 1)
        self._num_known = len(ids)
        try:
            start = ids.index(ids[-1], 0, end) + 1
        except ValueError:
            start = 1
        return NgramDraft([ids[min(start + step, end - 1)] for step in range(count)], 1)
