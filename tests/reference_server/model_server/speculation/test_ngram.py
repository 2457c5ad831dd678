"""N-gram drafts: the longest earlier match, of equal ones the latest, found while the ids grow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference_server.model_server.speculation.ngram import LONGEST, NO_DRAFT, SHORTEST, FirstMatch, SuffixIndex

ids_of_few = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def test_the_longest_match_is_followed_and_of_equal_ones_the_latest() -> None:
    assert SuffixIndex().draft([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1).ids == [7]
    assert SuffixIndex().draft([2, 3, 7, 9, 2, 3, 8, 2, 3], 2).ids == [8, 2]


def test_there_is_no_draft_without_two_equal_tokens() -> None:
    assert SuffixIndex().draft([1, 2, 3, 2], 4) == NO_DRAFT
    assert SuffixIndex().draft([5], 4) == NO_DRAFT


def test_a_repetition_is_continued_past_the_known_ids() -> None:
    assert SuffixIndex().draft([9, 1, 2, 3, 1, 2, 3], 7).ids == [1, 2, 3, 1, 2, 3, 1]


@given(ids_of_few)
def test_the_match_is_the_longest_there_is(ids: list[int]) -> None:
    draft = SuffixIndex().draft(ids, 1)

    matches = [
        (length, end)
        for end in range(1, len(ids) - 1)
        for length in range(SHORTEST, LONGEST + 1)
        if end + 1 >= length and ids[end + 1 - length : end + 1] == ids[-length:]
    ]
    if not matches:
        assert draft == NO_DRAFT
    else:
        length, end = max(matches)
        assert draft == ([ids[end + 1]], length)


@given(ids_of_few, st.integers(1, 5))
def test_an_index_that_grew_equals_a_new_one(ids: list[int], step: int) -> None:
    grown = SuffixIndex()

    for known in range(1, len(ids) + 1, step):
        assert grown.draft(ids[:known], 3) == SuffixIndex().draft(ids[:known], 3)


def tgi_draft(before: list[int], newest: int, count: int) -> list[int]:
    """TGI's arithmetic on tensors. before: the ids before the step that chose `newest`."""
    matches = np.array(before) == newest
    places = np.argmax(matches) + 1 + np.arange(count)
    return [before[place] for place in np.minimum(places, len(before) - 1)]


@given(ids_of_few, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6))
def test_the_rule_of_tgi_gives_the_drafts_of_tgi(prompt: list[int], steps: list[list[int]]) -> None:
    ngrams, ids = FirstMatch(), list(prompt)
    # The step of the prompt chooses one token.
    for chosen in [steps[0][:1], *steps]:
        before = list(ids)
        ids.extend(chosen)

        assert ngrams.draft(ids, 4).ids == tgi_draft(before, ids[-1], 4)
