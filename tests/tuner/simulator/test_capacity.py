"""Fleet sizes by rate and balancing policy, and the replicas of each hour of a day."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.router.scheduling.scheduler import SchedulerOptions
from tests.tuner.simulator.test_engine import ToyLaw
from tuner.simulator.capacity import (
    POLICIES,
    Fleet,
    LatencySlo,
    ReplicaSchedule,
    attained,
    replica_schedule,
    size_fleet,
)
from tuner.simulator.engine import PlannedRequest

SLO = LatencySlo({"ttft": 1000.0, "tpot": 60.0}, 0.95)


def planned(seed: int) -> Callable[[int], Sequence[PlannedRequest]]:
    rng = random.Random(seed)
    return lambda count: [PlannedRequest(rng.randint(50, 400), rng.randint(5, 40)) for _ in range(count)]


FLEET = Fleet(SchedulerOptions(1000, 8000, 0.3, 20, block_size=16), ToyLaw(), planned)


def test_simulation_V15_replicas_never_fall_when_the_rate_rises():
    sized = [size_fleet(FLEET, SLO, rate, "round_robin", effort=0.05) for rate in (5, 20, 60)]

    counts = [each.at.replicas for each in sized]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_simulation_V15_a_lost_replica_never_improves_attainment():
    sized = size_fleet(FLEET, SLO, 60, "round_robin", effort=0.05)

    assert sized.one_lost is not None
    assert sized.one_lost.replicas == sized.at.replicas - 1
    assert sized.one_lost.attainment <= sized.at.attainment
    assert sized.one_lost.lower < SLO.attainment <= sized.at.lower


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_reaches_every_replica(policy: str):
    point = attained(FLEET, SLO, 30, 4, policy, effort=0.03)

    assert 0 < point.utilisation < 1
    assert point.attainment > 0.5


def test_least_loaded_has_a_lower_ttft_than_random():
    by_chance = attained(FLEET, SLO, 45, 5, "random", effort=0.1)
    by_load = attained(FLEET, SLO, 45, 5, "least_loaded", effort=0.1)

    assert by_load.ttft_p95_ms < by_chance.ttft_p95_ms


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
