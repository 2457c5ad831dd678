"""Fleet sizes by rate and balancing policy."""

import itertools
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from tests.tuner.simulator.test_simulation import ToyLaw
from tuner.simulator.capacity_planning import fleet_size
from tuner.simulator.capacity_planning.attainment import FleetVerdict
from tuner.simulator.capacity_planning.fleet import HASHED_TOKENS, POLICIES, Fleet, FleetRun, ServedRequests
from tuner.simulator.capacity_planning.fleet_size import LatencySlo, attained, size_fleet
from tuner.simulator.replica_state import Flight
from tuner.simulator.simulation import NS_PER_S, PlannedRequest, SimulatedLoad, SimulatedReplica, Simulation
from tuner.simulator.step_ranges import RangeUse

SLO = LatencySlo({"ttft": 1000.0, "tpot": 60.0}, 0.95)
# Policies that other tests of the short suite simulate too.
ELSEWHERE = ("random", "round_robin", "least_loaded")


def planned(seed: int) -> Iterator[PlannedRequest]:
    rng = random.Random(seed)
    while True:
        yield PlannedRequest(rng.randint(50, 400), rng.randint(5, 40))


FLEET = Fleet(SchedulerOptions(1000, 8000, 0.3, 20, block_size=16), ToyLaw(), planned)


def test_two_choices_takes_the_busier_of_two_replicas_only_if_it_draws_no_other():
    choose = POLICIES["two_choices"](1)
    replicas = [SimpleNamespace(in_system=5), SimpleNamespace(in_system=0)]

    chosen = [choose(None, replicas) for _ in range(400)]

    assert chosen.count(0) / 400 == pytest.approx(1 / 4, abs=0.08)


@pytest.mark.slow
def test_simulation_V15_replicas_never_fall_when_the_rate_rises():
    sized = [size_fleet(FLEET, SLO, rate, "round_robin", effort=0.05) for rate in (5, 20, 40)]

    counts = [each.at.replicas for each in sized]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


@pytest.mark.slow
def test_simulation_V15_a_lost_replica_never_improves_attainment():
    sized = size_fleet(FLEET, SLO, 40, "round_robin", effort=0.05)

    assert sized.below is not None
    assert sized.below.replicas == sized.at.replicas - 1
    assert sized.below.attainment <= sized.at.attainment
    assert not sized.below.is_sufficient
    assert sized.below.attainment < SLO.attainment <= sized.at.lower


@pytest.mark.slow
def test_trust_W8_a_fleet_that_looks_sufficient_from_an_empty_start_is_refused():
    # 98 % of the capacity of 4 replicas. The first 1,000 requests of a run are within the limits, later ones are not.
    point = attained(FLEET, SLO, 75, 4, "two_choices", effort=0.1)

    assert point.attainment > SLO.attainment
    assert not point.is_sufficient


def test_trust_W8_requests_of_the_empty_start_do_not_count(monkeypatch: pytest.MonkeyPatch):
    """Runs whose first quarter is in time at no load, and of whose others 90 % are."""

    class FromEmptyStart:
        utilisation = 0.5
        ranges = RangeUse()

        def __init__(self, *_: object) -> None: ...

        def first(self, requests: int) -> ServedRequests:
            number = np.arange(requests)
            is_early = number < requests // 4
            met = is_early | (number % 10 > 0)
            times_ms = np.where(is_early, 1.0, 100.0)
            return ServedRequests(number / 75, number / 75 + 1, met, times_ms, times_ms, times_ms)

    monkeypatch.setattr(fleet_size, "FleetRun", FromEmptyStart)

    point = attained(FLEET, SLO, 75, 4, "two_choices")

    assert point.attainment == pytest.approx(0.9, abs=1e-3)
    assert (point.ttft_p50_ms, point.tpot_mean_ms) == (100.0, 100.0)


