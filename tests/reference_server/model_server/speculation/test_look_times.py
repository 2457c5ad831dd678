"""The steps in which drafts are looked for."""

import doctest

from reference_server.model_server.speculation import look_times
from reference_server.model_server.speculation.look_times import LookTimes


def steps_until_a_look(looks: LookTimes, rows: tuple[str, ...] = ()) -> int:
    count = 0
    while looks.rest(rows):
        looks.stepped()
        count += 1
    return count


def test_doctests() -> None:
    assert doctest.testmod(look_times).failed == 0


def test_looks_without_drafts_are_ever_further_apart_and_one_with_drafts_ends_that() -> None:
    looks, waited = LookTimes(), []
    for has_drafts in (False, False, False, False, False, True, True, False, False):
        waited.append(steps_until_a_look(looks))
        looks.looked(has_drafts, longest=6)
        looks.stepped()

    assert waited == [0, 0, 1, 3, 5, 5, 0, 0, 0]


def test_a_right_guess_shortens_the_next_pauses() -> None:
    looks = LookTimes()
    for _ in range(4):
        looks.looked(has_drafts=False, longest=8)
    looks.stepped()
    assert steps_until_a_look(looks) == 7

    looks.look_again()
    looks.looked(has_drafts=False, longest=8)
    looks.stepped()

    assert steps_until_a_look(looks) == 0


def test_rows_with_pauses_of_their_own_are_left_alone_as_long_as_they_are_the_batch() -> None:
    looks = LookTimes()
    looks.none_due(("a", "b"), 3)

    assert looks.rest(("a", "b", "c")) == 0
    assert looks.rest(("a", "b")) == 3
    assert steps_until_a_look(looks, ("a", "b")) == 3
