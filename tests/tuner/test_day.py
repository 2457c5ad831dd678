"""A fleet that follows the day."""

from hypothesis import given
from hypothesis import strategies as st

from tuner.day import Day, day_of


def test_a_replica_starts_before_its_hour_and_is_kept_for_its_dwell():
    day = day_of([1, 3, 1, 1], start_delay_s=900, min_dwell_s=7200)

    assert day == Day((1, 3, 1, 1), (1, 3, 3, 1), 0.5)
    assert (day.hours, day.static_hours) == (8.5, 12.0)


def test_without_delay_and_dwell_what_is_needed_runs():
    assert day_of([2, 5, 1]) == Day((2, 5, 1), (2, 5, 1), 0.0)


@given(st.lists(st.integers(1, 50), min_size=24, max_size=24), st.floats(0, 100_000))
def test_what_is_needed_always_runs_and_no_more_than_the_peak(needed: list[int], dwell_s: float):
    day = day_of(needed, min_dwell_s=dwell_s)

    assert all(least <= count <= max(needed) for least, count in zip(needed, day.running, strict=True))
    assert day.hours <= day.static_hours