@pytest.mark.slow
def test_trust_W8_the_refused_fleet_breaks_its_promise_in_a_run_of_40_000():
    served = FleetRun(FLEET, SLO.limits_ms, 75, 4, "two_choices", seed=11).first(40_000)

    early, late = served.is_met[:1000].mean(), served.is_met[10_000:].mean()
    assert early > 0.99
    assert late < 0.9


def test_trust_P1_a_fleet_beyond_its_capacity_is_refused_because_its_queue_grows():
    lax = LatencySlo({"e2e": 60_000.0}, 0.9)

    point = attained(FLEET, lax, 84, 4, "two_choices", effort=0.03)

    assert point.verdict is FleetVerdict.GROWS
    assert point.attainment == 1.0


@pytest.mark.slow
def test_trust_P1_the_named_fleet_is_the_smallest_at_90_percent_of_the_capacity_of_three():
    # The capacity of one replica is 19.1 requests/s.
    sized = size_fleet(FLEET, SLO, 0.9 * 3 * 19.1, "two_choices", effort=0.1)

    assert sized.at.replicas in (3, 4)
    assert sized.at.verdict is FleetVerdict.MEETS
    assert sized.below is not None
    assert sized.below.verdict is not FleetVerdict.MEETS


def test_a_run_goes_on_where_it_stopped():
    whole = FleetRun(FLEET, SLO.limits_ms, 30, 2, "random", seed=3).first(600)
    run = FleetRun(FLEET, SLO.limits_ms, 30, 2, "random", seed=3)

    run.first(200)
    extended = run.first(600)

    assert (extended.end_s == whole.end_s).all()
    assert (extended.in_system == whole.in_system).all()


@pytest.mark.parametrize(
    "policy", [pytest.param(each, marks=pytest.mark.slow) if each in ELSEWHERE else each for each in POLICIES]
)
def test_a_policy_reaches_every_replica(policy: str):
    point = attained(FLEET, SLO, 30, 4, policy, effort=0.03)

    assert 0 < point.utilisation < 1
    assert point.attainment > 0.5


@pytest.mark.parametrize("seed", range(4))
def test_a_hash_of_the_prefix_sends_a_group_of_prompts_to_one_replica(seed: int):
    def planned(_: int) -> Iterator[PlannedRequest]:
        for number in itertools.count():
            group = number % 8
            ids = (*range(1000 * group, 1000 * group + HASHED_TOKENS), 10**6 + number)
            yield PlannedRequest(len(ids), 4, None, ids)

    load = SimulatedLoad(itertools.islice(planned(0), 80), times_ns=range(0, 80 * NS_PER_S, NS_PER_S))
    replicas: dict[int, set[int]] = {}
    policy = POLICIES["prefix_hash"](seed)

    def choose(flight: Flight, servers: Sequence[SimulatedReplica]) -> int:
        chosen = policy(flight, servers)
        assert flight.ids is not None
        replicas.setdefault(flight.ids[0], set()).add(chosen)
        return chosen

    Simulation(load, [(FLEET.rule, FLEET.law)] * 3, policy=choose).run()

    assert len(replicas) == 8
    assert {len(chosen) for chosen in replicas.values()} == {1}
    assert len(set().union(*replicas.values())) > 1


def test_the_requests_of_a_replica_follow_littles_law():
    point = attained(FLEET, SLO, 30, 4, "two_choices", effort=0.1)
    served = FleetRun(FLEET, SLO.limits_ms, 30, 4, "two_choices", seed=99).first(2000)

    mean_s = float((served.end_s - served.sent_s).mean())
    # Requests of other seeds: their mean is within a quarter, far from a factor of 4.
    assert point.requests_per_replica == pytest.approx(30 * mean_s / 4, rel=0.25)


def test_least_loaded_has_a_lower_ttft_than_random():
    by_chance = attained(FLEET, SLO, 45, 5, "random", effort=0.03)
    by_load = attained(FLEET, SLO, 45, 5, "least_loaded", effort=0.03)

    assert by_load.ttft_p95_ms < by_chance.ttft_p95_ms
