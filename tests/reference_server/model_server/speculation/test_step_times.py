"""Times of served steps: medians, an optimistic start, and times that are forgotten."""

import pytest

from reference_server.model_server.speculation.step_cost import StepCost, by_rows
from reference_server.model_server.speculation.step_times import (
    FEWEST,
    FORGOTTEN_AFTER,
    KEPT,
    MOST_FACTOR,
    UNCORRECTED,
    UNTRIED,
    Correction,
    StepTimes,
)

COST = StepCost(by_rows({1: 100.0, 128: 1370.0}, 128))


def times(plain_ns: float = 250.0, num_rows: int = 1) -> StepTimes:
    made = StepTimes(COST)
    for _ in range(FEWEST):
        made.add_plain(num_rows, plain_ns)
    return made


def test_nothing_is_corrected_before_some_steps() -> None:
    made = StepTimes(COST)
    made.add_plain(1, 900.0)

    assert made.correction(1) == UNCORRECTED
    assert made.wants_plain(1)


def test_a_served_step_takes_longer_than_that_of_the_warm_up_and_drafts_are_tried() -> None:
    assert times().correction(1) == Correction(250.0, UNTRIED)
    assert not times().wants_plain(1)


def test_sizes_of_one_number_of_digits_share_the_time_beyond_the_step() -> None:
    made = times(plain_ns=400.0, num_rows=8)

    assert made.plain_ns(12) == pytest.approx(400.0 + 40.0)
    assert made.plain_ns(16) is None


def test_the_cost_of_drafts_is_the_median_of_real_ones() -> None:
    made = times()
    for added in (90.0, 100.0, 110.0, 105.0, 9000.0):
        made.add_drafted(1, 50.0, 250.0 + added)

    assert made.correction(1).factor == pytest.approx(105.0 / 50.0)


def test_an_absurd_time_counts_for_a_bounded_factor() -> None:
    made = times()
    for _ in range(KEPT):
        made.add_drafted(1, 50.0, 1e9)

    assert made.correction(1).factor == MOST_FACTOR


def test_drafts_that_were_dear_are_tried_again_after_many_plain_steps() -> None:
    made = times()
    for _ in range(KEPT):
        made.add_drafted(1, 50.0, 1000.0)
    for _ in range(FORGOTTEN_AFTER * (KEPT - FEWEST) - FEWEST):
        made.add_plain(1, 250.0)
    assert made.correction(1).factor == MOST_FACTOR

    for _ in range(FORGOTTEN_AFTER):
        made.add_plain(1, 250.0)
    assert made.correction(1).factor == UNTRIED


def test_many_drafted_steps_in_a_row_are_followed_by_a_plain_one() -> None:
    made = times()
    for _ in range(FORGOTTEN_AFTER):
        assert not made.wants_plain(1)
        made.add_drafted(1, 50.0, 300.0)

    assert made.wants_plain(1)
    made.add_plain(1, 250.0)
    assert not made.wants_plain(1)
