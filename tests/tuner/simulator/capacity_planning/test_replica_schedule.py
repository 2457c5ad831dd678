"""The replicas of each hour of a day."""

from hypothesis import given
from hypothesis import strategies as st

from tuner.simulator.capacity_planning.replica_schedule import ReplicaSchedule, replica_schedule


def test_a_replica_starts_before_its_hour_and_is_kept_for_its_dwell():
    schedule = replica_schedule([1, 3, 1, 1], start_delay_s=900, min_dwell_s=7200)

    assert schedule == ReplicaSchedule((1, 3, 1, 1), (1, 3, 3, 1), 0.5)
    assert (schedule.hours, schedule.static_hours) == (8.5, 12.0)


def test_without_delay_and_dwell_exactly_the_needed_replicas_run():
    assert replica_schedule([2, 5, 1]) == ReplicaSchedule((2, 5, 1), (2, 5, 1), 0.0)


@given(st.lists(st.integers(1, 50), min_size=24, max_size=24), st.floats(0, 100_000))
def test_the_needed_replicas_always_run_and_never_more_than_the_peak(needed: list[int], dwell_s: float):
    schedule = replica_schedule(needed, min_dwell_s=dwell_s)

    assert all(least <= count <= max(needed) for least, count in zip(needed, schedule.running, strict=True))
    assert schedule.hours <= schedule.static_hours
