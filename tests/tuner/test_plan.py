"""Fleets: how many replicas a rate needs, and what a policy makes of them."""

import random
from collections.abc import Callable, Sequence

import pytest

from reference_server.router.scheduler import SchedulerOptions
from tests.tuner.test_simulate import ToyLaw
from tuner.plan import POLICIES, Fleet, Promise, attained, size_fleet
from tuner.simulate import Ask

PROMISE = Promise({"ttft": 1000.0, "tpot": 60.0}, 0.95)


def asks(seed: int) -> Callable[[int], Sequence[Ask]]:
    rng = random.Random(seed)
    return lambda count: [Ask(rng.randint(50, 400), rng.randint(5, 40)) for _ in range(count)]


FLEET = Fleet(SchedulerOptions(1000, 8000, 0.3, 20, block_size=16), ToyLaw(), asks)


def test_simulation_V15_replicas_never_fall_when_the_rate_rises():
    sized = [size_fleet(FLEET, PROMISE, rate, "round_robin", effort=0.05) for rate in (5, 20, 60)]

    counts = [each.at.replicas for each in sized]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_simulation_V15_a_lost_replica_never_improves_attainment():
    sized = size_fleet(FLEET, PROMISE, 60, "round_robin", effort=0.05)

    assert sized.one_lost is not None
    assert sized.one_lost.replicas == sized.at.replicas - 1
    assert sized.one_lost.attainment <= sized.at.attainment
    assert sized.one_lost.lower < PROMISE.attainment <= sized.at.lower


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_reaches_every_replica(policy: str):
    point = attained(FLEET, PROMISE, 30, 4, policy, effort=0.03)

    assert 0 < point.utilisation < 1
    assert point.attainment > 0.5


def test_looking_at_load_beats_chance():
    by_chance = attained(FLEET, PROMISE, 45, 5, "random", effort=0.1)
    by_load = attained(FLEET, PROMISE, 45, 5, "least_loaded", effort=0.1)

    assert by_load.ttft_p95_ms < by_chance.ttft_p95_ms
